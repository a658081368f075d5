"""The arithmetic of ragged placements: no process group."""

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from ragged_fsdp import Elements, RaggedShard, Rows, StridedRaggedShard, Whole
from ragged_fsdp.dtensor import legal_granularity, placement_from_layout
from ragged_fsdp.dtensor.geometry import compute_layout
from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.placement import block_numel, ragged_dims
from ragged_fsdp.routes import flat_boxes


def test_the_drawing_of_the_module_docstring():
    layout = [compute_layout((6, 4), (4,), (r,), (RaggedShard((0,), (1, 0, 3, 2)),)) for r in range(4)]
    assert [part.local_shape for part in layout] == [(1, 4), (0, 4), (3, 4), (2, 4)]
    owners = "".join("abcd"[r] for r in range(4) for _ in range(layout[0].counts[r] // 4))
    assert owners == "acccdd"


def test_equality_is_of_layouts():
    assert RaggedShard((0,), (2, 4)) == RaggedShard(0, [1, 2]) != RaggedShard((0, 1), (1, 2))
    assert RaggedShard((0,), (1, 2)) != StridedRaggedShard((0,), (1, 2))
    assert len({RaggedShard((0,), (1, 2)), RaggedShard((0,), (3, 6)), Shard(0)}) == 2
    assert StridedRaggedShard((0,), ((1, 2), (2, 4))) == StridedRaggedShard((0,), (1, 2))
    assert repr(RaggedShard((0,), (2, 4))) == "RaggedShard(dims=(0,), local_units=(1, 2))"
    for placement in (RaggedShard((0, 1), (1, 0, 2)), StridedRaggedShard((0,), ((1, 2), (2, 0)))):
        for twin in (pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement), eval(repr(placement))):
            assert twin == placement and hash(twin) == hash(placement) and type(twin) is type(placement)
        assert placement.is_shard() and not (placement.is_replicate() or placement.is_partial())
        assert not placement.is_shard(0) and getattr(placement, "dim", None) is None
        with pytest.raises(AttributeError, match="has no dim: its pieces are runs of the flattened tensor"):
            _ = placement.dim
        buffer = io.BytesIO()
        torch.save({"placement": placement}, buffer)
        buffer.seek(0)
        assert torch.load(buffer, weights_only=True)["placement"] == placement


def test_placements_over_many_ranks_are_short_to_read_and_quick_to_compare():
    ranks = 65536
    units = (3, *(5,) * 1000, 1, 2, *(0,) * (ranks - 1003))
    placement, twin = RaggedShard((0,), units), RaggedShard((0,), list(units))
    assert repr(placement) == (
        f"RaggedShard(dims=(0,), local_units=(3,) + (5,) * 1000 + (1, 2) + (0,) * {ranks - 1003})"
    )
    assert eval(repr(placement)) == placement
    assert placement.local_units is not twin.local_units and placement == twin
    assert placement._key is twin._key, "what was found equal must not be compared unit by unit again"
    assert placement != RaggedShard((0,), (*units[:-1], 1))
    rows = StridedRaggedShard((0,), ((1, 2),) * 20 + ((2, 0),))
    assert repr(rows) == "StridedRaggedShard(dims=(0,), local_units=((1, 2),) * 20 + ((1, 0),))"
    assert eval(repr(rows)) == rows


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RaggedShard((1,), (1, 1)), ValueError, r"prefix .* got \(1,\)"),
        (lambda: RaggedShard((0.0,), (1, 1)), TypeError, r"dims must be integers, got \(0.0,\)"),
        (lambda: RaggedShard(None, (1, 1)), TypeError, "dims must be integers, got None"),
        (lambda: RaggedShard((0,), 2), TypeError, "local_units, one per rank, must be integers, got 2"),
        (lambda: StridedRaggedShard((0,), None), TypeError, "must be integers, got None"),
        (lambda: RaggedShard((0,), torch.ones(2)), TypeError, "must be integers"),
        (lambda: RaggedShard((0,), (1, -1)), ValueError, r"negative, got \(1, -1\)"),
        (lambda: RaggedShard((0,), (1, 0.5)), TypeError, "must be integers"),
        (lambda: RaggedShard((0,), (True, 1)), TypeError, "must be integers"),
        (lambda: RaggedShard((0,), ()), ValueError, "got none"),
        (lambda: RaggedShard((0,), (0, 0)), ValueError, "not all be 0"),
        (lambda: RaggedShard((0,), ((1, 2), (2, 0))), TypeError, "must be integers"),
        (lambda: StridedRaggedShard((0,), ((1, 2), (2,))), ValueError, "all as long"),
        (lambda: StridedRaggedShard((0,), ((0, 0), (0, 0))), ValueError, "not all be 0"),
        (lambda: RaggedShard.even((8, 6), 0), ValueError, "ranks must be at least 1"),
        (lambda: RaggedShard.even((8, 6), 2, Rows(3)), ValueError, "18 elements does not divide the 48"),
        (lambda: RaggedShard.even((8, 6), 2, (3, 6)), ValueError, "3 does not divide dim 0"),
        (lambda: RaggedShard.even((8, 6), 2, (2,)), ValueError, "one positive size per dim"),
        (lambda: RaggedShard.even((8, 6), 2, 4), TypeError, "granularity must be Elements, .* got 4"),
        (
            lambda: RaggedShard.even((8, 6), 2, "rows"),
            TypeError,
            "granularity must be Elements, .* got 'rows'",
        ),
        (lambda: RaggedShard.even((8, 6), 2.0), TypeError, "ranks must be an integer, got 2.0"),
        (lambda: RaggedShard.even(8, 2), TypeError, "shape must be integers, got 8"),
        (lambda: RaggedShard.even((-8, 6), 2), ValueError, r"shape must not be negative, got \(-8, 6\)"),
        (lambda: RaggedShard.by_weights((8, 6), (1, -1)), ValueError, "non-negative"),
        (lambda: RaggedShard.by_weights((8, 6), ("a", 1)), TypeError, "weights must be numbers"),
        (lambda: RaggedShard.on_one_rank((8, 6), 2, 1.0), TypeError, "root must be an integer, got 1.0"),
        (lambda: legal_granularity((8, 6), Rows(1), (Shard(2),)), ValueError, r"does not fit shape \(8, 6\)"),
        (lambda: legal_granularity((8, 6), Rows(1), (1,)), TypeError, "must be placements, got 1"),
        (lambda: RaggedShard.on_one_rank((8, 6), 2, 2), ValueError, r"root must be in \[0, 2\), got 2"),
    ],
)
def test_bad_placements(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_builders():
    assert RaggedShard.even((8, 6), 4, Rows(1)) == RaggedShard((0,), (2, 2, 2, 2))
    assert RaggedShard.even((7, 6), 4, Rows(1)) == RaggedShard((0,), (2, 2, 2, 1))
    assert RaggedShard.even((64, 8), 3, (32, 8)) == RaggedShard((0,), (1, 1, 0))
    assert RaggedShard.even((2, 8), 4, Elements(4)) == RaggedShard((0, 1), (1, 1, 1, 1))
    assert RaggedShard.by_weights((8, 6), (3, 0, 1), Rows(2)) == RaggedShard((0,), (3, 0, 1))
    assert RaggedShard.on_one_rank((8, 6), 3, 1) == RaggedShard((0,), (0, 1, 0))
    assert RaggedShard.even((8, 6), 2, Whole()) == RaggedShard((0,), (1, 0))
    assert isinstance(StridedRaggedShard.even((8, 6), 2, Rows(4)), StridedRaggedShard)
    assert block_numel((128, 64), (32, 32)) == 32 * 64
    assert block_numel((4, 128, 64), (1, 32, 64)) == 32 * 64
    assert block_numel((4, 64), (1, 16)) == 16
    assert ragged_dims((4, 6, 5), 30) == (0,) and ragged_dims((4, 6, 5), 10) == (0, 1)
    assert ragged_dims((4, 6, 5), 7) == (0, 1, 2) and ragged_dims((), 1) == ()


def test_granularity_beside_other_placements():
    """The paper's rule: never cut into the dim that a Shard to the right cuts."""
    assert legal_granularity((8, 6), Elements(4), (Shard(1),)) == 12
    assert legal_granularity((8, 6), Elements(4), (Replicate(),)) == 4
    assert legal_granularity((8, 6), Rows(2), (Shard(1),)) == 12
    assert legal_granularity((4, 6, 5), Elements(3), (Shard(-1), Shard(1))) == 30
    assert legal_granularity((4, 6, 5), Elements(10), (Shard(2),)) == 10


def test_placement_from_a_planned_group():
    specs = (TensorSpec("a", 48, 12), TensorSpec("b", 10, 1))
    layout = GroupLayout(specs=specs, ranks=3, unit=1, shard_numel=24, offsets=(0, 48), lower_bound=20)
    assert placement_from_layout(layout, 0, (8, 6)) == RaggedShard((0,), (1, 1, 0))
    assert placement_from_layout(layout, 1, (5, 2)) == RaggedShard((0,), (0, 0, 1))  # no cut in a row
    assert type(placement_from_layout(layout, 0, (8, 6), strided=True)) is StridedRaggedShard
    with pytest.raises(ValueError, match=r"a: shape \(4, 6\) has 24 elements, layout has 48"):
        placement_from_layout(layout, 0, (4, 6))
    with pytest.raises(ValueError, match=r"index must be in \[0, 2\), the tensors of the group, got 2"):
        placement_from_layout(layout, 2, (8, 6))


def test_rows_stay_rows_where_no_cut_falls_inside_one():
    """However fine the blocks of the plan are: the parameter and its buffer ask with different ones."""

    def placed(shard_numel: int, block: int) -> RaggedShard:
        specs = (TensorSpec("w", 24, block),)
        layout = GroupLayout(specs, ranks=4, unit=1, shard_numel=shard_numel, offsets=(0,), lower_bound=0)
        return placement_from_layout(layout, 0, (4, 3, 2))

    assert placed(12, 1) == placed(12, 4) == placed(12, 12) == RaggedShard((0,), (1, 1, 0, 0))
    assert placed(8, 1) == placed(8, 2) == placed(8, 8) == RaggedShard((0, 1), (1, 1, 1, 0))
    assert placed(7, 1) == RaggedShard((0, 1, 2), (7, 7, 7, 3))


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(shape=SHAPES, data=st.data())
def test_boxes_tile_the_interval_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    elements = torch.arange(numel).view(shape)
    boxes = flat_boxes(shape, start, stop)
    assert len(boxes) <= 2 * len(shape) - 1
    parts = []
    for offsets, sizes in boxes:
        part = elements[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]
        parts += part.reshape(-1).tolist()
        assert part.reshape(-1).diff().eq(1).all()  # contiguous: a view of the piece
    assert parts == list(range(start, stop))


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(shape=SHAPES, ranks=st.integers(1, 5), data=st.data())
def test_layouts_partition_the_tensor(shape, ranks, data):
    prefix = data.draw(st.integers(1, len(shape)))
    rows = math.prod(shape[:prefix])
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1)))
    units = [b - a for a, b in itertools.pairwise([0, *cuts, rows])]
    placement = RaggedShard(range(prefix), units)
    layouts = [compute_layout(shape, (ranks,), (rank,), (placement,)) for rank in range(ranks)]
    assert [u * math.prod(shape[prefix:]) for u in units] == list(layouts[0].counts)
    position = 0
    for layout in layouts:
        assert layout.start == position and math.prod(layout.local_shape) == layout.numel
        assert layout.local_shape[1:] == shape[prefix:]
        position = layout.stop
    assert position == math.prod(shape)
