"""Moves of a ragged tensor along its own mesh dim, each with the cheapest collective.

Every function takes and returns local tensors; a result may be an ``AsyncCollectiveTensor`` where no
work is left after the collective. Which collective is used depends on the layout alone, so the ranks
of the mesh dim always agree. The table is in :mod:`ragged_fsdp.placement`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial

from ragged_fsdp.dtensor.geometry import RaggedLayout
from ragged_fsdp.dtensor.internals import AsyncCollectiveTensor, all_gather, functional, reduce_scatter
from ragged_fsdp.dtensor.intervals import Piece, chunk_bounds, overlap, shard_pieces

__all__ = [
    "all_from_ragged",
    "partial_from_ragged",
    "ragged_from_all",
    "ragged_from_partial",
    "ragged_from_ragged",
    "ragged_from_shard",
    "shard_from_ragged",
    "wait",
]

Group = tuple[Any, int]
"""A mesh and the mesh dim to communicate over."""

# Padding every piece to the longest is one fast collective, but not if it multiplies the traffic.
_MAX_PADDED_RATIO = 2


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The finished tensor."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def all_from_ragged(
    local: torch.Tensor, layout: RaggedLayout, group: Group, *, async_op: bool = False
) -> torch.Tensor:
    """Ragged to Replicate: every rank gets the whole inner tensor."""
    flat, ranks = local.reshape(-1), len(layout.counts)
    owners = [rank for rank, count in enumerate(layout.counts) if count]
    if not owners:
        return local.new_empty(layout.inner_shape)
    if ranks == 1:
        return flat.view(layout.inner_shape)
    if len(owners) == 1:
        source = flat.contiguous() if layout.numel else flat.new_empty(layout.inner_numel)
        out = functional.broadcast(source, owners[0], group)
    elif layout.even:
        out = all_gather(flat.contiguous(), 0, group)
    elif async_op or _very_uneven(layout):
        # The pieces arrive in their final places: nothing is left to do after the exchange.
        out = functional.all_to_all_single(
            flat.repeat(ranks), list(layout.counts), [layout.numel] * ranks, group
        )
    else:
        out = _gather_padded(flat, layout, group)
    return (out if async_op else wait(out)).view(layout.inner_shape)


def ragged_from_all(inner: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Replicate to ragged: a copy of this rank's interval, so that the inner tensor can be freed."""
    if len(layout.counts) == 1:
        return inner.reshape(layout.local_shape)
    return inner.reshape(-1)[layout.start : layout.stop].clone().view(layout.local_shape)


def ragged_from_ragged(
    local: torch.Tensor, source: RaggedLayout, target: RaggedLayout, group: Group
) -> torch.Tensor:
    """Between two partitions of the same inner tensor: an all-to-all of the parts that move."""
    if source.counts == target.counts:
        return local.reshape(target.local_shape)
    me, ranks = source.index, range(len(source.counts))
    send = [overlap(source.start, source.numel, target.starts[r], target.counts[r]) for r in ranks]
    receive = [overlap(target.start, target.numel, source.starts[r], source.counts[r]) for r in ranks]
    assert me == target.index
    out = functional.all_to_all_single(local.reshape(-1).contiguous(), receive, send, group)
    return out.view(target.local_shape)


def shard_from_ragged(local: torch.Tensor, source: RaggedLayout, dim: int, group: Group) -> torch.Tensor:
    """Ragged to Shard(dim). The pieces arrive in row-major order: only the sender rearranges."""
    ranks, me = len(source.counts), source.index
    begin, end = chunk_bounds(source.inner_shape[dim], ranks, me)
    shape = (*source.inner_shape[:dim], end - begin, *source.inner_shape[dim + 1 :])
    if _nothing_moves(source, dim):
        return local.reshape(shape)
    flat = local.reshape(-1)
    mine = [_pieces(source, dim, me, chunk) for chunk in range(ranks)]
    send = [sum(piece.numel for piece in pieces) for pieces in mine]
    receive = [sum(piece.numel for piece in _pieces(source, dim, rank, me)) for rank in range(ranks)]
    if dim and flat.numel():
        flat = torch.cat([_rows(flat, piece).reshape(-1) for pieces in mine for piece in pieces])
    return functional.all_to_all_single(flat.contiguous(), receive, send, group).view(shape)


