"""Rows in parts: the bits of rows at once, while memory is on the wire nobody else uses it."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import ragged_fsdp.experts.all_to_all as all_to_all
from ordered_streams import OrderedStreams
from ragged_fsdp.experts import (
    AllToAll,
    ExpertSplit,
    SplitExperts,
    TwoLevel,
    grouped_linear,
    held_part,
    spread,
)
from ragged_fsdp.experts.trips import Trip
from ragged_fsdp.topology import Levels
from rank_pool import DEVICE, Rank, spmd

EXPERTS, CHANNELS = 7, 6
SPLITS = {2: (3, 4), 3: (4, 0, 3), 4: (2, 1, 3, 1)}


class Bent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.randn(EXPERTS, CHANNELS, CHANNELS, generator=_seeded(1)))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("spread gives it another")

    def apply_to_groups(self, rows: Tensor, counts: Tensor) -> Tensor:
        return grouped_linear(rows, held_part(self.weight), counts).tanh()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _layer(rank: Rank, make: Callable[..., object]) -> Bent:
    module = Bent().to(DEVICE)
    split = ExpertSplit(SPLITS[rank.world_size])
    spread(SplitExperts("x", module, rank.mesh(), split, lambda mesh, own: make(mesh, own)))
    return module


def _run(rank: Rank, module: Bent, alike: bool, weights_alone: bool = False) -> list[Tensor]:
    """Outputs and gradients of two calls before one backward, as a model that is called twice makes them."""
    found = []
    for call in range(2):
        tokens = 9 if alike else 4 * rank.rank + 5 * call
        x = (
            torch.randn(tokens, CHANNELS, generator=_seeded(rank.rank))
            .to(DEVICE)
            .requires_grad_(not weights_alone)
        )
        chosen = torch.rand(tokens, EXPERTS, generator=_seeded(call)).argsort(1)[:, :3].to(DEVICE)
        w = torch.rand(tokens, 3, generator=_seeded(call)).to(DEVICE).requires_grad_()
        found.append((x, w, module(x, chosen, w)))
    sum((out * out).sum() for _, _, out in found).backward()
    grads = [t.grad for x, w, _ in found for t in (x, w) if t.requires_grad]
    own = module.weight.grad
    return [*(out.detach() for *_, out in found), *grads, *([] if own is None else [held_part(own)])]


@spmd(2, 3, 4)
@pytest.mark.parametrize("capacity", [None, 0.6, 1.5])
def test_rows_in_parts_have_the_bits_of_rows_at_once(rank: Rank, capacity: float | None) -> None:
    """However many parts; some experts have no row, a rank no tokens; also where tokens need no gradient."""
    for weights_alone in (False, True):
        results = []
        for parts in (1, 2, 3, 64):
            module = _layer(rank, lambda m, s, p=parts: AllToAll(m, s, capacity=capacity, parts=p))
            module.weight.requires_grad_(not weights_alone)
            results.append(_run(rank, module, capacity is not None, weights_alone))
        for other in results[1:]:
            assert len(other) == len(results[0])
            assert all(torch.equal(a, b) for a, b in zip(other, results[0]))


@spmd(3)
def test_all_ranks_cut_alike(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the most slots that any had in the last call, though one has no tokens; bits are as in one part."""
    monkeypatch.setattr(all_to_all, "_PARTS_FROM_BYTES", 1)
    made: list[AllToAll] = []

    def make(*args: object, **options: int) -> AllToAll:
        made.append(AllToAll(*args, **options))
        return made[-1]

    one = _run(rank, _layer(rank, lambda m, s: make(m, s, parts=1)), alike=False)
    assert all(torch.equal(a, b) for a, b in zip(_run(rank, _layer(rank, make), alike=False), one))
    cut = {parts for _, parts in made[1]._orders}
    assert made[1]._most_slots == 3 * 13 and cut == ({1, 4} if DEVICE == "cuda" else {1})


WAYS = {
    "exact": lambda mesh, split: AllToAll(mesh, split, parts=2),
    "by expert": lambda mesh, split: AllToAll(mesh, split, parts=9),
    "capacity": lambda mesh, split: AllToAll(mesh, split, capacity=0.7, parts=3),
    "levels": lambda mesh, split: TwoLevel(mesh, split, Levels(((0, 1), (2, 3)), 2)),
}


def _in_order(rank: Rank, way: str) -> None:
    streams = OrderedStreams()
    with pytest.MonkeyPatch.context() as patch, streams.install(patch):
        patch.setattr(dist, "all_to_all_single", streams.later(dist.all_to_all_single))
        _run(rank, _layer(rank, WAYS[way]), way == "capacity")


on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="a device has streams of its own")


@on_cpu
@spmd(4)
@pytest.mark.parametrize("way", WAYS)
def test_every_two_uses_of_memory_have_an_order(rank: Rank, way: str) -> None:
    """What is sent, and where it arrives, belongs to the wire until it has been waited for."""
    _in_order(rank, way)


@on_cpu
@pytest.mark.parametrize("fault", ["released while it is sent", "read before it is there"])
def test_memory_that_is_used_too_early_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail; in one process, since a rank that fails leaves others waiting."""
    close, streams = Trip._close, OrderedStreams()

    def without(trip: Trip) -> object:
        works, sent, arrived = close(trip)
        return (works, None, arrived) if fault.startswith("released") else ([], sent, arrived)

    def mirror(out: Tensor, given: Tensor, *_: object, group: object, async_op: bool = False) -> None:
        out.copy_(given)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        x, chosen, w = torch.randn(9, CHANNELS), torch.arange(9).view(9, 1) % EXPERTS, torch.ones(9, 1)
        with streams.install(monkeypatch), monkeypatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", streams.later(mirror))
            way = AllToAll(mesh, ExpertSplit(SPLITS[4]), capacity=4.0, parts=3)
            way._agreed.add(9)
            for broken in (False, True):
                if broken:
                    patch.setattr(Trip, "_close", without)
                with pytest.raises(AssertionError, match="wait") if broken else nullcontext():
                    rows, _, route = way.dispatch(x, chosen)
                    way.combine(rows, w, route)
    finally:
        dist.destroy_process_group()
