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
    "add_up",
    "back_into",
    "back_reference",
    "combine",
    "count",
    "count_reference",
    "find_arrival",
    "invert",
    "label",
    "order",
    "pick_into",
    "pick_reference",
    "place",
    "rows_reference",
    "rows_to_fill",
    "take",
    "take_into",
    "take_reference",
    "weighted_reference",
]


@dataclass(frozen=True)
class Counted:
    """Slots that were counted by group, and whose rows are found later: counts can travel meanwhile."""

    counts: Tensor
    """How many each group has."""
    rows: Callable[..., Tensor]
    """Called without arguments: the rows (N*K,) of slots that are ordered by group, stable.

    With a tensor of edges, from 0 to some number, each group has so many rows, and slots that do not fit are
    in none, the last ones first. Each group's are cut at the edges: all groups' first parts come first, in
    the order of groups, then all second ones.
    """


def count(
    chosen: Tensor, groups: int, number_of: Tensor | None = None, *, into: Tensor | None = None
) -> Counted:
    """Count slots by group.

    What was chosen is the number of a group, or ``number_of`` it; slots numbered ``groups`` are in no row.
    ``into`` is where counts are to be, zeros of int64. Asks the device nothing.
    """
    into = chosen.new_zeros(groups, dtype=torch.int64) if into is None else into
    if chosen.is_cuda:
        from ragged_fsdp.experts import permute_triton

        return Counted(into, permute_triton.count(chosen, groups, number_of, into))
    into += count_reference(chosen, groups, number_of)
    return Counted(into, partial(rows_reference, chosen, groups, number_of))


