"""The plan of an exchange, played through for all ranks in one process: no process group, no torch ranks."""

from __future__ import annotations

import itertools
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_fsdp.optim.exchange.matrices import Flattened, Fused, MatrixLayout, slabs_of
from ragged_fsdp.optim.exchange.plan import (
    ExchangePlan,
    PlannedParameter,
    Task,
    plan_exchange,
)
from ragged_fsdp.optim.exchange.program import bucket_program
from ragged_fsdp.optim.exchange.run import _schedule
from ragged_fsdp.optim.muon.newton_schulz import newton_schulz_flops
from ragged_fsdp.optim.muon.passes import Addresses, Strided, apply_rows, momentum_rows
from ragged_fsdp.routes import Region, flat_boxes, region_numel

Triple = tuple[int, int, int]


def interval(offset: Triple, size: Triple, start: int, stop: int) -> Region:
    """Elements [start, stop) of the flattened box."""
    return tuple(
        (tuple(o + base for o, base in zip(offsets, offset)), sizes)
        for offsets, sizes in flat_boxes(size, start, stop)
    )


def interval_regions(numel: int, shape3: Triple, cuts: list[int]) -> tuple[Region, ...]:
    """Consecutive intervals of the flattened parameter, ending at the cuts."""
    bounds = [0, *sorted(min(c, numel) for c in cuts), numel]
    return tuple(interval((0, 0, 0), shape3, a, b) for a, b in itertools.pairwise(bounds))


