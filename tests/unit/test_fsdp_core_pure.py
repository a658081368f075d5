"""Parts of the runtime that need no process group: gradient layouts, scaling, nested values."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_fsdp.fsdp.autograd import cast_floating, map_tensors
from ragged_fsdp.fsdp.gather_pool import pooled_bytes
from ragged_fsdp.fsdp.grad_layout import grad_layout
from ragged_fsdp.fsdp.plan import GroupPlan, GroupTensors, gathered_dtype, make_plan
from ragged_fsdp.fsdp.scaling import scaling

DTYPES = (torch.float32, torch.bfloat16, torch.int8)


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupPlan, list[bool]]:
    count = draw(st.integers(1, 6))
    shapes = [(draw(st.integers(0, 40)), draw(st.integers(1, 7))) for _ in range(count)]
    blocks = [draw(st.sampled_from([1, shape[1]])) for shape in shapes]
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(count)]
    ranks = draw(st.integers(1, 6))
    plan = make_plan(GroupTensors([f"p{i}" for i in range(count)], shapes, blocks, dtypes, None), ranks)
    return plan, [draw(st.booleans()) for _ in range(count)]


@settings(max_examples=150, deadline=None)
@given(groups())
def test_gradients_of_a_rank_lie_in_its_chunk(case: tuple[GroupPlan, list[bool]]) -> None:
    """Every trainable element once; each rank's chunk holds exactly its part of every tensor."""
    plan, trainable = case
    made = grad_layout(plan, trainable)
    taken: set[int] = set()
    for index, trains in enumerate(trainable):
        segments = made.segments[index]
        if not trains:
            assert not segments
            continue
        covered: list[int] = []
        for segment in segments:
            start = made.layout.offsets[segment.index]
            cells = range(start, start + segment.numel)
            assert taken.isdisjoint(cells)
            taken.update(cells)
            covered += range(segment.tensor_start, segment.tensor_start + segment.numel)
        rows, columns = plan.shapes[index]
        assert covered == list(range(rows * columns))
        for rank in range(plan.layout.ranks):
            part, piece = plan.local_range(index, rank), made.local_piece(index, rank)
            if not part.numel:
                assert piece is None
                continue
            number, local = piece
            segment = next(s for s in segments if s.index == number)
            assert (segment.tensor_start + local.tensor_start, local.numel) == (part.tensor_start, part.numel)
    if not all(trainable):
        assert made.layout.tensor_numel == len(taken)


def test_frozen_parameters_do_not_travel() -> None:
    """A small adapter beside a large frozen matrix: the gradient buffer has the size of the adapter."""
    names, shapes = ["frozen", "down", "up"], [(1024, 1024), (8, 1024), (1024, 8)]
    plan = make_plan(GroupTensors(names, shapes, [1, 1, 1], [torch.bfloat16] * 3, None), 8)
    made = grad_layout(plan, [False, True, True])
    assert plan.layout.buffer_numel >= 1024 * 1024
    assert made.layout.buffer_numel <= 8 * (8 * 1024 * 2)
    assert grad_layout(plan, [True] * 3).layout is plan.layout


@pytest.mark.parametrize(
    ("dtype", "ranks", "factor", "sum_only", "expected"),
    [
        (torch.float32, 8, None, False, (True, None, None)),
        (torch.float32, 1, None, False, (False, None, None)),
        (torch.bfloat16, 8, None, True, (False, None, 8.0)),
        (torch.float32, 8, 5.0, False, (False, None, 5.0)),
        (torch.float16, 8, None, False, (False, 4.0, 2.0)),
        (torch.float16, 6, None, False, (False, 4.0, 1.5)),
    ],
)
def test_scaling(
    dtype: torch.dtype, ranks: int, factor: float | None, sum_only: bool, expected: tuple
) -> None:
    made = scaling(dtype, ranks, factor, sum_only)
    assert (made.average, made.before, made.after) == expected
    if made.after is not None:
        assert (made.before or 1.0) * made.after == (factor or ranks)


def test_dtypes_that_are_never_cast() -> None:
    assert gathered_dtype(torch.float32, torch.bfloat16) == torch.bfloat16
    assert gathered_dtype(torch.int32, torch.bfloat16) == torch.int32
    assert gathered_dtype(torch.float8_e4m3fn, torch.bfloat16) == torch.float8_e4m3fn
    assert gathered_dtype(torch.float32, None) == torch.float32


def test_plans_do_not_depend_on_the_dtype() -> None:
    shapes = [(64, 33), (33,)]
    low, high = (
        make_plan(GroupTensors(["w", "b"], shapes, [1, 1], [torch.float32] * 2, dtype), 4)
        for dtype in (torch.bfloat16, None)
    )
    assert low.same_items and low.layout.shard_numel % 8 == 0 and high.layout.shard_numel % 4 == 0


Pair = namedtuple("Pair", "first second")


@dataclass
class Output:
    logits: torch.Tensor
    rest: dict
    name: str = "x"


class Mapping(OrderedDict):
    pass


def test_casts_reach_nested_values() -> None:
    x, ids = torch.ones(2), torch.ones(2, dtype=torch.int64)
    value = [Pair(x, (ids, {"a": x})), Output(x, {"b": [x]}), Mapping(c=x), {1, "text"}]
    cast = cast_floating(torch.bfloat16, value)
    assert cast[0].first.dtype == cast[0].second[1]["a"].dtype == torch.bfloat16
    assert cast[0].second[0] is ids
    assert isinstance(cast[1], Output) and cast[1].rest["b"][0].dtype == torch.bfloat16
    assert type(cast[2]) is Mapping and cast[2]["c"].dtype == torch.bfloat16
    assert (
        value[0].first is x and value[1].logits is x and value[2]["c"] is x
    )  # the caller's objects are not changed
    assert map_tensors(lambda t: t, value) is value


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], 0),
        ([20], 0),
        ([20, 20], 0),
        ([20, 20, 20, 50], 20),
        ([12, 12, 12, 20, 20, 20, 30, 30], 20),
        ([9, 9, 9, 30], 0),  # small blocks share segments anyway
        ([0, 0, 0], 0),
    ],
)
def test_the_gather_pool_is_for_the_size_of_the_layers(sizes: list[int], expected: int) -> None:
    assert pooled_bytes([mib << 20 for mib in sizes]) == expected << 20
