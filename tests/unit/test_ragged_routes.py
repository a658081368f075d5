"""Routes between layouts of an N-D mesh: all ranks played in one process, against the whole tensor."""

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_fsdp.dtensor.redistribute import Division, is_cut, route_between
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.routes import BoxPart, HopKind, packed
from ragged_strategies import placements

MESHES = [(1,), (3,), (4,), (2, 2), (2, 3), (3, 1, 2), (2, 2, 2)]


def divided(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placed: tuple) -> Division:
    """What a spec with these placements says: cuts from left to right."""
    cuts: dict[int, list[int]] = {}
    for mesh_dim, placement in enumerate(placed):
        if isinstance(placement, Shard):
            cuts.setdefault(placement.dim, []).append(mesh_dim)
    order = tuple((dim, tuple(mesh_dims)) for dim, mesh_dims in sorted(cuts.items()))
    return Division(shape, mesh_shape, tuple(placed), order)


def part_of(flat: torch.Tensor, part: BoxPart) -> torch.Tensor:
    block = flat[part.block_start : part.block_start + math.prod(part.block_sizes)].view(part.block_sizes)
    return block[tuple(slice(o, o + s) for o, s in zip(part.offsets, part.sizes))]


def held(division: Division, coordinate: tuple[int, ...], full: torch.Tensor) -> torch.Tensor:
    """The flat local tensor of a rank, straight from the boxes."""
    parts = [
        full[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))].reshape(-1)
        for offsets, sizes in division.regions()(coordinate)
    ]
    return torch.cat(parts) if parts else full.new_empty(0)


def play(source: Division, target: Division, full: torch.Tensor) -> tuple[dict, dict]:
    """Every rank follows its route; its flat result, and how many elements it received from others."""
    ranks = list(itertools.product(*(range(n) for n in source.mesh_shape)))
    routes = {rank: route_between(rank, source, target) for rank in ranks}
    buffers, received = {}, dict.fromkeys(ranks, 0)
    for rank in ranks:
        flat, packing = held(source, rank, full), routes[rank].packing
        parts = [] if packing is None else [part_of(flat, part).reshape(-1) for part in packing]
        buffers[rank] = flat if packing is None else torch.cat([*parts, flat[:0]])
    for step in range(max(len(route.hops) for route in routes.values())):
        sent, busy = {}, [rank for rank in ranks if step < len(routes[rank].hops)]
        for rank in busy:
            hop, buffer = routes[rank].hops[step], buffers[rank]
            if hop.picks is not None:
                buffer = torch.cat([*(buffer[a:b] for a, b in hop.picks), buffer[:0]])
            every = hop.kind is HopKind.GATHER
            sent[rank] = (buffer,) * len(hop.send) if every else buffer.split(list(hop.send))
            assert [part.numel() for part in sent[rank]] == list(hop.send)
        for rank in busy:
            hop = routes[rank].hops[step]
            senders = [(*rank[: hop.mesh_dim], r, *rank[hop.mesh_dim + 1 :]) for r in range(len(hop.receive))]
            arrived = [sent[sender][rank[hop.mesh_dim]] for sender in senders]
            assert [part.numel() for part in arrived] == list(hop.receive)
            received[rank] += sum(p.numel() for s, p in zip(senders, arrived) if s != rank)
            reducing = hop.kind is HopKind.REDUCE
            buffers[rank] = torch.stack(arrived).sum(0) if reducing else torch.cat(arrived)
    for rank in ranks:
        unpacking, flat, position = routes[rank].unpacking, buffers[rank], 0
        if unpacking is not None:
            arrived, flat = flat, full.new_full((routes[rank].target_numel,), -1)
            for part in unpacking:
                part_of(flat, part).copy_(arrived[position : position + part.numel].view(part.sizes))
                position += part.numel
            assert position == arrived.numel()
        buffers[rank] = flat
    return buffers, received


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_every_element_arrives(shape, data):
    mesh_shape = data.draw(st.sampled_from(MESHES))
    source = divided(shape, mesh_shape, data.draw(placements(shape, mesh_shape, with_partial=True)))
    target = divided(shape, mesh_shape, data.draw(placements(shape, mesh_shape, with_partial=False)))
    full = torch.arange(1, math.prod(shape) + 1).view(shape)
    buffers, received = play(source, target, full)
    reduced = math.prod(
        n for n, a, b in zip(mesh_shape, source.placements, target.placements) if a.is_partial() and is_cut(b)
    )
    hops = route_between((0,) * len(mesh_shape), source, target).hops
    for rank, flat in buffers.items():
        wanted = held(target, rank, full)
        if len(hops) == 1 and hops[0].kind is not HopKind.REDUCE:  # nothing but what is missing
            assert received[rank] == len(set(wanted.tolist()) - set(held(source, rank, full).tolist()))
        expected = wanted * reduced
        assert flat.tolist() == expected.tolist(), rank


