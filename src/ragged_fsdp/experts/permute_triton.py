# mypy: allow-untyped-defs
"""Orders of rows and weighted sums as Triton kernels: what ``permute`` does, each in one pass over the rows.

All are bound by memory. A program has a token, all of its slots, and ``BLOCK`` of its channels, so that what
a token has is read once and rows are read or written once; where a part of the rows is wanted, a program has
a row, and finds its token in the cache. Sums are taken in fp32 and rounded once. The backward of a weighted
sum reads each row once, for both of its gradients.

Orders are a sort by counting: how many of each group every block of slots has, a running sum over groups
and blocks, and then each slot's place, which is the start of its group and block plus how many of its kind
come before it in the block. The totals of groups are known before the places, from sums of whole numbers that
are the same in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "combine_backward",
    "count",
    "fill_rest",
    "find_arrival",
    "invert",
    "label",
    "pick",
    "take",
    "weighted_sum",
]

_MOST_CHANNELS = 2048
"""That a program holds at a time."""
_SLOTS = 128
"""That a program orders."""
_GROUPS = 256
"""That a program counts at a time."""
_INVERTED = 512
"""Slots or rows that a program numbers at a time."""
_FILLERS = 256
"""Programs that fill what is left of the rows with zeros."""


@triton.jit
def _numbers_of(chosen, number_of, slots, groups, BLOCK: tl.constexpr, NUMBERED: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(chosen + slot, mask=slot < slots, other=0)
    if NUMBERED:
        number = tl.load(number_of + number)
    return slot, tl.where(slot < slots, number, groups + 1).to(tl.int32)  # past the end: of no group at all


@triton.jit
def _count_groups(
    chosen,
    number_of,
    counts,
    totals,
    slots,
    groups,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERED: tl.constexpr,
):
    _, number = _numbers_of(chosen, number_of, slots, groups, BLOCK, NUMBERED)
    for first in range(0, GROUPS, CHUNK):  # all at once would not fit the registers
        group = first + tl.arange(0, CHUNK)
        count = tl.sum((number[:, None] == group[None, :]).to(tl.int32), axis=0)
        tl.store(counts + group * tl.num_programs(0) + tl.program_id(0), count, mask=group <= groups)
        tl.atomic_add(totals + group, count.to(tl.int64), mask=(group < groups) & (count > 0), sem="relaxed")


@triton.jit
def _find_rows(
    chosen,
    number_of,
    counts,
    ends,
    row_of,
    slots,
    groups,
    edges,
    BLOCK: tl.constexpr,
    NUMBERED: tl.constexpr,
    PARTS: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    slot, number = _numbers_of(chosen, number_of, slots, groups, BLOCK, NUMBERED)
    here = tl.arange(0, BLOCK)
    _, other = _numbers_of(chosen, number_of, slots, groups, BLOCK, NUMBERED)
    before = (number[:, None] == other[None, :]) & (here[None, :] < here[:, None])
    at = number * blocks + block
    inside = number <= groups
    start = tl.load(ends + at, mask=inside, other=0) - tl.load(counts + at, mask=inside, other=0)
    row = start + tl.sum(before.to(tl.int32), axis=1)
    if PARTS:
        place = row - tl.load(ends + number * blocks - 1, mask=inside & (number > 0), other=0)
        row = tl.full([BLOCK], -1, tl.int32)
        for part in tl.static_range(PARTS):
            first = tl.load(edges + part).to(tl.int32)
            length = tl.load(edges + part + 1).to(tl.int32) - first
            at = place - first
            row = tl.where((at >= 0) & (at < length), groups * first + number * length + at, row)
    tl.store(row_of + slot, tl.where(number < groups, row, -1).to(tl.int64), mask=slot < slots)


@triton.jit
def _take_rows(tokens, row_of, rows, channels, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    read = channels
    if PER_TOKEN == 1:  # a token whose only slot is missing need not be read
        read = tl.where(tl.load(row_of + token) >= 0, channels, 0)
    value = tl.load(tokens + token * channels + column, mask=column < read, other=0.0)
    for k in tl.static_range(PER_TOKEN):
        row = tl.load(row_of + token * PER_TOKEN + k)
        tl.store(rows + row * channels + column, value, mask=column < tl.where(row >= 0, channels, 0))


@triton.jit
def _pick_rows(source, index, rows, channels, SHARED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(index + row)
    there = column < tl.where(at >= 0, channels, 0)
    value = tl.load(source + at // SHARED * channels + column, mask=there, other=0.0)
    tl.store(rows + row * channels + column, value, mask=there)


@triton.jit
def _invert(row_of, slot_of, slots, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of + slot, mask=slot < slots, other=-1)
    tl.store(slot_of + row, slot.to(tl.int64), mask=row >= 0)


@triton.jit
def _label(slot_of, chosen, label_of, labels, rows, last, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_of + row, mask=row < rows, other=-1)
    number = tl.load(chosen + slot, mask=slot >= 0, other=0)
    number = tl.where(slot >= 0, number, last)
    tl.store(labels + row, tl.load(label_of + number), mask=row < rows)


@triton.jit
def _find_arrival(counts, by_row, to_group, arrival, kinds, KINDS: tl.constexpr, AT_ONCE: tl.constexpr):
    kind = tl.program_id(0)
    other = tl.arange(0, KINDS)
    there = other < kinds
    count = tl.load(counts + tl.load(by_row + other, mask=there, other=0), mask=there, other=0)
    place = tl.load(to_group + other, mask=there, other=0)
    first = tl.sum(tl.where(other < kind, count, 0))
    target = tl.sum(tl.where(place < tl.load(to_group + kind), count, 0))
    length = tl.sum(tl.where(other == kind, count, 0))
    for start in range(0, length, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        tl.store(arrival + first + at, target + at, mask=at < length)


@triton.jit
def _fill_rest(rows, filled, parts, numel, channels, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.arange(0, PARTS)
    first = tl.sum(tl.load(filled + part, mask=part < parts, other=0)).to(tl.int64) * channels
    start = first + tl.program_id(0).to(tl.int64) * BLOCK
    while start < numel:
        at = start + tl.arange(0, BLOCK)
        tl.store(rows + at, tl.zeros([BLOCK], rows.dtype.element_ty), mask=at < numel)
        start += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def _sum_rows(
    rows,
    weights,
    row_of,
    tokens,
    channels,
    PER_TOKEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    written = channels
    if PER_TOKEN == 1 and not EVERY:
        written = tl.where(tl.load(row_of + token) >= 0, channels, 0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(PER_TOKEN):
        slot = token * PER_TOKEN + k
        row = tl.load(row_of + slot)
        value = tl.load(
            rows + row * channels + column, mask=column < tl.where(row >= 0, channels, 0), other=0.0
        ).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights + slot).to(tl.float32)
        total += value
    tl.store(tokens + token * channels + column, total.to(tokens.dtype.element_ty), mask=column < written)


@triton.jit
def _back_to_rows(
    grad,
    rows,
    weights,
    slot_of,
    grad_rows,
    grad_weights,
    CHANNELS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + row)
    channels = tl.where(slot >= 0, CHANNELS, 0)
    token = slot // PER_TOKEN
    weight = tl.load(weights + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    product = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.static_range(0, CHANNELS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < channels
        of_token = tl.load(grad + token * CHANNELS + column, mask=there, other=0.0).to(tl.float32)
        of_row = tl.load(rows + row * CHANNELS + column, mask=there, other=0.0).to(tl.float32)
        result = (of_token * weight).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + row * CHANNELS + column, result, mask=there)
        product += of_row * of_token
    tl.store(grad_weights + slot, tl.sum(product).to(grad_weights.dtype.element_ty), mask=slot >= 0)


def count(chosen: Tensor, groups: int, number_of: Tensor | None, totals: Tensor) -> Callable[..., Tensor]:
    """Add how many slots each group has to ``totals``; what is returned finds the rows, as in ``Counted``."""
    slots = chosen.numel()
    if not slots:
        return lambda edges=None: chosen.new_empty(0, dtype=torch.int64)
    blocks = triton.cdiv(slots, _SLOTS)
    counts = chosen.new_empty((groups + 1) * blocks, dtype=torch.int32)
    chosen = chosen.contiguous()
    given = chosen if number_of is None else number_of
    options = {"BLOCK": _SLOTS, "NUMBERED": number_of is not None}
    most = triton.next_power_of_2(groups + 1)
    _count_groups[(blocks,)](
        chosen, given, counts, totals, slots, groups, GROUPS=most, CHUNK=min(most, _GROUPS), **options
    )

    def find(edges: Tensor | None = None) -> Tensor:
        row_of = chosen.new_empty(slots, dtype=torch.int64)
        ends = counts.cumsum(0, dtype=torch.int32)
        cuts, parts = (ends, 0) if edges is None else (edges, len(edges) - 1)
        _find_rows[(blocks,)](
            chosen, given, counts, ends, row_of, slots, groups, cuts, PARTS=parts, **options
        )
        return row_of

    return find


def take(tokens: Tensor, row_of: Tensor, into: Tensor) -> None:
    """Each token (N, D) to its rows (R, D)."""
    if len(row_of) and into.numel():
        block, columns = _channels(tokens.shape[1], _MOST_CHANNELS)
        grid, per_token = (len(tokens), columns), len(row_of) // len(tokens)
        _take_rows[grid](tokens.contiguous(), row_of, into, tokens.shape[1], PER_TOKEN=per_token, BLOCK=block)


def pick(source: Tensor, index: Tensor, into: Tensor, shared: int) -> None:
    """Rows (R, D) of a source (S, D), by index over ``shared``; where that is -1 nothing is written."""
    if len(source) and into.numel():
        block, columns = _channels(into.shape[1], _MOST_CHANNELS)
        _pick_rows[(len(into), columns)](
            source.contiguous(), index, into, into.shape[1], SHARED=shared, BLOCK=block
        )


def invert(row_of: Tensor, slot_of: Tensor) -> None:
    """The slot of each row that has one."""
    slots = len(row_of)
    if slots:
        _invert[(triton.cdiv(slots, _INVERTED),)](row_of, slot_of, slots, BLOCK=_INVERTED)


def label(slot_of: Tensor, chosen: Tensor, label_of: Tensor, labels: Tensor) -> None:
    """The label of what was chosen in the slot of each row; the last one where it has none."""
    rows = len(slot_of)
    if rows:
        last = len(label_of) - 1
        _label[(triton.cdiv(rows, _INVERTED),)](
            slot_of, chosen.contiguous(), label_of, labels, rows, last, BLOCK=_INVERTED
        )


def find_arrival(counts: Tensor, by_row: Tensor, to_group: Tensor, arrival: Tensor) -> None:
    """Where each row that comes goes: they come kind by kind, and go to where kinds lie by ``to_group``."""
    kinds = len(by_row)
    options = {"KINDS": triton.next_power_of_2(kinds), "AT_ONCE": _INVERTED}
    _find_arrival[(kinds,)](counts, by_row, to_group, arrival, kinds, **options)


def fill_rest(rows: Tensor, filled: Tensor) -> None:
    """Zeros into the rows (R, D) behind the sum of ``filled``."""
    if rows.numel():
        parts = len(filled)
        constants = {"PARTS": triton.next_power_of_2(parts), "BLOCK": _MOST_CHANNELS}
        _fill_rest[(_FILLERS,)](rows, filled, parts, rows.numel(), rows.shape[1], **constants)


def weighted_sum(
    rows: Tensor, weights: Tensor | None, row_of: Tensor, into: Tensor, *, every: bool = True
) -> None:
    """Tokens (N, D) from rows (R, D): the sum over the slots of each, weighted or not.

    Unless ``every`` is asked for, tokens of one slot that is missing are not written.
    """
    if not len(rows):
        into.zero_()
    elif into.numel():
        block, columns = _channels(rows.shape[1], _MOST_CHANNELS)
        given = row_of if weights is None else weights.contiguous()
        _sum_rows[(len(into), columns)](
            rows.contiguous(),
            given,
            row_of,
            into,
            rows.shape[1],
            PER_TOKEN=len(row_of) // len(into),
            WEIGHTED=weights is not None,
            EVERY=every,
            BLOCK=block,
        )


def combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, slot_of: Tensor, into: tuple[Tensor, Tensor]
) -> None:
    """The gradients of rows (R, D), none for those of no slot, and of the weights (N, K) of their slots."""
    grad_rows, grad_weights = into
    if rows.numel() and weights.numel():
        block, _ = _channels(rows.shape[1], _MOST_CHANNELS)
        _back_to_rows[(len(rows),)](
            grad.contiguous(),
            rows.contiguous(),
            weights.contiguous(),
            slot_of,
            grad_rows,
            grad_weights,
            CHANNELS=rows.shape[1],
            PER_TOKEN=weights.shape[1],
            BLOCK=block,
        )


def _channels(count: int, most: int) -> tuple[int, int]:
    """Channels of a program, and how many programs a row has: large, but with few channels that are none."""
    block = min(most, triton.next_power_of_2(count))
    while block > 256 and triton.cdiv(count, block) * block > 1.1 * count:
        block //= 2
    return block, triton.cdiv(count, block)
