"""Rows on their way: from tokens to rows ordered by expert, and from the outputs of rows to tokens.

A *slot* is one of the K experts that a token was sent to; token n has the slots n*K to n*K + K - 1. Rows are
slots in another order, some of which may be missing here (they went elsewhere, or were dropped) and some of
which may hold nothing (padding). One tensor says it all, the row of each slot::

    take       the token of a slot goes to row ``row_of[slot]``, nowhere if that is -1
    combine    token n is the sum over its slots of weight * row ``row_of[slot]``; a missing one (-1) adds 0

Each is the other's backward up to the weights, so neither needs an atomic addition, and results have the same
bits every time. On a GPU they run as Triton kernels (:mod:`ragged_fsdp.experts.permute_triton`); what is here
is what those must equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ragged_fsdp.torch_internals import disable_dynamo

__all__ = [
    "Counted",
    "combine",
    "count",
    "count_reference",
    "order",
    "place",
    "rows_reference",
    "take",
    "take_reference",
    "weighted_reference",
]


@dataclass(frozen=True)
class Counted:
    """Slots that were counted by group, and whose rows are found later: counts can travel meanwhile."""

    counts: Tensor
    """How many each group has."""
    rows: Callable[[int | None], Tensor]
    """Called with None: the rows (N*K,) of slots that are ordered by group, stable. With a number each group
    has so many rows, and slots that do not fit are in none, the last ones first."""


def count(
    chosen: Tensor, groups: int, number_of: Tensor | None = None, *, into: Tensor | None = None
) -> Counted:
    """Count slots by group.

    What was chosen is the number of a group, or ``number_of`` it; slots numbered ``groups`` are in no row.
    ``into`` is where counts are to be, zeros of int64. With two dims (R, P) group ``p * R + r`` is at (r, p).
    Asks the device nothing.
    """
    into = chosen.new_zeros(groups, dtype=torch.int64) if into is None else into
    if chosen.is_cuda:
        from ragged_fsdp.experts import permute_triton

        return Counted(into, permute_triton.count(chosen, groups, number_of, into))
    into += count_reference(chosen, groups, number_of).view(*reversed(into.shape)).t()
    return Counted(into, partial(rows_reference, chosen, groups, number_of))


def order(chosen: Tensor, groups: int, number_of: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rows (N*K,) of slots that are ordered by group, as :class:`Counted` gives them; and the counts."""
    counted = count(chosen, groups, number_of)
    return counted.rows(None), counted.counts


def count_reference(chosen: Tensor, groups: int, number_of: Tensor | None = None) -> Tensor:
    """How many slots each group has, by comparing."""
    slots = _numbers(chosen, number_of)
    return (slots.unsqueeze(-1) == torch.arange(groups, device=slots.device)).sum(0)


def rows_reference(
    chosen: Tensor, groups: int, number_of: Tensor | None = None, room: int | None = None
) -> Tensor:
    """What :class:`Counted` finds, by sorting."""
    slots = _numbers(chosen, number_of)
    row_of = torch.empty_like(slots, dtype=torch.int64)
    row_of[slots.argsort(stable=True)] = torch.arange(len(slots), device=slots.device)
    if room is not None:
        counts = count_reference(chosen, groups, number_of)
        place_of = row_of - (counts.cumsum(0) - counts)[slots.clamp(max=groups - 1)]
        row_of = torch.where(place_of < room, slots * room + place_of, -1)
    return torch.where(slots == groups, -1, row_of)


def _numbers(chosen: Tensor, number_of: Tensor | None) -> Tensor:
    return (chosen if number_of is None else number_of[chosen]).flatten()


def place(values: Tensor, row_of: Tensor, rows: int, fill: float) -> Tensor:
    """Values of the slots (N*K, ...) in their rows, ``fill`` in the others."""
    placed = values.new_full((rows + 1, *values.shape[1:]), fill)
    placed[torch.where(row_of < 0, rows, row_of)] = values  # missing ones go where it is cut off
    return placed[:rows]


def take(tokens: Tensor, row_of: Tensor, rows: int, *, filled: Tensor | None = None) -> Tensor:
    """Tokens (N, D) to rows (R, D), given the row of each slot (N*K,).

    Rows that belong to no slot hold anything at all. Not so if all that do come first and ``filled`` are
    numbers that add up to how many these are: the rows behind them are zeros, and gradients of tokens of one
    slot each, which is missing, may be anything.
    """
    return _apply(_Take, tokens, row_of, rows, filled)