def ragged_from_shard(local: torch.Tensor, target: RaggedLayout, dim: int, group: Group) -> torch.Tensor:
    """Shard(dim) to ragged. Row-major pieces leave in order: only the receiver rearranges."""
    ranks, me = len(target.counts), target.index
    if _nothing_moves(target, dim):
        return local.reshape(target.local_shape)
    mine = [_pieces(target, dim, me, chunk) for chunk in range(ranks)]
    receive = [sum(piece.numel for piece in pieces) for pieces in mine]
    send = [sum(piece.numel for piece in _pieces(target, dim, rank, me)) for rank in range(ranks)]
    out = functional.all_to_all_single(local.reshape(-1).contiguous(), receive, send, group)
    if not dim:
        return out.view(target.local_shape)
    arrived, flat, position = wait(out), local.new_empty(target.numel), 0
    for pieces in mine:
        for piece in pieces:
            part = arrived[position : position + piece.numel]
            _rows(flat, piece).copy_(part.view(piece.rows, piece.run))
            position += piece.numel
    return flat.view(target.local_shape)


def ragged_from_partial(
    inner: torch.Tensor, partial: Partial, layout: RaggedLayout, group: Group
) -> torch.Tensor:
    """Partial to ragged: a reduce-scatter, of padded pieces where they are uneven."""
    mesh, mesh_dim = group
    ranks, longest = len(layout.counts), max(layout.counts)
    if not longest:
        return inner.new_empty(layout.local_shape)
    if type(partial) is not Partial or _very_uneven(layout):
        return ragged_from_all(wait(partial._reduce_value(inner, mesh, mesh_dim)), layout)
    if ranks == 1:
        return inner.reshape(layout.local_shape)
    flat = inner.reshape(-1)
    if not layout.even:
        padded = flat.new_zeros(ranks, longest)
        for rank, (start, count) in enumerate(zip(layout.starts, layout.counts)):
            padded[rank, :count] = flat[start : start + count]
        flat = padded.view(-1)
    out = reduce_scatter(flat.contiguous(), partial.reduce_op, 0, group)
    if layout.even:
        return out.view(layout.local_shape)
    return wait(out)[: layout.numel].clone().view(layout.local_shape)


def partial_from_ragged(local: torch.Tensor, partial: Partial, layout: RaggedLayout) -> torch.Tensor:
    """Ragged to a Partial whose reduction gives the same tensor: zeros where others hold the values."""
    if type(partial) is not Partial or partial.reduce_op not in ("sum", "avg"):
        raise RuntimeError(f"a ragged tensor cannot become {partial}: only a sum or an average can.")
    scale = len(layout.counts) if partial.reduce_op == "avg" else 1
    flat = local.new_zeros(layout.inner_numel)
    flat[layout.start : layout.stop] = local.reshape(-1) * scale
    return flat.view(layout.inner_shape)


def _very_uneven(layout: RaggedLayout) -> bool:
    return len(layout.counts) * max(layout.counts) > _MAX_PADDED_RATIO * layout.inner_numel


def _gather_padded(flat: torch.Tensor, layout: RaggedLayout, group: Group) -> torch.Tensor:
    ranks, longest = len(layout.counts), max(layout.counts)
    padded = torch.nn.functional.pad(flat, (0, longest - layout.numel)) if layout.numel < longest else flat
    rows = wait(all_gather(padded.contiguous(), 0, group)).view(ranks, longest)
    return torch.cat([rows[rank, :count] for rank, count in enumerate(layout.counts) if count])


@lru_cache(maxsize=8192)
def _pieces(layout: RaggedLayout, dim: int, rank: int, chunk: int) -> tuple[Piece, ...]:
    """What the interval of ``rank`` and the ``chunk``-th part of Shard(dim) have in common."""
    start = layout.starts[rank]
    ranks = len(layout.counts)
    return shard_pieces(layout.inner_shape, dim, ranks, chunk, start, start + layout.counts[rank])


def _nothing_moves(layout: RaggedLayout, dim: int) -> bool:
    """Whether on every rank the interval and the part of Shard(dim) are the same elements."""
    shape, ranks = layout.inner_shape, len(layout.counts)
    row = math.prod(shape) // shape[dim] if shape[dim] else 0
    for rank, count in enumerate(layout.counts):
        begin, end = chunk_bounds(shape[dim], ranks, rank)
        common = sum(piece.numel for piece in _pieces(layout, dim, rank, rank))
        if not count == common == (end - begin) * row:
            return False
    return True


def _rows(flat: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The runs of a piece as a (rows, run) view of the interval."""
    span = flat[piece.start : piece.start + (piece.rows - 1) * piece.stride + piece.run]
    return span.unfold(0, piece.run, piece.stride)
