"""The plan of an exchange, played through for all ranks in one process: no process group, no torch ranks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_fsdp.optim.matrices import Flattened, Fused, newton_schulz_flops, slabs_of
from ragged_fsdp.optim.muon_addresses import Addresses, apply_rows, columns_of, momentum_rows
from ragged_fsdp.optim.muon_exchange import _far, _near, _schedule
from ragged_fsdp.optim.muon_plan import ExchangePlan, Holding, ParameterLayout, Task, plan_exchange
from ragged_fsdp.optim.muon_program import bucket_program


def interval_holdings(numel: int, shape3: tuple[int, int, int], cuts: list[int]) -> tuple[Holding, ...]:
    """Consecutive intervals of the flattened parameter, ending at the cuts."""
    bounds = [0, *sorted(min(c, numel) for c in cuts), numel]
    return tuple(Holding((0, 0, 0), shape3, a, b) for a, b in itertools.pairwise(bounds))


def column_holdings(shape3: tuple[int, int, int], ranks: int) -> tuple[Holding, ...]:
    """Shard of the columns, each cut once more into two intervals that end inside a row."""
    batches, rows, columns = shape3
    width = -(-columns // (ranks // 2)) if ranks > 1 else columns
    holdings = []
    for index in range(ranks // 2):
        first = min(index * width, columns)
        size = (batches, rows, min(columns, first + width) - first)
        half = math.prod(size) // 2 + (1 if math.prod(size) > 2 else 0)
        holdings += [
            Holding((0, 0, first), size, 0, half),
            Holding((0, 0, first), size, half, math.prod(size)),
        ]
    return tuple(holdings)


@st.composite
def layouts(draw, ranks: int, index: int) -> ParameterLayout:
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
        return ParameterLayout(f"p{index}", shape, rule, column_holdings(shape3, ranks), (0,) * ranks)
    if kind == "replicated":
        whole = Holding((0, 0, 0), shape3, 0, numel)
        return ParameterLayout(f"p{index}", shape, rule, (whole,) * ranks, tuple(range(ranks)))
    if ranks == 4 and draw(st.booleans()):  # two replicas of two ranks
        pair = interval_holdings(numel, shape3, [draw(st.integers(0, numel))])
        return ParameterLayout(f"p{index}", shape, rule, pair + pair, (0, 0, 1, 1))
    cuts = [draw(st.integers(0, numel)) for _ in range(ranks - 1)]
    return ParameterLayout(f"p{index}", shape, rule, interval_holdings(numel, shape3, cuts), (0,) * ranks)


@st.composite
def plans(draw) -> ExchangePlan:
    ranks = draw(st.integers(1, 5))
    count = draw(st.integers(1, 4))
    return plan_exchange(
        [draw(layouts(ranks, i)) for i in range(count)], ranks, draw(st.sampled_from([1, 40, 200, 10_000]))
    )


def cut(full: torch.Tensor, holding: Holding) -> torch.Tensor:
    """The flat local tensor of a holding, by definition."""
    (b, r, c), (nb, nr, nc) = holding.offset, holding.size
    return full[b : b + nb, r : r + nr, c : c + nc].reshape(-1)[holding.start : holding.stop].clone()


def strided(flat: torch.Tensor, start: int, rows: int, run: int, stride: int) -> torch.Tensor:
    return flat.as_strided((rows, run), (stride, 1), start)


@settings(max_examples=120, deadline=None)
@given(plans())
def test_every_slab_arrives_whole_and_every_element_returns(plan: ExchangePlan) -> None:
    """Pack, transfer, unpack, and back, by the programs of all ranks; the root adds 1000 to what it gets."""
    full = [
        torch.arange(math.prod(p.shape), dtype=torch.float64).view(p.batches_rows_columns) + 10_000 * i
        for i, p in enumerate(plan.parameters)
    ]
    local = [
        [cut(full[p], plan.parameters[p].holdings[r]) for p in range(len(full))] for r in range(plan.ranks)
    ]
    result = [[torch.full_like(t, -1) for t in tensors] for tensors in local]
    for bucket in range(len(plan.buckets)):
        programs = [bucket_program(plan, bucket, r) for r in range(plan.ranks)]
        batches = [
            [torch.full((n * k.rows * k.columns,), -1.0, dtype=torch.float64) for k, n in p.batches]
            for p in programs
        ]
        sent = [torch.zeros(sum(p.gather.send), dtype=torch.float64) for p in programs]
        for rank, program in enumerate(programs):
            for s in (*program.outgoing, *program.kept):
                c, target = s.copy, sent[rank] if s.batch < 0 else batches[rank][s.batch]
                source = strided(local[rank][s.parameter], c.local_start, c.rows, c.run, c.local_stride)
                strided(target, c.slab_start, c.rows, c.run, c.slab_stride).copy_(source)
        received = exchange(sent, [p.gather for p in programs])
        for rank, program in enumerate(programs):
            for item in program.incoming:
                c = item.copy
                source = strided(received[rank], c.local_start, c.rows, c.run, c.local_stride)
                strided(batches[rank][item.batch], c.slab_start, c.rows, c.run, c.slab_stride).copy_(source)
        check_slabs(plan, bucket, programs, batches, full)
        sent = [torch.zeros(sum(p.scatter.send), dtype=torch.float64) for p in programs]
        for rank, program in enumerate(programs):
            for item in program.results:
                c = item.copy
                source = strided(batches[rank][item.batch], c.slab_start, c.rows, c.run, c.slab_stride)
                strided(sent[rank], c.local_start, c.rows, c.run, c.local_stride).copy_(source + 1000)
        received = exchange(sent, [p.scatter for p in programs])
        for rank, program in enumerate(programs):
            for s in (*program.returned, *program.kept):
                c, kept = s.copy, s.batch >= 0
                flat = batches[rank][s.batch] + 1000 if kept else received[rank]
                target = strided(result[rank][s.parameter], c.local_start, c.rows, c.run, c.local_stride)
                assert (target == -1).all(), "an element came back twice"
                target.copy_(strided(flat, c.slab_start, c.rows, c.run, c.slab_stride))
    for rank in range(plan.ranks):
        for found, start in zip(result[rank], local[rank]):
            assert torch.equal(found, start + 1000)


def exchange(sent, routes):
    """An all-to-all: what rank s sends to rank r, in the order of the senders."""
    parts = [list(flat.split(route.send)) for flat, route in zip(sent, routes)]
    received = []
    for rank, route in enumerate(routes):
        assert [p[rank].numel() for p in parts] == list(route.receive), "the two ends disagree"
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
            for (kind, count), flat in zip(program.batches, batches[rank])
            for slab in flat.view(count, kind.rows * kind.columns)
        ]
        assert sorted(found) == sorted(wanted)


@settings(max_examples=100, deadline=None)
@given(plans())
def test_work_is_balanced_and_buckets_are_bounded(plan: ExchangePlan) -> None:
    costs = [plan.slab(task).flops for task in plan.tasks]
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
    layouts = []
    for layer in range(16):  # one flat buffer per layer, cut evenly
        start = 0
        for index, shape in enumerate(shapes):
            cuts = [total * rank // ranks - start for rank in range(1, ranks)]
            matrices, numel = ((1,) * (3 - len(shape)) + shape), math.prod(shape)
            holdings = interval_holdings(numel, matrices, [max(0, cut) for cut in cuts])
            layouts.append(ParameterLayout(f"{layer}.{index}", shape, None, holdings, (0,) * ranks))
            start += numel
    plan = plan_exchange(layouts, ranks, 1 << 27)
    busiest = 0
    for tasks in plan.buckets:
        work = [sum(plan.slab(t).flops for t in tasks if t.root == rank) for rank in range(ranks)]
        busiest += max(work)
    assert busiest <= 1.2 * sum(plan.load()) / ranks  # 1.0 if all roots were always busy
    if model == "experts":
        batches = [n for b in range(len(plan.buckets)) for _, n in bucket_program(plan, b, 0).batches]
        assert sum(batches) / len(batches) >= 4


@settings(max_examples=60, deadline=None)
@given(plans())
def test_columns_of_addresses(plan: ExchangePlan) -> None:
    """The rows that kernels are launched with, computed at once, are those of the pieces one by one."""
    for rank, bucket in itertools.product(range(plan.ranks), range(len(plan.buckets))):
        program = bucket_program(plan, bucket, rank)
        local = [torch.zeros(layout.holdings[rank].numel, dtype=torch.float64) for layout in plan.parameters]
        gradients, buffers = ([t.to(dtype) for t in local] for dtype in (torch.float32, torch.float64))
        batches = [torch.zeros(n * k.rows * k.columns, dtype=torch.bfloat16) for k, n in program.batches]
        pointers = [np.array([t.data_ptr() for t in ts]) for ts in (gradients, buffers, local)]
        addresses = Addresses(*pointers, torch.float32, torch.float64)
        for segments, sizes in (
            ((*program.outgoing, *program.kept, *program.elsewhere), program.gather.send),
            ((*program.returned, *program.kept), program.scatter.receive),
        ):
            columns = columns_of(segments)
            contiguous = all(_near(s.copy, local[s.parameter]).contiguous for s in segments)
            packed = torch.zeros(sum(sizes), dtype=torch.bfloat16)
            far = [packed, *batches]
            pieces = [_far(s.copy, far[s.batch + 1]) for s in segments]
            assert (columns is not None) == (contiguous and all(p.contiguous for p in pieces))
            if columns is None:
                continue
            steps = {kind: 0.5 + i for i, kind in enumerate(columns.kinds)}
            for index, (segment, piece) in enumerate(zip(segments, pieces)):
                near = [_near(segment.copy, ts[segment.parameter]) for ts in (gradients, buffers, local)]
                target = piece.address if segment.batch >= 0 or segment.sent else 0
                row = momentum_rows(columns, addresses, far)[index].tolist()
                assert row == [near[0].address, near[1].address, target, piece.numel]
                row = apply_rows(columns, addresses, far, list(steps.values()))[index].tolist()
                bits = struct.unpack("<q", struct.pack("<d", steps[segment.kind]))[0]
                if target:
                    assert row == [near[2].address, piece.address, bits, piece.numel]


def test_plans_are_equal_exactly_if_inputs_are() -> None:
    def build(**change):
        shape3 = (1, 4, 6)
        values = {"name": "w", "shape": (4, 6), "rule": None, "replicas": (0, 0)}
        values["holdings"] = interval_holdings(24, shape3, [change.pop("cut", 10)])
        return plan_exchange([ParameterLayout(**{**values, **change})], 2, 1000).digest

    assert build() == build()
    others = [build(cut=11), build(name="v"), build(rule=Fused(-2, (1, 3))), build(family=1)]
    assert len({build(), *others}) == 5


def test_invalid_plans_raise() -> None:
    whole = Holding((0, 0, 0), (1, 2, 3), 0, 6)
    layout = ParameterLayout("w", (2, 3), None, (whole,), (0,))
    with pytest.raises(ValueError, match="exactly one task"):
        ExchangePlan((layout,), 1, 10, ())
    with pytest.raises(ValueError, match="outside"):
        ExchangePlan((layout,), 1, 10, (Task(0, 0, 1, 0),))
    with pytest.raises(ValueError, match=r"w: .* 6 elements"):
        ParameterLayout("w", (2, 3), None, (dataclasses.replace(whole, stop=5),), (0,))
    with pytest.raises(ValueError, match="interval"):
        dataclasses.replace(whole, stop=7)
    with pytest.raises(ValueError, match="bucket_numel"):
        plan_exchange([layout], 1, 0)


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
