"""The planner's interface: errors, order strategies, caching, several buffers, no torch."""

import os
import subprocess
import sys

import numpy as np
import pytest

from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.planner import (
    ORDERS,
    bound_group,
    fullest_numel,
    plan,
    plan_buffers,
    plan_group,
    register_order,
    split_trainable,
)
from ragged_fsdp.planner.group import _plan_kinds


def specs_of(*pairs):
    return [TensorSpec(f"w{i}", numel, block) for i, (numel, block) in enumerate(pairs)]


def test_importing_the_planner_does_not_import_torch():
    code = "import sys, ragged_fsdp.planner, ragged_fsdp.policy; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_digests_agree_between_processes():
    """Other hash seeds are what other ranks have: nothing may depend on the order of a set."""
    code = (
        "from ragged_fsdp.planner import plan_group, TensorSpec\n"
        "pairs = [(2048 * 64, 16 * 64), (64 * 2048, 16 * 2048)] * 40\n"
        "pairs += [(999, 1), (5000, 1), (640, 64), (96, 32)]\n"
        "specs = [TensorSpec(str(i), n, b) for i, (n, b) in enumerate(pairs)]\n"
        "print([plan_group(specs, m).digest for m in (7, 24, 61)])"
    )
    outputs = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        outputs.add(run.stdout)
    assert len(outputs) == 1


def test_defined_answers_for_nothing():
    assert plan([], [], 3, 128) == (0, [])
    assert plan([0, 0], [1, 5], 3, 128) == (0, [0, 0])
    shard, offsets = plan([0, 10, 0], [4, 5, 1], 2, 1)
    assert shard == 5 and offsets == [0, 0, 0]
    assert plan_group([], 7).proven_optimal