def combine(
    rows: Tensor,
    weights: Tensor | None,
    row_of: Tensor,
    tokens: int,
    *,
    dtype: torch.dtype | None = None,
    filled: Tensor | None = None,
) -> Tensor:
    """Outputs of rows (R, D) to tokens (N, D): sums, weighted (N, K) or not.

    The result has ``dtype``, or the wider dtype of the two. Gradients of rows without a slot are as in
    :func:`take`. With ``filled``, of tokens of one slot each, those whose slot is missing may come out as
    anything; without it they are zeros.
    """
    if weights is None:
        return _apply(_Sum, rows, row_of, tokens, filled)
    dtype = dtype or torch.promote_types(rows.dtype, weights.dtype)
    return _apply(_Combine, rows, weights, row_of, dtype)


def take_reference(source: Tensor, row_of: Tensor, rows: int) -> Tensor:
    """Each of ``source`` in the rows of its slots; zeros where there is none."""
    per_token = len(row_of) // max(1, len(source))
    return place(source.repeat_interleave(per_token, 0), row_of, rows, 0)


def weighted_reference(rows: Tensor, weights: Tensor | None, row_of: Tensor, tokens: int) -> Tensor:
    """The sum over the slots of each token, weighted or not."""
    per_token = len(row_of) // max(1, tokens) if weights is None else weights.shape[1]
    slots = _slots(rows, row_of, tokens, per_token)
    return (slots if weights is None else slots * weights.unsqueeze(-1)).sum(1)


def _slots(rows: Tensor, row_of: Tensor, tokens: int, per_token: int) -> Tensor:
    """Rows by slot, (N, K, D); zeros for those that are missing."""
    shape = (tokens, per_token, rows.shape[-1])
    if not len(rows):
        return rows.new_zeros(shape)
    found = rows.index_select(0, row_of.clamp(min=0))
    return found.masked_fill((row_of < 0).unsqueeze(-1), 0).view(shape)  # not a product: padding may be NaN


def _kernels(tensor: Tensor) -> Any:
    """The kernels for a tensor on a GPU, or None."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return None
    from ragged_fsdp.experts import permute_triton

    return permute_triton


def _apply(function: Any, tensor: Tensor, *args: Any) -> Tensor:
    if _kernels(tensor) is not None:
        return _apply_untraced(function, tensor, *args)
    applied: Tensor = function.apply(tensor, *args)
    return applied


@disable_dynamo  # that of torch 2.11 fails inside of a function of autograd that launches kernels
def _apply_untraced(function: Any, *args: Any) -> Tensor:
    applied: Tensor = function.apply(*args)
    return applied


class _Take(torch.autograd.Function):
    """Rows from tokens; backward adds up what came to the rows of each token."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, row_of: Tensor, rows: int, filled: Tensor | None) -> Tensor:
        ctx.save_for_backward(row_of, filled)
        ctx.tokens = len(tokens)
        kernels = _kernels(tokens)
        if kernels is not None:
            return kernels.take(tokens, row_of, rows, filled)
        return take_reference(tokens, row_of, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        row_of, filled = ctx.saved_tensors
        return _Sum.apply(grads[0], row_of, ctx.tokens, filled), None, None, None


class _Sum(torch.autograd.Function):
    """The backward of :class:`_Take`, which is its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_of: Tensor, tokens: int, filled: Tensor | None) -> Tensor:
        ctx.save_for_backward(row_of, filled)
        ctx.rows = len(rows)
        kernels = _kernels(rows)
        if kernels is not None:
            return kernels.weighted_sum(rows, None, row_of, tokens, rows.dtype, filled is None)
        return weighted_reference(rows, None, row_of, tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        row_of, filled = ctx.saved_tensors
        return _Take.apply(grads[0], row_of, ctx.rows, filled), None, None, None


class _Combine(torch.autograd.Function):
    """Tokens from rows; backward sends each row its token's gradient, and each weight a product."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, row_of: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rows, weights, row_of)
        kernels = _kernels(rows)
        if kernels is not None:
            return kernels.weighted_sum(rows, weights, row_of, len(weights), dtype, True)
        return weighted_reference(rows, weights, row_of, len(weights)).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weights, row_of = ctx.saved_tensors
        kernels = None if torch.is_grad_enabled() else _kernels(rows)
        if kernels is not None:
            return *kernels.combine_backward(grads[0], rows, weights, row_of), None, None
        of_slots = grads[0].unsqueeze(1) * weights.unsqueeze(-1)
        grad_rows = place(of_slots.flatten(0, 1), row_of, len(rows), 0)
        grad_weights = (_slots(rows, row_of, *weights.shape) * grads[0].unsqueeze(1)).sum(-1)
        return grad_rows.to(rows.dtype), grad_weights.to(weights.dtype), None, None
