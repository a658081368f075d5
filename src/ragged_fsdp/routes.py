"""Who sends which elements to whom: boxes, what two ranks share of them, routes over an N-D mesh; no torch.

An *interval* ``[start, stop)`` counts elements of a row-major flattened tensor. A *box* is a pair
``(offsets, sizes)`` of a rectangular part. A *chunk* is what ``Shard(d)`` gives a rank. A *region* is what a
rank holds: boxes of the global tensor, in the order of its memory. :func:`shared_boxes` says what two regions
have in common and where each of them has it; every uneven all-to-all of the package is planned from it.

A *route* takes each element of the source regions to every rank whose target region has it, in hops along
one mesh dim at a time, so that the process groups of the mesh suffice::

    source (a, b)  --  hop along dim 0  --  (a', b)  --  hop along dim 1  --  target (a', b')

What a rank sends is made of *entries*, one for each pair of a source and a target rank: the boxes that
their regions share. Every rank orders them by one rule: by the sources of the hops behind, the last hop
first, then by the targets of the hops ahead. So all sizes and places follow from the two layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, product

__all__ = [
    "Box",
    "BoxPart",
    "Hop",
    "HopKind",
    "RankRoute",
    "Region",
    "Shared",
    "boxes_between",
    "chunk_bounds",
    "chunk_of_chunks",
    "contiguous_stride",
    "flat_boxes",
    "overlap",
    "packed",
    "plan_route",
    "region_numel",
    "shared_boxes",
    "starts_of",
]

Box = tuple[tuple[int, ...], tuple[int, ...]]
Shape = tuple[int, ...]
Region = tuple[Box, ...]
Regions = Callable[[Shape], Region]
"""The region of the rank at a mesh coordinate."""
Entry = tuple[Shape, Shape]
"""The coordinates of the rank that has elements, and of one that wants them."""


def starts_of(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each of the consecutive intervals of these lengths begins."""
    return tuple(accumulate(counts, initial=0))[:-1]