def test_one_rank_needs_no_padding_but_the_unit():
    layout = plan_group(specs_of((1000, 10), (77, 7)), 1, unit=8)
    assert layout.shard_numel == 1080 and layout.proven_optimal


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan([10], [4], 2, 1), "tensor 0: block of 4 elements does not divide numel 10"),
        (lambda: plan([4, -4], [1, 1], 2, 1), "tensor 1: numel must be at least 0, got -4"),
        (lambda: plan([4], [0], 2, 1), "tensor 0: block_numel must be at least 1, got 0"),
        (lambda: plan([4.5], [1], 2, 1), "tensor 0: size must be an integer, got 4.5"),
        (lambda: plan([True], [1], 2, 1), "tensor 0: size must be an integer, got True"),
        (lambda: plan([4], [1], 0, 1), "ranks must be at least 1, got 0"),
        (lambda: plan([4], [1], 1, 0), "unit must be at least 1, got 0"),
        (lambda: plan([4], [1], 1, 1, align=0), "align must be at least 1, got 0"),
        (lambda: plan([4, 4], [1], 1, 1), "got 2 sizes and 1 blocks"),
        (lambda: plan([2**63], [1], 1, 1), "tensor 0: numel must fit in int64"),
        (lambda: plan([2**62, 2**62], [1, 1], 2, 1), "do not fit in int64"),
        (lambda: plan_group(specs_of((4, 1)) * 2, 2), "w0: the name occurs twice"),
        (lambda: plan_group(specs_of((4, 1)), 2.0), "ranks must be an int, got 2.0"),
        (lambda: plan_group(specs_of((4, 1)), 2, order="bets"), "order must be one of best, default, block"),
        (lambda: plan_group(specs_of((4, 1)), 2, order=lambda kinds: [1]), "return each index below 1 once"),
        (
            lambda: plan_buffers(specs_of((4, 1)), 2, max_buffers=0),
            "max_buffers must be an int of at least 1",
        ),
        (lambda: plan_buffers(specs_of((4, 1)), 2, threshold=1.5), r"threshold must be in \[0, 1\)"),
        (lambda: plan(None, [1], 1, 1), "sizes must be a sequence of integers, got None"),
        (lambda: plan([4], {1}, 1, 1), "blocks must be a sequence of integers, got {1}"),
        (lambda: plan_group(None, 2), "specs must be a sequence of TensorSpecs, got None"),
        (lambda: plan_group([(4, 1)], 2), r"specs must hold TensorSpecs, got \(4, 1\) in it"),
        (lambda: plan_group(specs_of((4, 1)), 2, order=3), "order must be a name or a function, got 3"),
        (lambda: bound_group(specs_of((4, 1)), 0), "bound_group: ranks must be at least 1, got 0"),
        (lambda: register_order("third", 3), "expected a name and a function, got 'third' and 3"),
        (lambda: GroupLayout([4], 1, 1, 4, [0], 0), "specs must hold TensorSpecs, got 4 in it"),
    ],
)
def test_bad_input_raises_one_clear_line(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_sizes_near_the_end_of_int64():
    shard, offsets = plan([2**62, 2**61], [1, 2**60], 4, 1)
    assert 4 * shard >= 2**62 + 2**61 and len(offsets) == 2
    assert plan([2**62], [1], 2, 1) == (2**61, [0])


def test_numpy_integers_are_integers():
    sizes, blocks = np.array([12, 9], dtype=np.int32), np.array([4, 3])
    assert plan(sizes, blocks, np.int64(3), 1) == plan([12, 9], [4, 3], 3, 1)


def test_orders_are_strategies():
    group = specs_of((5, 1), (12, 4), (30, 5), (8, 8))
    placed = {}
    for name in ORDERS:
        layout = plan_group(group, 3, unit=1, order=name)
        placed[name] = sorted(range(4), key=lambda i: layout.offsets[i])
    assert placed == {"default": [0, 1, 2, 3], "block": [3, 2, 1, 0], "numel": [2, 1, 3, 0]}
    backwards = plan_group(group, 3, unit=1, order=lambda kinds: range(len(kinds) - 1, -1, -1))
    assert sorted(range(4), key=lambda i: backwards.offsets[i]) == [3, 2, 1, 0]


def test_orders_plug_in_by_name():
    register_order("smallest", lambda kinds: sorted(range(len(kinds)), key=lambda i: kinds[i]))
    try:
        layout = plan_group(specs_of((30, 5), (0, 1), (5, 1), (8, 8)), 2, unit=1, order="smallest")
        assert [layout.offsets[i] for i in (2, 3, 0)] == sorted(layout.offsets[i] for i in (2, 3, 0))
        with pytest.raises(ValueError, match="'smallest' is taken"):
            register_order("smallest", lambda kinds: [])
        with pytest.raises(ValueError, match="'best' is taken"):
            register_order("best", lambda kinds: [])
    finally:
        del ORDERS["smallest"]


def test_equal_layers_are_planned_once():
    _plan_kinds.cache_clear()
    layers = [
        [
            TensorSpec(f"layers.{k}.{s.name}", s.numel, s.block_numel)
            for s in specs_of((96, 8), (50, 1), (60, 12))
        ]
        for k in range(60)
    ]
    layouts = [plan_group(layer, 8) for layer in layers]
    assert _plan_kinds.cache_info().misses == 1
    assert len({layout.offsets for layout in layouts}) == 1
    assert len({layout.digest for layout in layouts}) == 60  # names are part of what ranks compare


def test_the_default_is_never_worse_than_a_named_order():
    group = specs_of(*[(2048 * 64, 16 * 64), (64 * 2048, 16 * 2048)] * 9, (999, 1), (64 * 64, 64))
    for ranks in (3, 7, 16, 40):
        best = plan_group(group, ranks, unit=16)
        assert all(
            best.shard_numel <= plan_group(group, ranks, unit=16, order=name).shard_numel for name in ORDERS
        )


def test_alignment_of_offsets_and_shards():
    layout = plan_group(specs_of((7, 1), (9, 3), (10, 5), (64, 8)), 3, unit=1, align=8)
    assert layout.shard_numel % 8 == 0 and all(offset % 8 == 0 for offset in layout.offsets)


def test_buffers_are_split_only_where_it_pays():
    expert = 2880 * 5760 * 128
    group = [TensorSpec("up", expert, 128 * 5760), TensorSpec("down", expert // 2, 128 * 2880)]
    group.append(TensorSpec("attention", 24_000_000))
    one = plan_buffers(group, 1024)
    two = plan_buffers(group, 1024, max_buffers=2)
    many = plan_buffers(group, 1024, max_buffers=8)
    assert len(one) == 1 and len(two) == len(many) == 2
    assert sum(layout.padding_numel for layout in two) < one[0].padding_numel / 2
    assert sorted(spec.name for layout in two for spec in layout.specs) == ["attention", "down", "up"]
    assert len(plan_buffers(group, 1024, max_buffers=2, threshold=0.5)) == 1  # does not save half
    assert len(plan_buffers(specs_of((64, 1), (32, 1)), 4, max_buffers=4)) == 1  # nothing to gain
    assert len(plan_buffers([], 4, max_buffers=2)) == 1


def test_trainable_tensors_are_split_off_where_they_pile_up():
    specs = specs_of((4096, 1), (512, 1), (4096, 1), (512, 1))
    trains = [False, True, False, True]
    layout = plan_group(specs, 8)
    assert fullest_numel(layout, [1, 3]) == 512  # a share of 128 each would be even
    assert split_trainable(layout, trains) == ([0, 2], [1, 3])
    assert split_trainable(layout, trains, share=4.0) is None
    assert split_trainable(layout, [True] * 4) is None
    assert split_trainable(layout, [False] * 4) is None
    assert split_trainable(plan_group(specs, 1), trains) is None
    assert split_trainable(plan_group(specs_of((900, 1), (100, 1)), 4), [False, True]) is None  # too few
    with pytest.raises(ValueError, match="got 1 flags for 4 tensors"):
        split_trainable(layout, [True])


def test_the_fullest_rank_where_the_last_block_is_short():
    """Tiles of 2 x 4 over (5, 5), whose edges are smaller: units are then elements, not blocks."""
    layout = plan_group([TensorSpec("frozen", 64), TensorSpec("tiled", 25, 16, (2, 4))], 2, unit=1)
    assert fullest_numel(layout, [1]) == max(layout.local_range(1, rank).numel for rank in range(2)) == 25