def test_elements_received():
    """Exact traffic by rank, in mesh order, where the way through Replicate would gather and drop.

    An element that changes its place along two mesh dims travels twice; no other is sent in vain.
    """
    full = torch.arange(48).view(8, 6)
    rows, other, strided = RaggedShard((0,), (3, 5)), RaggedShard((0,), (5, 3)), StridedRaggedShard(0, (3, 1))
    for placed, wanted, hops, expected in (
        ((strided, Shard(0)), (Replicate(), Shard(1)), 2, [24 - 9, 24 - 9, 24 - 3, 24 - 3]),
        ((rows, Shard(1)), (Shard(0), Replicate()), 2, [3 + 12, 3 + 12, 12, 12]),
        ((rows, Replicate()), (Replicate(), rows), 1, [0, 30, 18, 0]),
        ((rows, Replicate()), (Shard(0), Shard(1)), 1, [3, 3, 0, 0]),
        ((Replicate(), rows), (Shard(1), other), 1, [6, 0, 6, 0]),
        ((rows, Shard(1)), (Shard(1), rows), 2, [15, 15, 9, 9]),
        ((Shard(0), RaggedShard(0, (3, 1))), (strided, Shard(0)), 2, [18, 18, 6, 6]),
        ((Partial(), rows), (Shard(1), other), 2, [9 + 6, 15, 9 + 6, 15]),
        ((rows, Shard(1)), (Shard(0), Shard(1)), 1, [3, 3, 0, 0]),
        ((RaggedShard(0, (4, 4)), Shard(1)), (Shard(0), Shard(1)), 0, [0, 0, 0, 0]),
        ((Replicate(), Replicate()), (strided, Shard(0)), 0, [0, 0, 0, 0]),
    ):
        source, target = divided((8, 6), (2, 2), placed), divided((8, 6), (2, 2), wanted)
        assert len(route_between((0, 0), source, target).hops) == hops, (placed, wanted)
        buffers, received = play(source, target, full)
        assert list(received.values()) == expected, (placed, wanted)
        addends = math.prod(2 for a, b in zip(placed, wanted) if a == Partial() and is_cut(b))
        for rank, flat in buffers.items():
            assert flat.tolist() == (held(target, rank, full) * addends).tolist(), (placed, wanted, rank)


def test_what_arrives_is_sorted_for_the_next_hop():
    """Three hops: what came from several ranks goes on to several others."""
    rows = RaggedShard(0, (4, 1))
    source = divided((5, 6, 4), (2, 2, 2), (Shard(2), Shard(1), rows))
    target = divided((5, 6, 4), (2, 2, 2), (rows, Shard(1), Shard(1)))
    assert any(hop.picks for hop in route_between((0, 0, 0), source, target).hops)
    full = torch.arange(120).view(5, 6, 4)
    for rank, flat in play(source, target, full)[0].items():
        assert flat.tolist() == held(target, rank, full).tolist(), rank


def test_packed_places():
    """Ordered by rank, then as given; things without elements have a place too."""
    splits, starts = packed([(2, 3), (0, 4), (2, 0), (0, 1), (2, 5)], 4)
    assert splits == (5, 0, 8, 0) and starts == [5, 0, 8, 4, 8]
    assert packed([], 2) == ((0, 0), [])
