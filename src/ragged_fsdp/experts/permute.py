"""Rows on their way: from tokens to rows ordered by expert, and from the outputs of rows to tokens.

A *slot* is one of the K experts that a token was sent to; token n has the slots n*K to n*K + K - 1. Rows are
slots in another order, some of which may be missing here (they went elsewhere, or were dropped) and some of
which may hold nothing (padding)::

    take       row r is the token of slot ``slot_of[r]``; padding (-1) is zeros
    combine    token n is the sum over its slots of weight * row ``row_of[slot]``; a missing one (-1) adds 0

Each is the other's backward up to the weights, so neither needs an atomic addition, and results have the same
bits every time. On a GPU they run as Triton kernels (:mod:`ragged_fsdp.experts.permute_triton`); what is here
is what those must equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["add_up", "by_expert", "combine", "inverted", "take", "take_reference", "weighted_reference"]


def by_expert(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The slots (N*K,) ordered by expert; and how many each expert has.

    Slots of what is no expert of ``range(experts)`` are to be numbered ``experts``; they come last.
    """
    slots = chosen.flatten()
    counts = (slots.unsqueeze(-1) == torch.arange(experts, device=slots.device)).sum(0)
    return slots.argsort(stable=True), counts  # bincount would wait for the device


def inverted(slot_of: Tensor, slots: int) -> Tensor:
    """The row of each slot, -1 for those that are in no row."""
    row_of = slot_of.new_full((slots + 1,), -1)
    rows = torch.arange(len(slot_of), device=slot_of.device)
    row_of[torch.where(slot_of < 0, slots, slot_of)] = rows  # padding writes into the entry that is cut off
    return row_of[:slots]


def take(tokens: Tensor, slot_of: Tensor, row_of: Tensor) -> Tensor:
    """Tokens (N, D) to rows (R, D); ``row_of`` (N*K,) is the inverse of ``slot_of`` (R,)."""
    rows: Tensor = _Take.apply(tokens, slot_of, row_of)
    return rows


def combine(rows: Tensor, weights: Tensor, slot_of: Tensor, row_of: Tensor) -> Tensor:
    """Outputs of rows (R, D) to tokens (N, D), weighted (N, K), in the wider dtype of the two."""
    tokens: Tensor = _Combine.apply(rows, weights, slot_of, row_of)
    return tokens


def add_up(rows: Tensor, slot_of: Tensor, row_of: Tensor, tokens: int) -> Tensor:
    """Rows (R, D) to the sums of those of each token (N, D), without weights."""
    sums: Tensor = _Sum.apply(rows, slot_of, row_of, tokens)
    return sums


def take_reference(source: Tensor, index: Tensor) -> Tensor:
    """Rows of ``source``; zeros where the index is -1."""
    if not len(source):
        return source.new_zeros(len(index), *source.shape[1:])
    found = source.index_select(0, index.clamp(min=0))
    return found.masked_fill((index < 0).unsqueeze(-1), 0)  # not a product: padding may hold NaN


def weighted_reference(rows: Tensor, weights: Tensor | None, row_of: Tensor, tokens: int) -> Tensor:
    """The sum over the slots of each token, weighted or not."""
    per_token = len(row_of) // max(1, tokens) if weights is None else weights.shape[1]
    slots = take_reference(rows, row_of).view(tokens, per_token, rows.shape[-1])
    return (slots if weights is None else slots * weights.unsqueeze(-1)).sum(1)


def _kernels(tensor: Tensor) -> Any:
    """The kernels for a tensor on a GPU, or None."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return None
    from ragged_fsdp.experts import permute_triton

    return permute_triton


class _Take(torch.autograd.Function):
    """Rows from tokens; backward adds up what came to the rows of each token."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slot_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(slot_of, row_of)
        ctx.tokens = len(tokens)
        per_token = len(row_of) // max(1, len(tokens))
        kernels = _kernels(tokens)
        if kernels is not None:
            return kernels.take(tokens, slot_of, per_token)
        return take_reference(tokens, slot_of.div(max(1, per_token), rounding_mode="floor"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        slot_of, row_of = ctx.saved_tensors
        return _Sum.apply(grads[0], slot_of, row_of, ctx.tokens), None, None


class _Sum(torch.autograd.Function):
    """The backward of :class:`_Take`, which is its own inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slot_of: Tensor, row_of: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(slot_of, row_of)
        kernels = _kernels(rows)
        if kernels is not None:
            return kernels.weighted_sum(rows, None, row_of, tokens)
        return weighted_reference(rows, None, row_of, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Take.apply(grads[0], *ctx.saved_tensors), None, None, None


class _Combine(torch.autograd.Function):
    """Tokens from rows; backward sends each row its token's gradient, and each weight a product."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, slot_of: Tensor, row_of: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, slot_of, row_of)
        kernels = _kernels(rows)
        if kernels is not None:
            return kernels.weighted_sum(rows, weights, row_of, len(weights))
        return weighted_reference(rows, weights, row_of, len(weights))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weights, slot_of, row_of = ctx.saved_tensors
        kernels = None if torch.is_grad_enabled() else _kernels(rows)
        if kernels is not None:
            return *kernels.combine_backward(grads[0], rows, weights, slot_of, row_of), None, None
        per_token = weights.shape[1]
        each = take_reference(weights.reshape(-1, 1), slot_of)
        grad_rows = take_reference(grads[0], slot_of.div(per_token, rounding_mode="floor")) * each
        slots = take_reference(rows, row_of).view(*weights.shape, rows.shape[-1])
        grad_weights = (slots * grads[0].unsqueeze(1)).sum(-1)
        return grad_rows.to(rows.dtype), grad_weights.to(weights.dtype), None, None
