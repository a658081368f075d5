"""Layouts: what they compute, and that an invalid one cannot be built."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

import ragged_fsdp.layout
from ragged_fsdp.layout import GroupLayout, LocalRange, TensorSpec

SPECS = (TensorSpec("a", 10, 2), TensorSpec("b", 6, 3), TensorSpec("c", 5))


def drawn() -> GroupLayout:
    """The layout drawn in the module's docstring."""
    return GroupLayout(SPECS, ranks=3, unit=4, shard_numel=8, offsets=(0, 16, 10), lower_bound=8)


def test_the_docstring_draws_this_layout():
    cells = ["."] * 24
    for start, end, index in drawn().runs():
        if index is not None:
            cells[start:end] = "abc"[index] * (end - start)
    picture = "|".join(" ".join(cells[first : first + 8]) for first in (0, 8, 16))
    assert picture in ragged_fsdp.layout.__doc__


def test_local_parts_of_the_drawn_layout():
    layout = drawn()
    assert layout.local_units(0) == (4, 1, 0)
    assert layout.local_units(1) == (0, 0, 2)
    assert layout.local_units(2) == (0, 5, 0)
    assert layout.local_range(0, 0) == LocalRange(0, 0, 8)
    assert layout.local_range(0, 1) == LocalRange(0, 8, 2)
    assert layout.local_range(0, 2) == LocalRange(0, 10, 0)  # after the tensor
    assert layout.local_range(2, 0) == LocalRange(0, 0, 0)  # before the tensor
    assert layout.local_range(2, 1) == LocalRange(2, 0, 5)
    with pytest.raises(IndexError, match=r"rank must be in \[0, 3\)"):
        layout.local_range(0, 3)


def test_totals():
    layout = drawn()
    assert (layout.buffer_numel, layout.tensor_numel, layout.padding_numel) == (24, 21, 3)
    assert layout.padding_ratio == 3 / 21
    assert layout.proven_optimal and layout.gap_ratio == 0
    assert not replace(layout, lower_bound=4).proven_optimal
    assert replace(layout, lower_bound=4).gap_ratio == 1.0


def test_empty_groups_and_empty_tensors():
    empty = GroupLayout((), ranks=4, unit=128, shard_numel=0, offsets=(), lower_bound=0)
    assert empty.buffer_numel == 0 and empty.padding_ratio == 0.0 and empty.runs() == []
    nothing = GroupLayout((TensorSpec("z", 0, 7),), 4, 128, 0, (0,), 0)
    assert nothing.local_units(0) == (0, 0, 0, 0)
    assert nothing.local_range(0, 3) == LocalRange(0, 0, 0)


def test_digest_covers_everything_and_nothing_else():
    layout = drawn()
    assert layout.digest == drawn().digest
    renamed = replace(layout, specs=(TensorSpec("A", 10, 2), *SPECS[1:]))
    finer = replace(layout, specs=(TensorSpec("a", 10, 1), *SPECS[1:]))
    others = [
        renamed,
        finer,
        replace(layout, offsets=(0, 18, 10)),
        replace(layout, unit=2),
        replace(layout, align=2),
        replace(layout, lower_bound=4),
        replace(layout, ranks=4),
    ]
    assert len({layout.digest, *(other.digest for other in others)}) == len(others) + 1


def test_layouts_are_values():
    layout = drawn()
    assert layout == drawn() and hash(layout) == hash(drawn())
    assert pickle.loads(pickle.dumps(layout)) == layout == copy.deepcopy(layout)
    with pytest.raises(FrozenInstanceError):
        layout.unit = 1
    listed = GroupLayout(list(SPECS), 3, 4, 8, [0, 16, 10], 8)  # type: ignore[arg-type]
    assert listed == layout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": (0, 15, 10)}, r"b: the shard boundary at element 16 cuts a block: .* starts at 15"),
        ({"offsets": (0, 16, 9)}, r"c: starts at 9, inside the tensor before it, which ends at 10"),
        ({"offsets": (0, 19, 10)}, r"b: elements 19 to 25 leave the buffer of 24 elements"),
        ({"offsets": (-2, 16, 10)}, r"a: offset must be at least 0, got -2"),
        ({"offsets": (0.0, 16, 10)}, r"a: offset must be an int"),
        ({"offsets": (0, 16)}, r"3 tensors need as many offsets, got 2"),
        ({"align": 4}, r"c: offset 10 is not a multiple of align 4"),
        ({"unit": 5}, r"shard_numel 8 is not a multiple of unit 5"),
        ({"lower_bound": 12}, r"lower_bound 12 exceeds shard_numel 8"),
        ({"ranks": 0}, r"ranks must be at least 1, got 0"),
        ({"ranks": 2**62}, r"do not fit in int64"),
        ({"specs": (SPECS[0], SPECS[1], SPECS[0])}, r"a: the name occurs twice"),
    ],
)
def test_invalid_layouts_raise(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        replace(drawn(), **change)


def test_a_tensor_over_three_shards_needs_a_block_that_divides_the_shard():
    spec = (TensorSpec("long", 24, 3),)
    GroupLayout(spec, ranks=4, unit=1, shard_numel=9, offsets=(3,), lower_bound=1)
    with pytest.raises(ValueError, match="long: the shard boundary at element 16 cuts a block"):
        GroupLayout(spec, ranks=4, unit=1, shard_numel=8, offsets=(2,), lower_bound=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("w", 10, 4), r"w: block of 4 elements does not divide numel 10"),
        (("w", -1, 1), r"w: numel must be at least 0, got -1"),
        (("w", 4, 0), r"w: block_numel must be at least 1, got 0"),
        (("w", 2**63, 1), r"w: numel must fit in int64"),
        (("w", 4.0, 1), r"w: numel must be an int, got 4.0"),
        (("w", True, 1), r"w: numel must be an int, got True"),
        ((7, 4, 1), r"name must be a str, got 7"),
    ],
)
def test_invalid_specs_raise(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        TensorSpec(*arguments)
