"""Which elements go where when a layout changes on an N-D mesh: plain integers, no torch.

A *region* is what a rank holds: boxes of the global tensor, in the order of its memory. A *route* takes
each element of the source regions to every rank whose target region has it, in hops along one mesh dim
at a time, so that the process groups of the mesh suffice::

    source (a, b)  --  hop along dim 0  --  (a', b)  --  hop along dim 1  --  target (a', b')

What a rank sends is made of *entries*, one for each pair of a source and a target rank: the boxes that
their regions share. Every rank orders them by one rule: by the sources of the hops behind, the last hop
first, then by the targets of the hops ahead. So all sizes and places follow from the two layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise, product

from ragged_fsdp.dtensor.intervals import Box

__all__ = ["Hop", "HopKind", "Part", "Region", "Route", "plan_route"]

Shape = tuple[int, ...]
Region = tuple[Box, ...]
Regions = Callable[[Shape], Region]
"""The region of the rank at a mesh coordinate."""
Entry = tuple[Shape, Shape]
"""The coordinates of the rank that has elements, and of one that wants them."""


class HopKind(IntEnum):
    """What a hop does, in the order of the hops: each element is on as few ranks as can be till the end."""

    REDUCE = 0  # the source is pending along the mesh dim, the target is cut: what arrives is combined
    SCATTER = 1  # the source and the target are cut
    GATHER = 2  # the source is cut, the target is not: everything goes to everyone


@dataclass(frozen=True)
class Part:
    """A box within one contiguous block of a flat local tensor."""

    block_start: int
    block_sizes: Shape
    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Elements in the part."""
        return math.prod(self.sizes)

    @property
    def run_start(self) -> int | None:
        """Where the part begins in the flat tensor, if its elements are consecutive there."""
        start, step, whole = self.block_start, 1, True
        for d in reversed(range(len(self.sizes))):
            if not whole and self.sizes[d] != 1:
                return None
            whole = whole and self.sizes[d] == self.block_sizes[d]
            start, step = start + self.offsets[d] * step, step * self.block_sizes[d]
        return start


@dataclass(frozen=True)
class Hop:
    """One exchange along a mesh dim: ``send[r]`` elements to its rank ``r``, ``receive[r]`` from it.

    ``picks`` are the slices of the buffer to send, in order; None where it is sent as it is.
    """

    mesh_dim: int
    kind: HopKind
    picks: tuple[tuple[int, int], ...] | None
    send: Shape
    receive: Shape


@dataclass(frozen=True)
class Route:
    """What one rank does: pack, hop, unpack. No packing (unpacking): the order is right as it is."""

    packing: tuple[Part, ...] | None
    hops: tuple[Hop, ...]
    unpacking: tuple[Part, ...] | None
    target_numel: int


def plan_route(
    me: Shape,
    mesh_shape: Shape,
    kinds: Sequence[tuple[int, HopKind]],
    source: Regions,
    target: Regions,
) -> Route:
    """The route of the rank at ``me``; ``kinds`` are the mesh dims to hop along."""
    hops = tuple(sorted(kinds, key=lambda hop: hop[1]))
    planner = _Planner(me, mesh_shape, hops, source, target)
    if planner.nothing_moves:
        planner = _Planner(me, mesh_shape, (), source, target)
    return planner.route()


