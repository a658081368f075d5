"""Pure functions of the runtime, which need no process group: layouts, plans, scaling, casts, codes.

Of all tests only this file (and ``gpu/test_code_kernels.py``) imports parts of the runtime; what looks at its
state does so through ``fsdp_inside.py``.
"""

import ast
import logging
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_fsdp.dbuffer import FlatStorage
from ragged_fsdp.fsdp.autograd import cast_floating, map_tensors
from ragged_fsdp.fsdp.construct.network import pick_gather, pick_reduction
from ragged_fsdp.fsdp.gather import codes as quantized
from ragged_fsdp.fsdp.parts.plan import (
    GroupPlan,
    GroupTensors,
    chunk_plan,
    gathered_dtype,
    make_plan,
    rank_major,
)
from ragged_fsdp.fsdp.reduce.layout import GradLayout, GradRun, grad_layout, scaling
from ragged_fsdp.fsdp.reduce.sends import plan_sends, plan_steps, rounds_of
from ragged_fsdp.fsdp.streams import pooled_bytes
from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.planner import plan_group
from ragged_fsdp.topology import Levels

# -- the layout of gradients, scaling, values in containers --------------------------------------

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
        segments = made.runs[index]
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


# -- equal chunks: what ``Shard(dim)`` of torch gives each rank ---------------------------------------

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)


@given(st.lists(shapes, min_size=1, max_size=4), st.integers(1, 5))
@settings(max_examples=200)
def test_rows_are_torch_s_chunks(members, ranks):
    names = [f"p{i}" for i in range(len(members))]
    plan = chunk_plan(names, members, [torch.float32] * len(members), [0] * len(members), ranks)
    for index, shape in enumerate(members):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        chunks = list(whole.chunk(ranks))
        chunks += [whole[:0]] * (ranks - len(chunks))
        for rank, chunk in enumerate(chunks):
            assert torch.equal(plan.local_part(index, rank, whole), chunk.reshape(-1))
            assert plan.local_rows(index, rank)[1] == len(chunk)
            assert plan.local_range(index, rank).numel == chunk.numel()
            assert plan.chunk_rows(index) * plan.row_numel(index) >= chunk.numel()


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=60)
def test_the_rank_major_form_is_the_chunks_one_after_the_other(ranks, rows, other, dim):
    shape = [other, other + 1, other + 2]
    shape[dim] = ranks * rows
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    plan = chunk_plan(["p"], [shape], [torch.float32], [dim], ranks)
    major = rank_major(whole, dim, ranks)
    for rank in range(ranks):
        chunk = plan.local_part(0, rank, whole)
        assert torch.equal(major[rank].reshape(-1), chunk)
        part = plan.local_range(0, rank)
        assert torch.equal(major.reshape(-1)[part.tensor_start : part.tensor_start + part.numel], chunk)


def test_gradients_of_a_rank_lie_in_its_chunk_of_equal_rows():
    """7 rows of 2 on 3 ranks and 3 rows of 1: chunks of 3, 3, 1 and of 1, 1, 1 rows."""
    plan = chunk_plan(["a", "b"], [(7, 2), (3, 1)], [torch.float32] * 2, [0, 0], 3)
    layout = grad_layout(plan, [True, True])
    for rank, numels in enumerate(((6, 1), (6, 1), (2, 1))):
        for index, numel in enumerate(numels):
            piece = layout.local_piece(index, rank)
            assert piece is not None and piece[1].numel == numel


def test_ranks_compare_the_dims():
    plans = [chunk_plan(["p"], [(4, 4)], [torch.float32], [dim], 2) for dim in (0, 1)]
    assert plans[0].description != plans[1].description
    assert "p (4, 4)" in plans[0].description.splitlines()[0] and "Shard(1)" in plans[1].description


# -- the exchange: every element goes to its owner, once, at its place ---------------------------------


def _layout(numels, ranks, unit):
    specs = [TensorSpec(f"t{i}", numel) for i, numel in enumerate(numels)]
    layout = plan_group(specs, ranks, unit=unit)
    segments = tuple((GradRun(i, 0, n),) if n else () for i, n in enumerate(numels))
    return GradLayout(layout, tuple((n,) for n in numels), segments, True)


@given(
    numels=st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(any),
    ranks=st.integers(1, 7),
    unit=st.sampled_from([1, 4, 16]),
    rounds=st.integers(1, 4),
)
def test_every_element_arrives_once_at_its_place(numels, ranks, unit, rounds):
    layout = _layout(numels, ranks, unit)
    shard_numel = layout.layout.shard_numel
    expected = torch.zeros(ranks * shard_numel, dtype=torch.int64)
    grads, label = [], 1
    for index, numel in enumerate(numels):
        grads.append(torch.arange(label, label + numel))
        expected[layout.layout.offsets[index] : layout.layout.offsets[index] + numel] = grads[-1]
        label += numel
    plan = plan_sends(layout, ranks, rounds=rounds)
    pieces = [torch.split_with_sizes(g, sizes) if sizes else () for g, sizes in zip(grads, plan.cuts)]
    for rank in range(ranks):
        shard = torch.zeros(shard_numel, dtype=torch.int64)
        start, numel = plan.extents[rank]
        view = plan.views.get(rank)
        assert view is None or rank not in plan.packed
        if view is not None:
            sent = pieces[view[0]][view[1] : view[1] + rounds]
            assert [len(piece) for piece in sent] == rounds_of(numel, rounds)
            shard[start : start + numel] = torch.cat(sent)
        for index, piece, at in plan.packed.get(rank, ()):
            shard[at : at + len(pieces[index][piece])] = pieces[index][piece]
        assert torch.equal(shard, expected.view(ranks, shard_numel)[rank])
    assert all(len(content) > 1 for content in plan.packed.values())


