"""The matrix exchange by itself, with work that is not Muon's, equals the work on whole tensors."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import muon_cases as cases
from fsdp_cases import logged
from ragged_fsdp.optim.exchange import Exchanges, Flattened, Member
from ragged_fsdp.optim.exchange.matrices import slabs_of
from rank_pool import DEVICE, spmd

SHAPES = {**{n: s for n, s in cases.SHAPES.items() if len(s) > 1}, "convolution": (6, 2, 3, 3)}
ONE_DIM = ("ragged", "ragged_rows", "shard0", "shard_last", "replicate")
TWO_DIMS = ("hsdp_shard0", "hsdp_ragged", "ragged_tp", "ragged_ep", "strided_ep")


def rule_of(name: str):
    return Flattened() if name == "convolution" else cases.split(name, None)


def changed(matrix: torch.Tensor, times: int) -> torch.Tensor:
    """What the root makes of a matrix the ``times``-th time: all of its elements matter to each."""
    matrix = matrix.contiguous()  # the order of a sum depends on strides
    return 2 * matrix + times * matrix.sum(0, keepdim=True) / matrix.norm()


class Work:
    """Sends values, changes matrices on their roots, and adds the results to the values."""

    def __init__(self, parameters) -> None:
        self.values = [cases.local(p) for p in parameters]
        self.seen = [torch.zeros_like(value) for value in self.values]
        self.times: dict[tuple[int, ...], int] = {}

    def collect(self, links, buffers) -> None:
        for link in links:
            link.near_of(self.seen[link.parameter]).add_(1)
            assert {link.kind.family} == {links.family}
            if (target := link.far_of(buffers)) is not None:
                target.copy_(link.near_of(self.values[link.parameter]))

    def work(self, matrices, kind, ids):
        assert len(ids) == len(matrices) and tuple(matrices.shape[1:]) in shapes_of(kind)
        for key in ids:  # state that a root keeps of its matrices
            self.times[key] = self.times.get(key, 0) + 1
        return torch.stack([changed(m, self.times[key]) for m, key in zip(matrices, ids)])

    def apply(self, links, buffers) -> None:
        for link in links:
            link.near_of(self.values[link.parameter]).add_(link.far_of(buffers))


def shapes_of(kind) -> set[tuple[int, int]]:
    return {(m.rows, m.columns) for m in kind.matrices}


def expected(steps: int) -> dict[str, torch.Tensor]:
    """The same work on whole tensors, matrix by matrix."""
    values = cases.full_tensors(0, SHAPES)
    for step in range(steps):
        for name, value in values.items():
            results = torch.empty_like(value)
            for slab in slabs_of(tuple(value.shape), rule_of(name)):
                rows = slice(slab.first_row, slab.first_row + slab.rows)
                flat = value.view(-1, *((6, 18) if name == "convolution" else value.shape[-2:]))
                source, target = flat[slab.batch, rows], results.view(flat.shape)[slab.batch, rows]
                for m in slab.matrices:
                    place = (slice(m.row, None, m.row_step), slice(m.column, None, m.column_step))
                    size = (slice(m.rows), slice(m.columns))
                    target[place][size] = changed(source[place][size], step + 1)
            value += results
    return values


def check(rank, mesh, kind: str, **options) -> list:
    """Two steps of all parameters under one placing; the exchanges."""
    whole_rows = kind in ("ragged", "ragged_rows", "shard0", "replicate")
    full = {n: v for n, v in cases.full_tensors(0, SHAPES).items() if v.ndim < 4 or whole_rows}
    placed = {n: cases.place(v, mesh, kind) for n, v in full.items()}
    exchanges = Exchanges("Doubling", lambda rows, columns: rows + columns, torch.float32, **options)
    members = [Member(n, p, rule_of(n), family) for family, (n, p) in enumerate(placed.items())]
    bound = exchanges.bind(members)
    for exchange in bound:
        work = Work(exchange.parameters)
        for step in range(2):
            exchange.run(work)
            assert all((seen == step + 1).all() for seen in work.seen), "every element once a step"
        rooted = {(t.parameter, t.slab) for t in exchange.plan.tasks if t.root == exchange.team.index}
        assert {(parameter, slab) for parameter, slab, _ in work.times} == rooted
    wanted = expected(2)
    for name, parameter in placed.items():
        found = cases.whole(parameter).cpu()
        if rank.device == "cpu":
            assert torch.equal(found, wanted[name]), f"{kind}, {name}"
        else:
            torch.testing.assert_close(found, wanted[name])
    return list(bound)


@spmd(1, 2, 3, 4)
def test_work_on_one_mesh_dim(rank):
    """Uneven shards, empty ranks, replicas; columns cut; fused, expert and convolution weights."""
    for in_flight, kind in enumerate(ONE_DIM):
        check(rank, rank.mesh(), kind, bucket_numel=700, buckets_in_flight=in_flight % 3 + 1)


@pytest.mark.parametrize("kind", TWO_DIMS)
@spmd(4)
def test_work_on_two_mesh_dims(rank, kind):
    """Replicas work on different matrices; experts stay in their group."""
    bound = check(rank, rank.mesh(2, 2, names=("outer", "inner")), kind, bucket_numel=500)
    assert [exchange.plan.ranks for exchange in bound] == ([4, 2] if kind.endswith("_ep") else [4])
    assert all(len({task.root for task in exchange.plan.tasks}) > 1 for exchange in bound)


@spmd(2)
def test_ranks_that_differ_all_raise(rank):
    """What a rank was given and the others were not is told to all; so is what one cannot plan."""
    mesh = rank.mesh()
    weight = cases.place(torch.ones(4, 6), mesh, "shard0")

    def bind(member, dtype=torch.float32, **options):
        return Exchanges("Doubling", lambda rows, columns: rows, dtype, **options).bind([member])

    with pytest.raises(RuntimeError, match=r"different Doubling plans.*rank 0 has 'w: .*rank 1 has 'v: "):
        bind(Member("v" if rank.rank else "w", weight))
    with pytest.raises(RuntimeError, match=r"rank 0 has '2 ranks, bucket_numel 7', .* bucket_numel 8'"):
        bind(Member("w", weight), bucket_numel=7 + rank.rank)
    with pytest.raises(RuntimeError, match=r"rank 0 has 'torch.float32, .*rank 1 has 'torch.bfloat16"):
        bind(Member("w", weight), torch.bfloat16 if rank.rank else torch.float32)
    local = torch.ones(2 + rank.rank, 6, device=rank.device)
    wrong = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(4, 6), stride=(6, 1))
    with pytest.raises(ValueError, match=r"Doubling cannot plan its exchange; by rank: \{1: 'w: .*12 local"):
        bind(Member("w", wrong))
    cut = cases.place(torch.ones(3, 4, 2, 2), mesh, "shard0")
    cut = cut.redistribute(mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"w: a shard cuts one of the dims \(1,\) of shape \(3, 4, 2, 2\)"):
        bind(Member("w", cut))
    (exchange,) = bind(Member(None, weight))
    assert exchange.names == ["parameter of shape (4, 6)"]


@spmd(4)
def test_a_difference_in_one_of_several_groups_is_told_to_all(rank):
    """Two groups of experts beside a matrix of the world: one rank fails, or plans otherwise."""
    mesh = rank.mesh(2, 2, names=("outer", "inner"))
    up = cases.place(torch.ones(8, 6), mesh, "ragged_tp")
    experts = cases.place(torch.ones(4, 8, 6), mesh, "ragged_ep")

    def bind(name, failure=None):
        exchanges = Exchanges("Doubling", lambda rows, columns: rows, torch.float32)
        return exchanges.bind([Member("up", up), Member(name, experts)], failure)

    assert [exchange.plan.ranks for exchange in bind("experts")] == [4, 2]
    with pytest.raises(RuntimeError, match=r"different Doubling plans.*'experts: .*'others: "):
        bind("others" if rank.rank == 3 else "experts")
    alone = LookupError("no gradient") if rank.rank == 3 else None
    with pytest.raises((LookupError, ValueError), match="no gradient") as caught:
        bind("experts", alone)
    assert (caught.value is alone) == (rank.rank == 3)
    with pytest.raises(RuntimeError, match=r"different Doubling plans.*dims \(0,\) of a mesh"):
        members = [Member("up", up), Member("experts", experts)]
        exchanges = Exchanges("Doubling", lambda rows, columns: rows, torch.float32)
        exchanges.bind(members[:1] if rank.rank == 3 else members)


@pytest.mark.skipif(DEVICE != "cpu", reason="over NCCL nothing raises: the backend ends the process")
@spmd(2)
def test_a_rank_that_stays_away_is_waited_for_by_name(rank):
    """Its step raised before the transfer: the other says in which it waits, before it gives up and after."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=3)), "cpu")
    weight = cases.place(torch.ones(4, 6), mesh, "shard0")
    exchanges = Exchanges("Doubling", lambda rows, columns: rows, torch.float32)
    (exchange,) = exchanges.bind([Member("w", weight)])
    exchange.run(Work(exchange.parameters))
    if rank.rank == 0:
        with logged() as said:
            with pytest.raises(RuntimeError) as caught:
                exchange.run(Work(exchange.parameters))
            exchange._watch.report(time.monotonic() + 1e6)  # it raised: nobody waits for it any more
        (note,) = caught.value.__notes__
        assert "all-to-all to the roots of group 'Doubling bucket 0' failed on rank 0 (rank 0 of 2" in note
        (line,) = said
        assert "rank 0: all-to-all to the roots of group 'Doubling bucket 0' (rank 0 of 2" in line
    dist.barrier()