def column_regions(shape3: Triple, ranks: int) -> tuple[Region, ...]:
    """Shard of the columns, each cut once more into two intervals that end inside a row."""
    batches, rows, columns = shape3
    width = -(-columns // (ranks // 2)) if ranks > 1 else columns
    regions = []
    for index in range(ranks // 2):
        first = min(index * width, columns)
        size = (batches, rows, min(columns, first + width) - first)
        half = math.prod(size) // 2 + (1 if math.prod(size) > 2 else 0)
        regions += [interval((0, 0, first), size, 0, half)]
        regions += [interval((0, 0, first), size, half, math.prod(size))]
    return tuple(regions)


def planned(name: str, shape, rule, regions, replicas, family: int = 0) -> PlannedParameter:
    return PlannedParameter(name, MatrixLayout(shape, rule, regions, replicas), family)


@st.composite
def parameters(draw, ranks: int, index: int) -> PlannedParameter:
    batches, rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shape = (rows, columns) if batches == 1 else (batches, rows, columns)
    rule = draw(
        st.sampled_from(
            [
                None,
                Fused(-2, (1, rows - 1)) if rows > 1 else None,
                Fused(-1, (columns // 2, columns // 2), interleaved=True) if not columns % 2 else None,
                Fused(-1, (1, columns - 1)) if columns > 1 else None,
            ]
        )
    )
    numel, shape3 = math.prod(shape), (batches, rows, columns)
    kind = draw(st.sampled_from(["intervals", "columns", "replicated"]))
    if kind == "columns" and ranks % 2 == 0:
        return planned(f"p{index}", shape, rule, column_regions(shape3, ranks), (0,) * ranks)
    if kind == "replicated":
        whole = interval((0, 0, 0), shape3, 0, numel)
        return planned(f"p{index}", shape, rule, (whole,) * ranks, tuple(range(ranks)))
    if ranks == 4 and draw(st.booleans()):  # two replicas of two ranks
        pair = interval_regions(numel, shape3, [draw(st.integers(0, numel))])
        return planned(f"p{index}", shape, rule, pair + pair, (0, 0, 1, 1))
    cuts = [draw(st.integers(0, numel)) for _ in range(ranks - 1)]
    return planned(f"p{index}", shape, rule, interval_regions(numel, shape3, cuts), (0,) * ranks)


@st.composite
def plans(draw) -> ExchangePlan:
    ranks = draw(st.integers(1, 5))
    count = draw(st.integers(1, 4))
    bucket_numel = draw(st.sampled_from([1, 40, 200, 10_000]))
    drawn = [draw(parameters(ranks, i)) for i in range(count)]
    return plan_exchange(drawn, ranks, bucket_numel, newton_schulz_flops)


def cut(full: torch.Tensor, region: Region) -> torch.Tensor:
    """The flat local tensor of a region, by definition."""
    boxes = [full[tuple(slice(o, o + n) for o, n in zip(*box))].reshape(-1) for box in region]
    return torch.cat([*boxes, full.new_empty(0)])


@settings(max_examples=120, deadline=None)
@given(plans())
def test_every_slab_arrives_whole_and_every_element_returns(plan: ExchangePlan) -> None:
    """Pack, transfer, unpack, and back, by the programs of all ranks; the root adds 1000 to what it gets."""
    full = [
        torch.arange(math.prod(layout.shape), dtype=torch.float64).view(layout.batches_rows_columns)
        + 10_000 * i
        for i, (_, layout, _) in enumerate(plan.parameters)
    ]
    local = [
        [cut(whole, plan.parameters[p].layout.regions[r]) for p, whole in enumerate(full)]
        for r in range(plan.ranks)
    ]
    found = [[torch.full_like(t, -1) for t in tensors] for tensors in local]
    for bucket in range(len(plan.buckets)):
        programs = [bucket_program(plan, bucket, r) for r in range(plan.ranks)]
        batches = [
            [torch.full((math.prod(b.shape),), -1.0, dtype=torch.float64) for b in p.batches]
            for p in programs
        ]
        sent = [torch.zeros(sum(p.gather.send), dtype=torch.float64) for p in programs]
        for rank, program in enumerate(programs):
            for link in itertools.chain(*program.collected):
                if (target := link.far_of([sent[rank], *batches[rank]])) is not None:
                    target.copy_(link.near_of(local[rank][link.parameter]))
        received = exchange(sent, [p.gather for p in programs])
        for rank, program in enumerate(programs):
            for arrival in program.incoming:
                arrival.near.view(batches[rank][arrival.batch]).copy_(arrival.far.view(received[rank]))
        check_slabs(plan, bucket, programs, batches, full)
        sent = [torch.zeros(sum(p.scatter.send), dtype=torch.float64) for p in programs]
        for rank, program in enumerate(programs):
            for result in program.results:
                source = result.near.view(batches[rank][result.batch])
                result.far.view(sent[rank]).copy_(source + 1000)
        received = exchange(sent, [p.scatter for p in programs])
        for rank, program in enumerate(programs):
            done = [received[rank], *(batch + 1000 for batch in batches[rank])]
            for link in itertools.chain(*program.applied):
                target = link.near_of(found[rank][link.parameter])
                assert (target == -1).all(), "an element came back twice"
                target.copy_(link.far_of(done))
    for rank in range(plan.ranks):
        for after, start in zip(found[rank], local[rank]):
            assert torch.equal(after, start + 1000)


def exchange(sent, splits):
    """An all-to-all: what rank s sends to rank r, in the order of the senders."""
    parts = [list(flat.split(of_rank.send)) for flat, of_rank in zip(sent, splits)]
    received = []
    for rank, of_rank in enumerate(splits):
        assert [p[rank].numel() for p in parts] == list(of_rank.receive), "the two ends disagree"
        received.append(torch.cat([p[rank] for p in parts]))
    return received


def check_slabs(plan, bucket, programs, batches, full) -> None:
    """Each slab of the bucket stands whole in the batch of its root."""
    for rank, program in enumerate(programs):
        wanted = []
        for task in plan.buckets[bucket]:
            if task.root == rank:
                slab = plan.slab(task)
                rows = full[task.parameter][slab.batch, slab.first_row : slab.first_row + slab.rows]
                wanted.append(rows.flatten().tolist())
        found = [
            slab.tolist()
            for batch, flat in zip(program.batches, batches[rank])
            for slab in flat.view(len(batch.slabs), -1)
        ]
        assert sorted(found) == sorted(wanted)


@settings(max_examples=100, deadline=None)
@given(plans())
def test_work_is_balanced_and_buckets_are_bounded(plan: ExchangePlan) -> None:
    costs = [task.cost for task in plan.tasks]
    assert sum(plan.load()) == sum(costs)
    assert max(plan.load()) <= sum(costs) / plan.ranks + max(costs)
    for tasks in plan.buckets:
        for rank in range(plan.ranks):
            sizes = [plan.slab(t).numel for t in tasks if t.root == rank]
            assert sum(sizes) <= plan.bucket_numel or len(sizes) == 1


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("model", ["llama", "experts"])
def test_roots_advance_together(model: str, ranks: int) -> None:
    """In each bucket roots have about the same work, of mixed shapes, and small matrices stay together."""
    shapes = {
        "llama": [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)],
        "experts": [(64, 2048, 768), (64, 768, 2048), (2048, 2048), (512, 2048)],
    }[model]
    total = sum(map(math.prod, shapes))
    drawn = []
    for layer in range(16):  # one flat buffer per layer, cut evenly
        start = 0
        for index, shape in enumerate(shapes):
            cuts = [total * rank // ranks - start for rank in range(1, ranks)]
            matrices, numel = ((1,) * (3 - len(shape)) + shape), math.prod(shape)
            regions = interval_regions(numel, matrices, [max(0, cut) for cut in cuts])
            drawn.append(planned(f"{layer}.{index}", shape, None, regions, (0,) * ranks))
            start += numel
    plan = plan_exchange(drawn, ranks, 1 << 27, newton_schulz_flops)
    busiest = 0
    for tasks in plan.buckets:
        work = [sum(t.cost for t in tasks if t.root == rank) for rank in range(ranks)]
        busiest += max(work)
    assert busiest <= 1.2 * sum(plan.load()) / ranks  # 1.0 if all roots were always busy
    if model == "experts":
        programs = [bucket_program(plan, b, 0) for b in range(len(plan.buckets))]
        sizes = [len(batch.slabs) for program in programs for batch in program.batches]
        assert sum(sizes) / len(sizes) >= 4


@settings(max_examples=60, deadline=None)
@given(plans())
def test_columns_of_addresses(plan: ExchangePlan) -> None:
    """The rows that kernels are launched with, computed at once, are those of the links one by one."""
    for rank, bucket in itertools.product(range(plan.ranks), range(len(plan.buckets))):
        program = bucket_program(plan, bucket, rank)
        numels = [region_numel(layout.regions[rank]) for _, layout, _ in plan.parameters]
        local = [torch.zeros(numel, dtype=torch.float64) for numel in numels]
        gradients, buffers = ([t.to(dtype) for t in local] for dtype in (torch.float32, torch.float64))
        batches = [torch.zeros(math.prod(batch.shape), dtype=torch.bfloat16) for batch in program.batches]
        pointers = [np.array([t.data_ptr() for t in ts]) for ts in (gradients, buffers, local)]
        addresses = Addresses(*pointers, torch.float32, torch.float64)
        for links, sizes in (
            *((links, program.gather.send) for links in program.collected),
            *((links, program.scatter.receive) for links in program.applied),
        ):
            columns = links.columns
            far = [torch.zeros(sum(sizes), dtype=torch.bfloat16), *batches]
            assert (columns is not None) == all(s.contiguous for link in links for s in (link.near, link.far))
            if columns is None:
                continue
            steps = {kind: 0.5 + i for i, kind in enumerate(columns.kinds)}
            for index, link in enumerate(links):
                near = [Strided(ts[link.parameter], link.near).address for ts in (gradients, buffers, local)]
                target = Strided(far[link.buffer], link.far).address if link.buffer >= 0 else 0
                row = momentum_rows(columns, addresses, far)[index].tolist()
                assert row == [near[0], near[1], target, link.near.numel]
                row = apply_rows(columns, addresses, far, list(steps.values()))[index].tolist()
                bits = struct.unpack("<q", struct.pack("<d", steps[link.kind]))[0]
                if target:
                    assert row == [near[2], target, bits, link.near.numel]


def test_plans_are_equal_exactly_if_inputs_are() -> None:
    def build(cut: int = 10, name: str = "w", rule=None, family: int = 0) -> str:
        regions = interval_regions(24, (1, 4, 6), [cut])
        parameter = planned(name, (4, 6), rule, regions, (0, 0), family)
        return plan_exchange([parameter], 2, 1000, newton_schulz_flops).text

    assert build() == build()
    others = [build(cut=11), build(name="v"), build(rule=Fused(-2, (1, 3))), build(family=1)]
    assert len({build(), *others}) == 5


def test_invalid_plans_raise() -> None:
    whole = interval((0, 0, 0), (1, 2, 3), 0, 6)
    parameter = planned("w", (2, 3), None, (whole,), (0,))
    with pytest.raises(ValueError, match="exactly one task"):
        ExchangePlan((parameter,), 1, 10, ())
    with pytest.raises(ValueError, match="outside"):
        ExchangePlan((parameter,), 1, 10, (Task(0, 0, 1, 1, 0),))
    with pytest.raises(ValueError, match="6 elements"):
        planned("w", (2, 3), None, (interval((0, 0, 0), (1, 2, 3), 0, 5),), (0,))
    with pytest.raises(ValueError, match="not within"):
        planned("w", (2, 3), None, (interval((0, 0, 0), (1, 3, 2), 0, 6),), (0,))
    with pytest.raises(ValueError, match="bucket_numel"):
        plan_exchange([parameter], 1, 0, newton_schulz_flops)


def test_matrices_as_drawn() -> None:
    """The drawing in the description of the module."""
    by_rows = slabs_of((8, 6), Fused(-2, (4, 2, 2)))
    assert [(s.first_row, s.rows) for s in by_rows] == [(0, 4), (4, 2), (6, 2)]
    (by_columns,) = slabs_of((2, 6), Fused(-1, (3, 3)))
    assert [(m.column, m.column_step, m.columns) for m in by_columns.matrices] == [(0, 1, 3), (3, 1, 3)]
    (alternating,) = slabs_of((2, 6), Fused(-1, (3, 3), interleaved=True))
    assert [(m.column, m.column_step, m.columns) for m in alternating.matrices] == [(0, 2, 3), (1, 2, 3)]
    (rows,) = slabs_of((6, 2), Fused(-2, (3, 3), interleaved=True))
    assert [(m.row, m.row_step, m.rows) for m in rows.matrices] == [(0, 2, 3), (1, 2, 3)]
    assert len(slabs_of((5, 2, 3), None)) == 5
    (convolution,) = slabs_of((4, 3, 5, 5), Flattened())
    assert (convolution.rows, convolution.columns) == (4, 75)
    assert newton_schulz_flops(8, 3) == newton_schulz_flops(3, 8) == 4 * 9 * 8 + 2 * 27
    for bad in (
        lambda: Fused(0, (1,)),
        lambda: Fused(-1, (0, 2)),
        lambda: Fused(-1, (1, 2), interleaved=True),
    ):
        with pytest.raises(ValueError, match="Fused"):
            bad()
    with pytest.raises(ValueError, match="add up to 5"):
        slabs_of((6, 4), Fused(-2, (2, 3)))


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_schedule(in_flight: int) -> None:
    """No more buckets at once than stated; a gather starts before the iteration it overlaps with."""
    events = list(_schedule(5, in_flight))
    assert sorted(events) == sorted((stage, i) for stage in ("start", "iterate", "finish") for i in range(5))
    live: set[int] = set()
    for stage, index in events:
        live = live | {index} if stage == "start" else live
        assert len(live) <= in_flight
        live = live - {index} if stage == "finish" else live
    if in_flight > 1:
        assert all(events.index(("start", k + 1)) < events.index(("iterate", k)) for k in range(4))
    if in_flight > 2:
        assert all(events.index(("iterate", k + 1)) < events.index(("finish", k)) for k in range(4))
