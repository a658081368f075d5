"""Arithmetic of flat intervals, boxes and chunks: plain integers, no torch.

An interval ``[start, stop)`` counts elements of a row-major flattened tensor. A box is a pair
``(offsets, sizes)`` of a rectangular part. A chunk is what ``Shard(d)`` gives a rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate

__all__ = ["Box", "chunk_bounds", "chunk_of_chunks", "flat_boxes", "overlap", "starts_of"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


def starts_of(counts: Sequence[int]) -> tuple[int, ...]:
    """Where each of the consecutive intervals of these lengths begins."""
    return tuple(accumulate(counts, initial=0))[:-1]


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