def order(chosen: Tensor, groups: int, number_of: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The rows (N*K,) of slots that are ordered by group, as :class:`Counted` gives them; and the counts."""
    counted = count(chosen, groups, number_of)
    return counted.rows(), counted.counts


def count_reference(chosen: Tensor, groups: int, number_of: Tensor | None = None) -> Tensor:
    """How many slots each group has, by comparing."""
    slots = _numbers(chosen, number_of)
    return (slots.unsqueeze(-1) == torch.arange(groups, device=slots.device)).sum(0)


def rows_reference(
    chosen: Tensor, groups: int, number_of: Tensor | None = None, edges: Tensor | None = None
) -> Tensor:
    """What :class:`Counted` finds, by sorting."""
    slots = _numbers(chosen, number_of)
    row_of = torch.empty_like(slots, dtype=torch.int64)
    row_of[slots.argsort(stable=True)] = torch.arange(len(slots), device=slots.device)
    if edges is not None:
        counts = count_reference(chosen, groups, number_of)
        place_of = row_of - (counts.cumsum(0) - counts)[slots.clamp(max=groups - 1)]
        part = torch.searchsorted(edges, place_of, right=True).clamp(max=len(edges) - 1)
        first, length = edges[part - 1], edges[part] - edges[part - 1]
        row_of = torch.where(place_of < edges[-1], groups * first + slots * length + place_of - first, -1)
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


def invert(row_of: Tensor, rows: int) -> Tensor:
    """The slot of each row (R,), -1 where it has none."""
    kernels = _kernels(row_of)
    if kernels is None:
        return place(torch.arange(len(row_of), device=row_of.device), row_of, rows, -1)
    slot_of = row_of.new_full((rows,), -1)
    kernels.invert(row_of, slot_of)
    return slot_of


def label(slot_of: Tensor, chosen: Tensor, label_of: Tensor) -> Tensor:
    """The label of what was chosen in the slot of each row (R,); the last label where it has none."""
    kernels = _kernels(slot_of)
    if kernels is None:
        of_slots = label_of[chosen.flatten()[slot_of.clamp(min=0)]] if chosen.numel() else label_of[-1]
        return torch.where(slot_of >= 0, of_slots, label_of[-1])
    labels = torch.empty_like(slot_of)
    kernels.label(slot_of, chosen, label_of, labels)
    return labels


def find_arrival(counts: Tensor, by_row: Tensor, to_group: Tensor, rows: int) -> Tensor:
    """Where each of so many rows that come goes, so that they are grouped.

    They come kind by kind, ``counts[by_row[i]]`` of kind i; kinds are to lie by ``to_group``, which has each
    number once.
    """
    kernels = _kernels(counts)
    if kernels is None:
        return order(to_group.repeat_interleave(counts[by_row], output_size=rows), len(to_group))[0]
    arrival = counts.new_empty(rows)
    kernels.find_arrival(counts, by_row, to_group, arrival)
    return arrival


def take_into(into: Tensor, tokens: Tensor, row_of: Tensor) -> None:
    """Each token (N, D) to its rows (R, D); no other is written."""
    kernels = _kernels(tokens)
    (take_reference if kernels is None else kernels.take)(tokens, row_of, into)


def pick_into(into: Tensor, source: Tensor, index: Tensor, shared: int = 1) -> None:
    """Rows (R, D) of a source, the one at ``index // shared`` each; where that is -1 nothing is written."""
    kernels = _kernels(source)
    (pick_reference if kernels is None else kernels.pick)(source, index, into, shared)


def rows_to_fill(like: Tensor, rows: int, filled: Tensor | None) -> Tensor:
    """Memory for rows (R, D); zeros behind the sum of ``filled``, anything or zeros where that is None."""
    kernels = _kernels(like)
    if kernels is None:
        return torch.zeros(rows, like.shape[1], dtype=like.dtype, device=like.device)
    made = like.new_empty(rows, like.shape[1])
    if filled is not None:
        kernels.fill_rest(made, filled)
    return made


def add_up(
    rows: Tensor,
    weights: Tensor | None,
    row_of: Tensor,
    tokens: int,
    dtype: torch.dtype,
    filled: Tensor | None = None,
) -> Tensor:
    """What :func:`combine` returns, without a graph."""
    kernels = _kernels(rows)
    if kernels is None:
        return weighted_reference(rows, weights, row_of, tokens).to(dtype)
    into = rows.new_empty(tokens, rows.shape[1], dtype=dtype)
    kernels.weighted_sum(rows, weights, row_of, into, every=filled is None)
    return into


def back_into(
    into: tuple[Tensor, Tensor], grad: Tensor, rows: Tensor, weights: Tensor, slot_of: Tensor
) -> None:
    """The backward of a weighted sum: gradients of rows (R, D), and of the weights (N, K) of their slots.

    Nothing else is written: neither rows without a slot, nor weights whose row is not among these.
    """
    kernels = _kernels(rows)
    (back_reference if kernels is None else kernels.combine_backward)(grad, rows, weights, slot_of, into)


def take_reference(tokens: Tensor, row_of: Tensor, into: Tensor) -> None:
    """What ``permute_triton.take`` does."""
    slots = tokens.repeat_interleave(len(row_of) // max(1, len(tokens)), 0)
    longer = torch.cat((into, into.new_empty(1, *into.shape[1:])))  # missing ones go where it is cut off
    longer[torch.where(row_of < 0, len(into), row_of)] = slots
    into.copy_(longer[: len(into)])


def pick_reference(source: Tensor, index: Tensor, into: Tensor, shared: int) -> None:
    """What ``permute_triton.pick`` does."""
    if len(source):
        found = source[index.clamp(min=0) // shared]
        into.copy_(torch.where((index >= 0).unsqueeze(-1), found, into))


def back_reference(
    grad: Tensor, rows: Tensor, weights: Tensor, slot_of: Tensor, into: tuple[Tensor, Tensor]
) -> None:
    """What ``permute_triton.combine_backward`` does."""
    if not weights.numel():
        return
    there, slot = slot_of >= 0, slot_of.clamp(min=0)
    of_token = grad[slot // weights.shape[1]]
    of_rows = (of_token * weights.flatten()[slot].unsqueeze(-1)).to(rows.dtype)
    into[0].copy_(torch.where(there.unsqueeze(-1), of_rows, into[0]))
    products = (rows * of_token).sum(-1).to(weights.dtype)
    longer = torch.cat((into[1].flatten(), products.new_empty(1)))
    longer[torch.where(there, slot_of, weights.numel())] = products
    into[1].copy_(longer[:-1].view(weights.shape))


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
        taken = rows_to_fill(tokens, rows, filled)
        take_into(taken, tokens, row_of)
        return taken

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
        return add_up(rows, None, row_of, tokens, rows.dtype, filled)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        row_of, filled = ctx.saved_tensors
        return _Take.apply(grads[0], row_of, ctx.rows, filled), None, None, None


class _Combine(torch.autograd.Function):
    """Tokens from rows; backward sends each row its token's gradient, and each weight a product."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, row_of: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rows, weights, row_of)
        return add_up(rows, weights, row_of, len(weights), dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weights, row_of = ctx.saved_tensors
        if not torch.is_grad_enabled():
            made = rows_to_fill(rows, len(rows), None), torch.zeros_like(weights)
            back_into(made, grads[0], rows, weights, invert(row_of, len(rows)))
            return *made, None, None
        of_slots = grads[0].unsqueeze(1) * weights.unsqueeze(-1)
        grad_rows = place(of_slots.flatten(0, 1), row_of, len(rows), 0)
        grad_weights = (_slots(rows, row_of, *weights.shape) * grads[0].unsqueeze(1)).sum(-1)
        return grad_rows.to(rows.dtype), grad_weights.to(weights.dtype), None, None
