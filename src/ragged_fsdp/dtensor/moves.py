"""Moves of a ragged tensor, each with the cheapest collective.

Every function takes and returns local tensors; a result may be an ``AsyncCollectiveTensor`` where no
work is left after the collective. Which collective is used depends on the layout alone, so the ranks
of the mesh dim always agree. The table is in :mod:`ragged_fsdp.placement`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial

from ragged_fsdp.dtensor.geometry import RaggedLayout
from ragged_fsdp.routes import HopKind, Part, Route, overlap
from ragged_fsdp.torch_internals import (
    AsyncCollectiveTensor,
    all_gather,
    functional,
    reduce_scatter,
    reduce_value,
)

__all__ = [
    "all_from_ragged",
    "exchange",
    "partial_from_ragged",
    "ragged_from_all",
    "ragged_from_partial",
    "ragged_from_ragged",
    "wait",
]

Group = tuple[Any, int]
"""A mesh and the mesh dim to communicate over."""

# Padding every piece to the longest is one fast collective, but not if it multiplies the traffic.
_MAX_PADDED_RATIO = 2

# How the addends of a pending reduction, one per row, combine.
_COMBINE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "avg": lambda rows: rows.mean(0),
    "product": lambda rows: rows.prod(0, dtype=rows.dtype),
    "max": lambda rows: rows.amax(0),
    "min": lambda rows: rows.amin(0),
}


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The finished tensor."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def all_from_ragged(
    local: torch.Tensor, layout: RaggedLayout, group: Group, *, async_op: bool = False
) -> torch.Tensor:
    """Ragged to Replicate: every rank gets the whole inner tensor."""
    return _gathered(local.reshape(-1), layout.counts, group, async_op).view(layout.inner_shape)


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


def exchange(
    local: torch.Tensor, route: Route, mesh: Any, pending: Sequence[tuple[int, Partial]], async_op: bool
) -> torch.Tensor:
    """Follow ``route``; the result is flat. ``pending`` are the sums that the target does not have.

    A sum over a mesh dim that the target cuts is taken where its addends meet; the others are reduced
    where the elements lie on the fewest ranks, before the gathers.
    """
    summed = {hop.mesh_dim for hop in route.hops if hop.kind is HopKind.REDUCE}
    partials, waiting = dict(pending), [item for item in pending if item[0] not in summed]
    buffer = local.reshape(-1)
    if route.packing is not None:
        buffer = _joined(buffer, [_part(buffer, part).reshape(-1) for part in route.packing])
    for hop in route.hops:
        group = (mesh, hop.mesh_dim)
        if hop.kind is HopKind.GATHER:
            buffer, waiting = _reduced(buffer, mesh, waiting), []
            buffer = _gathered(wait(buffer), hop.receive, group, async_op)
            continue
        flat = wait(buffer)
        if hop.picks is not None:
            flat = _joined(flat, [flat[start:stop] for start, stop in hop.picks])
        buffer = functional.all_to_all_single(flat.contiguous(), list(hop.receive), list(hop.send), group)
        if hop.kind is HopKind.REDUCE:
            blocks = wait(buffer).view(len(hop.receive), hop.receive[0])
            buffer = _COMBINE[partials[hop.mesh_dim].reduce_op](blocks)
    buffer = _reduced(buffer, mesh, waiting)
    if route.unpacking is None:
        return buffer
    arrived, flat, position = wait(buffer), local.new_empty(route.target_numel), 0
    for part in route.unpacking:
        _part(flat, part).copy_(arrived[position : position + part.numel].view(part.sizes))
        position += part.numel
    return flat


def ragged_from_partial(
    inner: torch.Tensor, partial: Partial, layout: RaggedLayout, group: Group
) -> torch.Tensor:
    """Partial to ragged: a reduce-scatter, of padded pieces where they are uneven."""
    mesh, mesh_dim = group
    ranks, longest = len(layout.counts), max(layout.counts)
    if not longest:
        return inner.new_empty(layout.local_shape)
    if type(partial) is not Partial or _very_uneven(layout.counts):
        return ragged_from_all(wait(reduce_value(partial, inner, mesh, mesh_dim)), layout)
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


def _gathered(flat: torch.Tensor, counts: Sequence[int], group: Group, async_op: bool) -> torch.Tensor:
    """The pieces of all ranks of the mesh dim, one after the other; ``counts`` are their lengths."""
    ranks, owners = len(counts), [rank for rank, count in enumerate(counts) if count]
    if ranks == 1 or not owners:
        return flat
    if len(owners) == 1:
        source = flat.contiguous() if flat.numel() else flat.new_empty(sum(counts))
        out = functional.broadcast(source, owners[0], group)
    elif len(set(counts)) == 1:
        out = all_gather(flat.contiguous(), 0, group)
    elif async_op or _very_uneven(counts):
        # The pieces arrive in their final places: nothing is left to do after the exchange.
        out = functional.all_to_all_single(flat.repeat(ranks), list(counts), [flat.numel()] * ranks, group)
    else:
        out = _gather_padded(flat, counts, group)
    return out if async_op else wait(out)


def _gather_padded(flat: torch.Tensor, counts: Sequence[int], group: Group) -> torch.Tensor:
    ranks, longest = len(counts), max(counts)
    padded = torch.nn.functional.pad(flat, (0, longest - flat.numel())) if flat.numel() < longest else flat
    rows = wait(all_gather(padded.contiguous(), 0, group)).view(ranks, longest)
    return torch.cat([rows[rank, :count] for rank, count in enumerate(counts) if count])


def _very_uneven(counts: Sequence[int]) -> bool:
    return len(counts) * max(counts) > _MAX_PADDED_RATIO * sum(counts)


def _reduced(buffer: torch.Tensor, mesh: Any, pending: Sequence[tuple[int, Partial]]) -> torch.Tensor:
    for mesh_dim, partial in pending:
        buffer = reduce_value(partial, wait(buffer), mesh, mesh_dim)
    return buffer


def _joined(flat: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """A copy of the parts, one after the other."""
    return torch.cat(parts) if parts else flat.new_empty(0)


def _part(flat: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of a flat tensor, as a view in the shape of its box."""
    block = flat[part.block_start : part.block_start + math.prod(part.block_sizes)].view(part.block_sizes)
    for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes)):
        block = block.narrow(dim, offset, size)
    return block
