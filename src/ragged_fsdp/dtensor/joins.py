"""The way back from views: gradients of slices, and parts joined along dim 0. Nothing is sent.

A part keeps the layout of its rows, so its place in the whole is on the ranks that hold it already; what
only the zeros of a gradient fill goes to their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import is_ragged, ragged_layout
from ragged_fsdp.dtensor.views import checked_first_dim, ragged_like, refuse_other_shards
from ragged_fsdp.torch_internals import bound_arguments, local_of

__all__ = ["HANDLERS"]

aten = torch.ops.aten
Shape = tuple[int, ...]


def _slice_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    call = bound_arguments(op, args, kwargs)
    grad, shape = call["grad_output"], tuple(call["input_sizes"])
    checked_first_dim(op, grad, call["dim"])
    lo, hi, _ = slice(call["start"], call["end"]).indices(shape[0])
    if call["step"] != 1 and hi - lo > 1:
        raise refusal(op, grad, f"a slice with step {call['step']} is not one run of its flat order")
    return _embedded(grad, shape, lo * math.prod(shape[1:]))


def _select_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, shape, dim, index = args
    refuse_other_shards(op, grad)
    if dim % len(shape):
        raise refusal(op, grad, f"a part of dim {dim} is not one run of its flat order")
    return _embedded(grad, tuple(shape), index % shape[0] * math.prod(shape[1:]))


def _embedded(part: DTensor, shape: Shape, start: int) -> DTensor:
    """A tensor of ``shape`` that is ``part`` from ``start`` on in the flat order, and 0 elsewhere.

    The first and the last rank that have elements of it get the zeros before and after.
    """
    layout, own = ragged_layout(part), local_of(part)
    counts = list(layout.counts)
    owners = [rank for rank, count in enumerate(counts) if count] or [0]
    counts[owners[0]] += start
    counts[owners[-1]] += math.prod(shape) - start - part.numel()
    local = own.new_zeros(counts[layout.index])
    begin = start if layout.index == owners[0] else 0
    local[begin : begin + layout.numel] = own.reshape(-1)
    return ragged_like(part, local, shape, counts)


def _cat(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Along dim 0, of parts that lie on the ranks in their order, as those of a split do."""
    call = bound_arguments(op, args, kwargs)
    parts, ragged = call["tensors"], next(t for t in call["tensors"] if is_ragged(t))
    if not all(is_ragged(t) and t.device_mesh == ragged.device_mesh for t in parts):
        raise refusal(op, ragged, "another part is not ragged, or lies on another mesh")
    layouts, last_owner = [ragged_layout(t) for t in parts], 0
    for part, layout in zip(parts, layouts):
        checked_first_dim(op, part, call["dim"])
        if part.shape[1:] != ragged.shape[1:] or layout.mesh_dim != layouts[0].mesh_dim:
            raise refusal(op, ragged, f"another part of shape {tuple(part.shape)} has {part.placements}")
        owners = [rank for rank, count in enumerate(layout.counts) if count]
        if owners and owners[0] < last_owner:
            raise refusal(op, ragged, "its parts do not follow each other in the order of the ranks")
        last_owner = owners[-1] if owners else last_owner
    shape = (sum(part.shape[0] for part in parts), *ragged.shape[1:])
    local = torch.cat([local_of(part).reshape(-1) for part in parts])
    return ragged_like(ragged, local, shape, [sum(of_rank) for of_rank in zip(*(t.counts for t in layouts))])


def _stack(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    call = bound_arguments(op, args, kwargs)
    return aten.cat.default([aten.unsqueeze.default(t, call["dim"]) for t in call["tensors"]], call["dim"])


HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _cat,
    aten.select_backward.default: _select_backward,
    aten.slice_backward.default: _slice_backward,
    aten.stack.default: _stack,
}
