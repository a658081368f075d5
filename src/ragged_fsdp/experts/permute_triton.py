# mypy: allow-untyped-defs
"""Orders of rows and weighted sums as Triton kernels: what ``permute`` does, each in one pass over the rows.

All are bound by memory. A program has a token, all of its slots, and ``BLOCK`` of its channels, so that what
a token has is read once and rows are read or written once. Sums are taken in fp32 and rounded once. The
backward of a weighted sum reads each row once, for both of its gradients.

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

__all__ = ["combine_backward", "count", "take", "weighted_sum"]

_MOST_CHANNELS = 2048
"""That a program holds at a time."""
_TILE = 4096
"""Elements of all slots of a token that a program holds at a time."""
_SLOTS = 128
"""That a program orders."""
_GROUPS = 256
"""That a program counts at a time."""
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
    turned,
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
        at = (group % turned) * (groups // turned) + group // turned
        tl.atomic_add(totals + at, count.to(tl.int64), mask=(group < groups) & (count > 0), sem="relaxed")


@triton.jit
def _find_rows(
    chosen,
    number_of,
    counts,
    ends,
    row_of,
    slots,
    groups,
    room,
    BLOCK: tl.constexpr,
    NUMBERED: tl.constexpr,
    ROOMS: tl.constexpr,
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
    if ROOMS:
        place = row - tl.load(ends + number * blocks - 1, mask=inside & (number > 0), other=0)
        row = tl.where(place < room, number * room + place, -1)
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
    row_of,
    grad_rows,
    grad_weights,
    CHANNELS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, SLOTS)
    slot = token * PER_TOKEN + k
    row = tl.load(row_of + slot, mask=k < PER_TOKEN, other=-1)
    weight = tl.load(weights + slot, mask=k < PER_TOKEN, other=0.0).to(tl.float32)
    product = tl.zeros([SLOTS], dtype=tl.float32)
    for start in range(0, CHANNELS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        of_token = tl.load(grad + token * CHANNELS + column, mask=column < CHANNELS, other=0.0).to(tl.float32)
        at = row[:, None] * CHANNELS + column[None, :]
        there = (row >= 0)[:, None] & (column < CHANNELS)[None, :]
        of_row = tl.load(rows + at, mask=there, other=0.0).to(tl.float32)
        result = (of_token[None, :] * weight[:, None]).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + at, result, mask=there)
        product += tl.sum(of_row * of_token[None, :], axis=1)
    tl.store(grad_weights + slot, product.to(grad_weights.dtype.element_ty), mask=k < PER_TOKEN)


def count(
    chosen: Tensor, groups: int, number_of: Tensor | None, totals: Tensor
) -> Callable[[int | None], Tensor]:
    """Add how many slots each group has to ``totals``; what is returned finds the rows, as in ``Counted``."""
    slots = chosen.numel()
    if not slots:
        return lambda room: chosen.new_empty(0, dtype=torch.int64)
    blocks = triton.cdiv(slots, _SLOTS)
    counts = chosen.new_empty((groups + 1) * blocks, dtype=torch.int32)
    chosen = chosen.contiguous()
    given = chosen if number_of is None else number_of
    options = {"BLOCK": _SLOTS, "NUMBERED": number_of is not None}
    most = triton.next_power_of_2(groups + 1)
    turned = totals.shape[0] if totals.ndim == 2 else 1
    _count_groups[(blocks,)](
        chosen, given, counts, totals, slots, groups, turned, GROUPS=most, CHUNK=min(most, _GROUPS), **options
    )

    def find(room: int | None) -> Tensor:
        row_of = chosen.new_empty(slots, dtype=torch.int64)
        ends = counts.cumsum(0, dtype=torch.int32)
        rooms = {"ROOMS": room is not None}
        _find_rows[(blocks,)](
            chosen, given, counts, ends, row_of, slots, groups, room or 0, **rooms, **options
        )
        return row_of

    return find


def take(tokens: Tensor, row_of: Tensor, rows: int, filled: Tensor | None) -> Tensor:
    """Rows (R, D) from tokens (N, D); those behind the sum of ``filled`` are zeros."""
    taken = tokens.new_empty(rows, tokens.shape[1])
    if not taken.numel():
        return taken
    if filled is not None:
        sizes = taken.numel(), tokens.shape[1]
        parts = len(filled)
        _fill_rest[(_FILLERS,)](
            taken, filled, parts, *sizes, PARTS=triton.next_power_of_2(parts), BLOCK=_MOST_CHANNELS
        )
    if len(row_of):
        count = len(tokens)
        block, parts = _channels(tokens.shape[1], _MOST_CHANNELS)
        _take_rows[(count, parts)](
            tokens.contiguous(), row_of, taken, tokens.shape[1], PER_TOKEN=len(row_of) // count, BLOCK=block
        )
    return taken


def weighted_sum(
    rows: Tensor, weights: Tensor | None, row_of: Tensor, tokens: int, dtype: torch.dtype, every: bool
) -> Tensor:
    """Tokens (N, D) from rows (R, D): the sum over the slots of each, weighted or not.

    Unless ``every`` is asked for, tokens of one slot that is missing are not written.
    """
    out = rows.new_empty(tokens, rows.shape[1], dtype=dtype)
    if not len(rows):
        return out.zero_()
    if out.numel():
        block, parts = _channels(rows.shape[1], _MOST_CHANNELS)
        given = row_of if weights is None else weights.contiguous()
        _sum_rows[(tokens, parts)](
            rows.contiguous(),
            given,
            row_of,
            out,
            rows.shape[1],
            PER_TOKEN=len(row_of) // tokens,
            WEIGHTED=weights is not None,
            EVERY=every,
            BLOCK=block,
        )
    return out


def combine_backward(grad: Tensor, rows: Tensor, weights: Tensor, row_of: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows (R, D), anything at all for those of no slot, and of weights (N, K)."""
    rows = rows.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows), weights.new_empty(weights.shape)
    if not rows.numel():
        return grad_rows, grad_weights.zero_()
    if weights.numel():
        per_token = weights.shape[1]
        slots = triton.next_power_of_2(per_token)
        block, _ = _channels(rows.shape[1], max(64, _TILE // slots))
        _back_to_rows[(len(weights),)](
            grad.contiguous(),
            rows,
            weights.contiguous(),
            row_of,
            grad_rows,
            grad_weights,
            CHANNELS=rows.shape[1],
            PER_TOKEN=per_token,
            SLOTS=slots,
            BLOCK=block,
        )
    return grad_rows, grad_weights


def _channels(count: int, most: int) -> tuple[int, int]:
    """Channels of a program, and how many programs a row has: large, but with few channels that are none."""
    block = min(most, triton.next_power_of_2(count))
    while block > 256 and triton.cdiv(count, block) * block > 1.1 * count:
        block //= 2
    return block, triton.cdiv(count, block)
