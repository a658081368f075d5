# mypy: allow-untyped-defs
"""Orders of rows and weighted sums as Triton kernels: what ``permute`` does, each in one pass.

All three are bound by memory. A program has a row (or a token) and goes over its channels ``BLOCK`` at a
time. Sums are taken in fp32 and rounded once. The backward of a weighted sum reads each row once, for both of
its gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["combine_backward", "take", "weighted_sum"]

_MOST_CHANNELS = 2048
"""That a program holds at a time."""


@triton.jit
def _take_rows(tokens, slot_of, rows, channels, per_token, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tokens + (slot // per_token) * channels + column
    value = tl.load(source, mask=column < tl.where(slot >= 0, channels, 0), other=0.0)
    tl.store(rows + row * channels + column, value, mask=column < channels)


@triton.jit
def _sum_rows(
    rows, weights, row_of, tokens, channels, per_token, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in range(per_token):
        slot = token * per_token + k
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
    grad, rows, weights, slot_of, grad_rows, grad_weights, slots, channels, per_token, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + row)
    there = slot >= 0
    weight = tl.where(there, tl.load(weights + tl.maximum(slot, 0)).to(tl.float32), 0.0)
    product = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, channels, BLOCK):
        column = start + tl.arange(0, BLOCK)
        wanted = column < tl.where(there, channels, 0)  # padding may hold NaN
        of_token = tl.load(grad + (slot // per_token) * channels + column, mask=wanted, other=0.0).to(
            tl.float32
        )
        of_row = tl.load(rows + row * channels + column, mask=wanted, other=0.0).to(tl.float32)
        result = (of_token * weight).to(grad_rows.dtype.element_ty)
        tl.store(grad_rows + row * channels + column, result, mask=column < channels)
        product += of_token * of_row
    total = tl.sum(product, axis=0).to(grad_weights.dtype.element_ty)
    tl.store(grad_weights + tl.where(there, slot, slots), total)  # padding writes behind the last slot


def take(tokens: Tensor, slot_of: Tensor, per_token: int) -> Tensor:
    """Rows (R, D) from tokens (N, D); zeros where the slot is -1."""
    rows = tokens.new_empty(len(slot_of), tokens.shape[1])
    if not len(tokens):
        return rows.zero_()
    if rows.numel():
        block, parts = _channels(tokens.shape[1])
        _take_rows[(len(rows), parts)](
            tokens.contiguous(), slot_of, rows, tokens.shape[1], per_token, BLOCK=block
        )
    return rows


def weighted_sum(rows: Tensor, weights: Tensor | None, row_of: Tensor, tokens: int) -> Tensor:
    """Tokens (N, D) from rows (R, D): the sum over the slots of each, weighted or not."""
    dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
    out = rows.new_empty(tokens, rows.shape[1], dtype=dtype)
    if not len(rows):
        return out.zero_()
    if out.numel():
        block, parts = _channels(rows.shape[1])
        given = row_of if weights is None else weights.contiguous()
        _sum_rows[(tokens, parts)](
            rows.contiguous(),
            given,
            row_of,
            out,
            rows.shape[1],
            len(row_of) // tokens,
            WEIGHTED=weights is not None,
            BLOCK=block,
        )
    return out


def combine_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, slot_of: Tensor, row_of: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of rows (R, D) and weights (N, K), given that of tokens (N, D)."""
    rows = rows.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows), weights.new_zeros(weights.numel() + 1)
    if rows.numel() and not weights.numel():
        grad_rows.zero_()
    elif rows.numel():
        block, _ = _channels(rows.shape[1])
        _back_to_rows[(len(rows),)](
            grad.contiguous(),
            rows,
            weights.contiguous(),
            slot_of,
            grad_rows,
            grad_weights,
            weights.numel(),
            rows.shape[1],
            weights.shape[1],
            BLOCK=block,
        )
    return grad_rows, grad_weights[:-1].view_as(weights)


def _channels(count: int) -> tuple[int, int]:
    """Channels of a program, and how many programs a row has."""
    block = min(_MOST_CHANNELS, triton.next_power_of_2(count))
    return block, triton.cdiv(count, block)