@dataclass(frozen=True)
class _Planner:
    me: Shape
    mesh_shape: Shape
    hops: tuple[tuple[int, HopKind], ...]
    source: Regions
    target: Regions

    @property
    def nothing_moves(self) -> bool:
        """Whether a single hop would leave every element where it is, on every rank of the mesh dim."""
        if len(self.hops) != 1 or self.hops[0][1] is not HopKind.SCATTER:
            return False
        mesh_dim = self.hops[0][0]
        for rank in range(self.mesh_shape[mesh_dim]):
            at = _moved(self.me, {mesh_dim: rank})
            common = self.numel((at, at))
            if not common == _region_numel(self.source(at)) == _region_numel(self.target(at)):
                return False
        return True

    def route(self) -> Route:
        own, wanted = self.source(self.me), self.target(self.me)
        packing = [
            _part(own, pair[0], box) for entry in self.entries(self.me, 0) for pair, box in self.shared(entry)
        ]
        arrival = self.entries(self.me, len(self.hops))
        unpacking = [_part(wanted, pair[1], box) for entry in arrival for pair, box in self.shared(entry)]
        return Route(
            None if _in_order(packing, _region_numel(own)) else tuple(packing),
            tuple(self.hop(done) for done in range(len(self.hops))),
            None if _in_order(unpacking, _region_numel(wanted)) else tuple(unpacking),
            _region_numel(wanted),
        )

    def entries(self, at: Shape, done: int, to: dict[int, int] | None = None) -> Iterator[Entry]:
        """What the rank ``at`` holds after ``done`` hops, in order; only for targets at ``to`` if given."""
        behind = [hop for hop in reversed(self.hops[:done]) if hop[1] is not HopKind.REDUCE]
        ahead = [hop for hop in self.hops[done:] if hop[1] is not HopKind.GATHER]
        ranges = [range(self.mesh_shape[mesh_dim]) for mesh_dim, _ in behind]
        for mesh_dim, _ in ahead:
            only = to.get(mesh_dim) if to else None
            ranges.append(range(self.mesh_shape[mesh_dim]) if only is None else range(only, only + 1))
        for choice in product(*ranges):
            sources = dict(zip((mesh_dim for mesh_dim, _ in behind), choice))
            targets = dict(zip((mesh_dim for mesh_dim, _ in ahead), choice[len(behind) :]))
            yield _moved(at, sources), _moved(at, targets)

    def hop(self, done: int) -> Hop:
        """The exchange after ``done`` others."""
        mesh_dim, kind = self.hops[done]
        ranks = range(self.mesh_shape[mesh_dim])
        receive = tuple(
            sum(
                map(
                    self.numel,
                    self.entries(_moved(self.me, {mesh_dim: r}), done, {mesh_dim: self.me[mesh_dim]}),
                )
            )
            for r in ranks
        )
        held = [(entry[1][mesh_dim], self.numel(entry)) for entry in self.entries(self.me, done)]
        if kind is HopKind.GATHER:
            return Hop(mesh_dim, kind, None, (sum(numel for _, numel in held),) * len(ranks), receive)
        slices: list[list[tuple[int, int]]] = [[] for _ in ranks]
        position = 0
        for rank, numel in held:
            if numel:
                slices[rank].append((position, position + numel))
            position += numel
        picks = tuple(part for parts in slices for part in parts)
        as_it_is = all(stop == start for (_, stop), (start, _) in pairwise(picks))
        send = tuple(sum(stop - start for start, stop in parts) for parts in slices)
        return Hop(mesh_dim, kind, None if as_it_is else picks, send, receive)

    def numel(self, entry: Entry) -> int:
        return sum(math.prod(sizes) for _, (_, sizes) in self.shared(entry))

    def shared(self, entry: Entry) -> list[tuple[tuple[int, int], Box]]:
        """The boxes that source and target have in common, with the places of both boxes in their regions."""
        if entry not in self._shared:
            own, wanted = self.source(entry[0]), self.target(entry[1])
            self._shared[entry] = [
                ((i, j), box)
                for i, a in enumerate(own)
                for j, b in enumerate(wanted)
                if (box := _intersection(a, b)) is not None
            ]
        return self._shared[entry]

    @cached_property
    def _shared(self) -> dict[Entry, list[tuple[tuple[int, int], Box]]]:
        return {}


def _moved(coordinate: Shape, changes: dict[int, int]) -> Shape:
    return tuple(changes.get(mesh_dim, index) for mesh_dim, index in enumerate(coordinate))


def _region_numel(region: Region) -> int:
    return sum(math.prod(sizes) for _, sizes in region)


def _intersection(a: Box, b: Box) -> Box | None:
    offsets, sizes = [], []
    for begin, size, other_begin, other_size in zip(*a, *b):
        low = max(begin, other_begin)
        length = min(begin + size, other_begin + other_size) - low
        if length <= 0:
            return None
        offsets.append(low)
        sizes.append(length)
    return tuple(offsets), tuple(sizes)


def _part(region: Region, place: int, box: Box) -> Part:
    """``box``, which lies inside the box at ``place`` of ``region``."""
    offsets, sizes = region[place]
    start = sum(math.prod(earlier) for _, earlier in region[:place])
    return Part(start, sizes, tuple(o - base for o, base in zip(box[0], offsets)), box[1])


def _in_order(parts: list[Part], numel: int) -> bool:
    """Whether the parts, one after the other, are the whole flat tensor."""
    position = 0
    for part in parts:
        if part.run_start != position:
            return False
        position += part.numel
    return position == numel
