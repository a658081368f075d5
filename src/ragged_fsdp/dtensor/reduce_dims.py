"""Reductions along some dims, and ops along one dim, on ragged tensors.

Where the reduced dims come after those that the pieces cut, each row is whole on its rank: the op
runs locally and the result is ragged alike. Where all cut dims are reduced, each rank reduces its
rows and the results are summed (or maximised, ...) later: a Partial. Where only some are, the piece
is first laid into the inner tensor, filled with the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from ragged_fsdp.dtensor.broadcast import values_for
from ragged_fsdp.dtensor.construct import wrap_local
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import contiguous_spec, is_ragged, ragged_layout
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.torch_internals import DTensorSpec, local_of, spec_of

__all__ = [
    "EXTREMES",
    "Combine",
    "along_dims",
    "beside",
    "extreme_identity",
    "is_pending",
    "on_whole_rows",
    "partial_scalar",
    "pending",
    "why_rows_are_cut",
]

LocalReduction = Callable[[torch.Tensor, list[int], bool], torch.Tensor]


@dataclass(frozen=True)
class Combine:
    """How partial results of several ranks combine, and the value of an empty piece."""

    reduce_op: str
    identity: Callable[[torch.dtype], Any]


def extreme_identity(dtype: torch.dtype, largest: bool) -> Any:
    """What leaves a maximum (or a minimum) of this dtype unchanged."""
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


EXTREMES = {
    "max": Combine("max", lambda dtype: extreme_identity(dtype, True)),
    "min": Combine("min", lambda dtype: extreme_identity(dtype, False)),
}


def along_dims(
    op: Any, tensor: DTensor, dims: Sequence[int], keepdim: bool, reduce: LocalReduction, combine: Combine
) -> DTensor:
    """Reduce ``dims`` of a ragged tensor with ``reduce(local, dims, keepdim)``."""
    layout = ragged_layout(tensor)
    prefix = layout.cut_dims
    reduced = sorted({d % max(1, tensor.ndim) for d in dims})
    shape = _reduced_shape(tuple(tensor.shape), reduced, keepdim)
    inner = _reduced_shape(layout.inner_shape, reduced, keepdim)
    own = local_of(tensor)
    if tensor.ndim and all(d >= prefix for d in reduced):
        local = reduce(own, [d - prefix + 1 for d in reduced], keepdim)
        return _wrapped(tensor, local, shape, reduced, keepdim, combine, ragged_stays=True)
    if not layout.numel:
        sample = reduce(own.new_ones((1,) * len(layout.inner_shape)), reduced, keepdim)
        local = sample.new_full(inner, combine.identity(sample.dtype))
    elif reduced[:prefix] == list(range(prefix)):
        local = reduce(own, [0, *(d - prefix + 1 for d in reduced[prefix:])], False).reshape(inner)
    else:
        filled = own.new_full(layout.inner_shape, combine.identity(own.dtype))
        filled.view(-1)[layout.start : layout.stop] = own.reshape(-1)
        local = reduce(filled, reduced, keepdim)
    return _wrapped(tensor, local, shape, reduced, keepdim, combine, ragged_stays=False)


def on_whole_rows(op: Any, tensor: DTensor, dim: int, run: Callable[[torch.Tensor, int], Any]) -> Any:
    """``run(local, local_dim)`` along one dim of each row; the results are ragged alike."""
    why_not = why_rows_are_cut(tensor, dim)
    if why_not:
        raise refusal(op, tensor, why_not)
    prefix = ragged_layout(tensor).cut_dims
    results = run(local_of(tensor), dim % max(1, tensor.ndim) - prefix + 1)

    def wrap(local: torch.Tensor) -> DTensor:
        shape = (*tensor.shape[:prefix], *local.shape[1:])
        return wrap_local(local, contiguous_spec(tensor.device_mesh, tensor.placements, shape, local.dtype))

    return tuple(map(wrap, results)) if isinstance(results, (tuple, list)) else wrap(results)


def why_rows_are_cut(tensor: DTensor, dim: int) -> str:
    """Why a rank does not have the whole of ``dim`` for the rows of its piece; empty if it does."""
    prefix = ragged_layout(tensor).cut_dims
    if dim % max(1, tensor.ndim) < prefix:
        return f"it runs along dim {dim}, which the pieces cut"
    if any(isinstance(p, Shard) and p.dim >= prefix for p in tensor.placements):
        return f"it runs along dim {dim} beside a Shard placement"
    return ""


def beside(tensor: DTensor, reduced: DTensor) -> torch.Tensor:
    """A reduction of ``tensor`` that kept its dims, for each element of the local piece of ``tensor``."""
    if is_ragged(spec_of(reduced)):
        return local_of(reduced)  # rows are whole: it broadcasts
    return values_for(tensor, local_of(reduced), ragged_layout(tensor).inner_offset)


def pending(spec: DTensorSpec) -> DTensorSpec:
    """``spec``, marked as what a reduction of a ragged tensor left to be combined.

    ``item()`` of a Partial is the number of this rank alone, and a rank without a piece has none to tell:
    see :mod:`ragged_fsdp.dtensor.handlers`.
    """
    spec._of_ragged_pieces = True  # type: ignore[attr-defined]
    return spec


def is_pending(spec: DTensorSpec) -> bool:
    """Whether ``spec`` is what a reduction of a ragged tensor left to be combined."""
    return getattr(spec, "_of_ragged_pieces", False) and any(p.is_partial() for p in spec.placements)


def partial_scalar(tensor: DTensor, local: torch.Tensor, reduce_op: str) -> DTensor:
    """One number per rank, to be combined over every mesh dim that ``tensor`` is cut along."""
    placements = tuple(
        Partial(reduce_op) if isinstance(p, (RaggedShard, Shard)) else p for p in tensor.placements
    )
    spec = contiguous_spec(tensor.device_mesh, placements, local.shape, local.dtype)
    return wrap_local(local, pending(spec))


def _reduced_shape(shape: tuple[int, ...], reduced: list[int], keepdim: bool) -> tuple[int, ...]:
    return tuple(1 if d in reduced else s for d, s in enumerate(shape) if keepdim or d not in reduced)


def _wrapped(
    tensor: DTensor,
    local: torch.Tensor,
    shape: tuple[int, ...],
    reduced: list[int],
    keepdim: bool,
    combine: Combine,
    *,
    ragged_stays: bool,
) -> DTensor:
    def after(placement: Placement) -> Placement:
        if isinstance(placement, RaggedShard):
            return placement if ragged_stays else Partial(combine.reduce_op)
        if isinstance(placement, Shard):
            if placement.dim in reduced:
                return Partial(combine.reduce_op)
            return Shard(placement.dim - (0 if keepdim else sum(d < placement.dim for d in reduced)))
        return placement

    placements = tuple(after(p) for p in tensor.placements)
    return wrap_local(local, pending(contiguous_spec(tensor.device_mesh, placements, shape, local.dtype)))