@pytest.mark.parametrize("ranks", [8, 64])
def test_large_tensors_are_sent_without_a_copy(ranks):
    layout = _layout([2_000_000, 1_000_000, 64, 640, 64], ranks, 128)
    plan = plan_sends(layout, ranks)
    packed = sum(sum(plan.cuts[i][p] for i, p, _ in content) for content in plan.packed.values())
    assert packed <= 3 * layout.layout.shard_numel


# -- codes ---------------------------------------------------------------------------------------------


def test_without_triton_cuda_uses_torch_and_says_so(monkeypatch, caplog):
    choose = quantized.code_kernels.__wrapped__
    assert choose("cpu") is None
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, "ragged_fsdp"):
        assert choose("cuda") is None
    assert "Triton is not installed" in caplog.text


# -- who looks inside ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("domains", ["aabbccdd", "abcabc", "abbacc", "aaa"])
def test_what_a_step_sends_is_received_in_the_same_step(domains, rounds):
    """A rail runs its exchanges in order: a message that waited for a later one would never come."""
    levels, ranks = Levels.of(domains), len(domains)
    plan = make_plan(
        GroupTensors(["a", "b"], [(ranks * 40,), (77,)], [1, 1], [torch.float32] * 2, None), ranks
    )
    sends = plan_sends(grad_layout(plan, [True, True]), ranks, rounds=rounds)
    steps = {rank: list(plan_steps(sends, levels, rank)) for rank in range(ranks)}
    for rank, own in steps.items():
        rail = levels.rails[levels.find(rank)[1]]
        assert sorted({slot for step in own for slot in step.slots}) == list(range(ranks))
        assert own[-1].slots == levels.nodes[levels.find(rank)[0]], "its own node comes last"
        for number, step in enumerate(own):
            there = steps[rail[step.position]][number]
            assert rail[there.source] == rank and there.part == (step.start, step.numel)
            for peer in step.slots:  # the ranks of a node add the slots of the same node at a time
                assert levels.find(peer)[0] == levels.find(rail[step.position])[0]


@pytest.mark.parametrize(
    ("domains", "widens", "picked"),
    [
        ("aaaa", True, "all_to_all"),
        ("aaaa", False, "reduce_scatter"),
        ("aabb", True, "two_level"),
        ("aabb", False, "reduce_scatter"),
        ("aaaabb", True, "two_level"),
        ("aaaaaaaabbbbbb", True, "reduce_scatter"),  # parts of two of eight ranks send more than they save
        ("aaab", True, "reduce_scatter"),
        ("abcd", True, "all_to_all"),  # one level
        ("abcd", False, "reduce_scatter"),
    ],
)
def test_auto_never_sends_a_gradient_over_several_cards(domains: str, widens: bool, picked: str) -> None:
    assert pick_reduction("auto", Levels.of(domains), widens=widens) == picked


def test_two_levels_are_refused_where_nodes_have_no_common_part() -> None:
    with pytest.raises(ValueError, match="5 ranks on nodes of up to 3, as 5 parts of 1"):
        pick_reduction("two_level", Levels.of("aaabb"), widens=True)
    for one_level in ("abc", "aaa", "a"):
        assert pick_reduction("two_level", Levels.of(one_level), widens=True) == "all_to_all"


def test_two_levels_of_a_gather_need_consecutive_ranks() -> None:
    many = Levels.of([rank // 8 for rank in range(128)])
    assert pick_gather("auto", many) == "two_level"
    for levels in (Levels.of("aabb"), Levels.of([rank % 16 for rank in range(128)]), Levels.flat(256)):
        assert pick_gather("auto", levels) == "flat"
    assert pick_gather("two_level", Levels.of("aabb")) == "two_level"
    for one_level in ("aaaa", "abc", "a"):
        assert pick_gather("two_level", Levels.of(one_level)) == "flat"
    for domains in ("abab", "aab"):
        with pytest.raises(ValueError, match="gather='two_level' needs nodes of consecutive ranks"):
            pick_gather("two_level", Levels.of(domains))


MAY_IMPORT_THE_RUNTIME = {
    "fsdp_inside.py",
    "test_fsdp_pure.py",
    "test_code_kernels.py",
    "test_kernel_compilation.py",
    "test_sums_kernels.py",
}


def _imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_runtime_is_looked_into_at_one_place():
    """What is said from outside outlives a rebuild; what is not is in one file."""
    for path in Path(__file__).parents[1].rglob("*.py"):
        if path.name in MAY_IMPORT_THE_RUNTIME:
            continue
        text = path.read_text()
        inside = [name for name in _imported(ast.parse(text)) if name.startswith("ragged_fsdp.fsdp")]
        assert not inside, f"{path.name}: say it from outside, or through fsdp_inside.py"
        assert "_get_fsdp_state" not in text and '"ragged_fsdp.fsdp.' not in text, path.name


@pytest.mark.parametrize("allocate", [True, False])
def test_a_tensor_beyond_the_end_of_its_memory_is_refused(allocate: bool) -> None:
    """``set_`` makes the storage larger instead: at another place, while a collective may use the old one."""
    storage = FlatStorage(64, torch.device("cpu"), allocate=allocate)
    assert storage.tensor(32, (2, 4), torch.float32).shape == (2, 4)
    with pytest.raises(ValueError, match=r"\(2, 4\) of torch.float32 would end at byte 68 of 64"):
        storage.tensor(36, (2, 4), torch.float32)
    assert storage.untyped.nbytes() == (64 if allocate else 0)
