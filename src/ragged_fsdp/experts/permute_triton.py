# mypy: allow-untyped-defs
"""Orders of rows and weighted sums as Triton kernels: what ``permute`` does, each in one pass over the rows.

All are bound by memory. A program has a token, all of its slots, and ``BLOCK`` of its channels, so that what
a token has is read once and rows are read or written once. Sums are taken in fp32 and rounded once. The
backward of a weighted sum reads each row once, for both of its gradients.

``order`` is a sort by counting: how many of each group every block of slots has, a running sum over groups
and blocks, and then each slot's place, which is the start of its group and block plus how many of its kind
come before it in the block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["combine_backward", "order", "take", "weighted_sum"]

_MOST_CHANNELS = 2048
"""That a program holds at a time."""
_TILE = 4096
"""Elements of all slots of a token that a program holds at a time."""
_SLOTS = 128
"""That a program orders."""
_GROUPS = 256
"""That a program counts at a time."""


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


@triton.jit
def _find_rows(
    chosen,
    number_of,
    counts,
    ends,
    row_of,
    totals,
    slots,
    groups,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    NUMBERED: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    slot, number = _numbers_of(chosen, number_of, slots, groups, BLOCK, NUMBERED)
    here = tl.arange(0, BLOCK)
    _, other = _numbers_of(chosen, number_of, slots, groups, BLOCK, NUMBERED)
    before = (number[:, None] == other[None, :]) & (here[None, :] < here[:, None])
    at = number * blocks + block
    inside = number <= groups
    start = tl.load(ends + at, mask=inside, other=0) - tl.load(counts + at, mask=inside, other=0)
    row = tl.where(number < groups, start + tl.sum(before.to(tl.int32), axis=1), -1)
    tl.store(row_of + slot, row.to(tl.int64), mask=slot < slots)
    if block == 0:
        group = tl.arange(0, GROUPS)
        last = tl.load(ends + group * blocks + blocks - 1, mask=group < groups, other=0)
        first = tl.load(ends + group * blocks - 1, mask=(group < groups) & (group > 0), other=0)
        tl.store(totals + group, (last - first).to(tl.int64), mask=group < groups)


@triton.jit
def _take_rows(tokens, row_of, rows, channels, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(tokens + token * channels + column, mask=column < channels, other=0.0)
    for k in tl.static_range(PER_TOKEN):
        row = tl.load(row_of + token * PER_TOKEN + k)
        tl.store(rows + row * channels + column, value, mask=column < tl.where(row >= 0, channels, 0))


@triton.jit
def _sum_rows(
    rows,
    weights,
    row_of,
    tokens,
    channels,
    PER_TOKEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
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
    tl.store(tokens + token * channels + column, total.to(tokens.dtype.element_ty), mask=column < channels)


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


def order(chosen: Tensor, groups: int, number_of: Tensor | None) -> tuple[Tensor, Tensor]:
    """The row of each slot, ordered by group, -1 for those numbered ``groups``; and the counts of groups."""
    slots = chosen.numel()
    row_of, totals = (chosen.new_empty(n, dtype=torch.int64) for n in (slots, groups))
    if not slots:
        return row_of, totals.zero_()
    blocks = triton.cdiv(slots, _SLOTS)
    counts = chosen.new_empty((groups + 1) * blocks, dtype=torch.int32)
    chosen = chosen.contiguous()
    given = chosen if number_of is None else number_of
    options = {
        "GROUPS": triton.next_power_of_2(groups + 1),
        "BLOCK": _SLOTS,
        "NUMBERED": number_of is not None,
    }
    chunk = min(options["GROUPS"], _GROUPS)
    _count_groups[(blocks,)](chosen, given, counts, slots, groups, CHUNK=chunk, **options)
    ends = counts.cumsum(0, dtype=torch.int32)
    _find_rows[(blocks,)](chosen, given, counts, ends, row_of, totals, slots, groups, **options)
    return row_of, totals


def take(tokens: Tensor, row_of: Tensor, rows: int, padded: bool) -> Tensor:
    """Rows (R, D) from tokens (N, D); those of no slot are zeros if ``padded``."""
    taken = (tokens.new_zeros if padded else tokens.new_empty)(rows, tokens.shape[1])
    if len(row_of) and taken.numel():
        count = len(tokens)
        block, parts = _channels(tokens.shape[1], _MOST_CHANNELS)
        _take_rows[(count, parts)](
            tokens.contiguous(), row_of, taken, tokens.shape[1], PER_TOKEN=len(row_of) // count, BLOCK=block
        )
    return taken


def weighted_sum(
    rows: Tensor, weights: Tensor | None, row_of: Tensor, tokens: int, dtype: torch.dtype
) -> Tensor:
    """Tokens (N, D) from rows (R, D): the sum over the slots of each, weighted or not."""
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