def contiguous_stride(shape: Sequence[int]) -> Shape:
    """The stride of a contiguous tensor of this shape."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def overlap(start: int, count: int, other_start: int, other_count: int) -> int:
    """How many elements two intervals share."""
    return max(0, min(start + count, other_start + other_count) - max(start, other_start))


def chunk_bounds(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """The part ``[begin, end)`` of a dim of ``size`` that ``Shard`` gives ``rank`` (torch.chunk)."""
    length = -(-size // ranks)
    return min(size, length * rank), min(size, length * (rank + 1))


def chunk_of_chunks(shape: Sequence[int], cuts: Iterable[tuple[int, int, int]]) -> Box:
    """What is left of a tensor when one chunk after the other is taken: (dim, ranks, rank) of each."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, ranks, rank in cuts:
        begin, end = chunk_bounds(sizes[dim], ranks, rank)
        offsets[dim], sizes[dim] = offsets[dim] + begin, end - begin
    return tuple(offsets), tuple(sizes)


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Split the flat interval into boxes, in order, each contiguous in the flat order.

    At most ``2 * len(shape) - 1`` of them: a head inside the first index touched, whole indices,
    and a tail inside the last one. In a (4, 5) tensor the interval [3, 17) is three boxes::

        . . . h h      h: offsets (0, 3), sizes (1, 2)
        w w w w w      w: offsets (1, 0), sizes (2, 5)
        w w w w w
        t t . . .      t: offsets (3, 0), sizes (1, 2)
    """
    if start >= stop:
        return []
    if not shape:
        return [((), ())]
    tail = tuple(shape[1:])
    inner = math.prod(tail)
    first, last = start // inner, (stop - 1) // inner
    begin, end = start - first * inner, stop - last * inner  # where it begins in `first`, ends in `last`

    def within(index: int, lo: int, hi: int) -> list[Box]:
        return [((index, *offsets), (1, *sizes)) for offsets, sizes in flat_boxes(tail, lo, hi)]

    if first == last and end - begin < inner:
        return within(first, begin, end)
    head = within(first, begin, inner) if begin else []
    rear = within(last, 0, end) if end < inner else []
    lo, hi = first + bool(head), last + 1 - bool(rear)
    whole: list[Box] = [((lo, *(0 for _ in tail)), (hi - lo, *tail))] if lo < hi else []
    return head + whole + rear


def boxes_between(panels: Iterable[Box], start: int, stop: int) -> list[Box]:
    """The elements [start, stop) of row-major panels that lie one behind the other, as boxes in order."""
    boxes: list[Box] = []
    begin = 0
    for offsets, sizes in panels:
        numel = math.prod(sizes)
        low, high = max(start - begin, 0), min(stop - begin, numel)
        for inside, extent in flat_boxes(sizes, low, high):
            boxes.append((tuple(map(sum, zip(offsets, inside))), extent))
        begin += numel
    return boxes


@dataclass(frozen=True)
class BoxPart:
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
class Shared:
    """Elements that two regions have in common: where the one has them, and where the other."""

    source: BoxPart
    target: BoxPart


def shared_boxes(source: Region, target: Region) -> list[Shared]:
    """What two regions share, in the order of ``source``, then of ``target``."""
    targets = list(_placed(target))
    return [
        Shared(_part(start, a, box), _part(other_start, b, box))
        for start, a in _placed(source)
        for other_start, b in targets
        if (box := _intersection(a, b)) is not None
    ]


def packed(sizes: Sequence[tuple[int, int]], ranks: int) -> tuple[Shape, list[int]]:
    """A buffer that holds things for each of ``ranks`` ranks, ordered by rank, then as they are given.

    Both ends of an all-to-all that walk the same things in the same order get the same places.

    Args:
        sizes: the rank and the number of elements of each thing.
        ranks: how many there are; a rank may have nothing.

    Returns:
        Elements for each rank (the split sizes of the all-to-all), and where each thing begins.
    """
    splits = [0] * ranks
    for rank, numel in sizes:
        splits[rank] += numel
    ends, starts = [*starts_of(splits)], []
    for rank, numel in sizes:
        starts.append(ends[rank])
        ends[rank] += numel
    return tuple(splits), starts


def region_numel(region: Region) -> int:
    """Elements of all boxes of a region."""
    return sum(math.prod(sizes) for _, sizes in region)


def _placed(region: Region) -> Iterator[tuple[int, Box]]:
    """The boxes of a region, each with the place in memory where it begins."""
    start = 0
    for box in region:
        yield start, box
        start += math.prod(box[1])


def _part(start: int, around: Box, box: Box) -> BoxPart:
    """``box``, which lies inside the box ``around`` that begins at ``start`` in memory."""
    offsets, sizes = around
    return BoxPart(start, sizes, tuple(o - base for o, base in zip(box[0], offsets)), box[1])


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


class HopKind(IntEnum):
    """What a hop does, in the order of the hops: each element is on as few ranks as can be till the end."""

    REDUCE = 0  # the source is pending along the mesh dim, the target is cut: what arrives is combined
    SCATTER = 1  # the source and the target are cut
    GATHER = 2  # the source is cut, the target is not: everything goes to everyone


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
class RankRoute:
    """What one rank does: pack, hop, unpack. No packing (unpacking): the order is right as it is."""

    packing: tuple[BoxPart, ...] | None
    hops: tuple[Hop, ...]
    unpacking: tuple[BoxPart, ...] | None
    target_numel: int


def plan_route(
    me: Shape,
    mesh_shape: Shape,
    kinds: Sequence[tuple[int, HopKind]],
    source: Regions,
    target: Regions,
) -> RankRoute:
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
            if not common == region_numel(self.source(at)) == region_numel(self.target(at)):
                return False
        return True

    def route(self) -> RankRoute:
        own, wanted = region_numel(self.source(self.me)), region_numel(self.target(self.me))
        departure, arrival = self.entries(self.me, 0), self.entries(self.me, len(self.hops))
        packing = [shared.source for entry in departure for shared in self.shared(entry)]
        unpacking = [shared.target for entry in arrival for shared in self.shared(entry)]
        return RankRoute(
            None if _in_order(packing, own) else tuple(packing),
            tuple(self.hop(done) for done in range(len(self.hops))),
            None if _in_order(unpacking, wanted) else tuple(unpacking),
            wanted,
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
        send, places = packed(held, len(ranks))
        positions = starts_of([numel for _, numel in held])
        parts = sorted((at, start, n) for at, start, (_, n) in zip(places, positions, held) if n)
        picks = tuple((start, start + numel) for _, start, numel in parts)
        as_it_is = all(place == start for place, start, _ in parts)
        return Hop(mesh_dim, kind, None if as_it_is else picks, send, receive)

    def numel(self, entry: Entry) -> int:
        return sum(shared.source.numel for shared in self.shared(entry))

    def shared(self, entry: Entry) -> list[Shared]:
        if entry not in self._shared:
            self._shared[entry] = shared_boxes(self.source(entry[0]), self.target(entry[1]))
        return self._shared[entry]

    @cached_property
    def _shared(self) -> dict[Entry, list[Shared]]:
        return {}


def _moved(coordinate: Shape, changes: dict[int, int]) -> Shape:
    return tuple(changes.get(mesh_dim, index) for mesh_dim, index in enumerate(coordinate))


def _in_order(parts: list[BoxPart], numel: int) -> bool:
    """Whether the parts, one after the other, are the whole flat tensor."""
    position = 0
    for part in parts:
        if part.run_start != position:
            return False
        position += part.numel
    return position == numel
