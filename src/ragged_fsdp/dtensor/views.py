"""Views of the flat order, and the way back: gradients of slices, and parts joined along dim 0.

Views stay ragged and alias; every other view is refused. A gather would give a result, but writes into it
would be lost: other people's matrix optimizers must fail early rather than train wrong.

On the way back nothing is sent. A part keeps the layout of its rows, so its place in the whole is on the
ranks that hold it already; what only the zeros of a gradient fill goes to their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from ragged_fsdp.dtensor.construct import wrap_local
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import contiguous_spec, is_ragged, ragged_layout
from ragged_fsdp.placement import RaggedShard, ragged_dims
from ragged_fsdp.routes import overlap
from ragged_fsdp.torch_internals import (
    DTensorSpec,
    TensorMeta,
    bound_arguments,
    local_of,
    return_and_correct_aliasing,
    spec_of,
)

__all__ = ["HANDLERS"]

aten = torch.ops.aten
Shape = tuple[int, ...]
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Other shapes and parts of the tensor: what they are is asked of a tensor without memory."""
    tensor: DTensor = args[0]
    model = op(_without_memory(tensor.shape), *args[1:], **kwargs)
    out = _run(op, tensor, model) if torch.is_tensor(model) else [_run(op, tensor, part) for part in model]
    return return_and_correct_aliasing(op, args, kwargs, out)


def _run(op: Any, tensor: DTensor, model: torch.Tensor) -> DTensor:
    """A run of the flat order of ``tensor``: what ``model`` shows of a contiguous tensor, in its shape."""
    layout, own = ragged_layout(tensor), local_of(tensor)
    if model.shape == tensor.shape:
        return wrap_local(own.view(layout.local_shape), spec_of(tensor))
    _refuse_what_is_no_run(op, tensor, model)
    if not own.is_contiguous():
        raise refusal(op, tensor, "its local piece is not contiguous, so this view of it does not exist")
    start = int(model.storage_offset())
    counts = [overlap(start, model.numel(), s, n) for s, n in zip(layout.starts, layout.counts)]
    begin = max(start, layout.start) - layout.start if counts[layout.index] else 0
    part = own.view(-1)[begin : begin + counts[layout.index]]
    return _ragged_like(tensor, part, tuple(model.shape), counts)


def _without_memory(shape: Sequence[int]) -> torch.Tensor:
    return torch.empty([int(size) for size in shape], device="meta")


def _refuse_what_is_no_run(op: Any, tensor: DTensor, model: torch.Tensor) -> None:
    """Raise unless ``model`` is contiguous inside the flat order, and no other mesh dim cuts that."""
    if not model.is_contiguous():
        raise refusal(op, tensor, "its result is not one run of the flat order")
    if any(isinstance(p, Shard) for p in tensor.placements):
        raise refusal(op, tensor, "beside a Shard placement the new shape is not one run of the flat order")


def _expand(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat dims of size 1 after those that the pieces cut; the repeats share memory, as always."""
    tensor: DTensor = args[0]
    prefix = ragged_layout(tensor).cut_dims
    old = tuple(tensor.shape)
    new = tuple(o if n == -1 else n for n, o in zip(args[1], old)) if len(args[1]) == len(old) else ()
    if not new or new[:prefix] != old[:prefix]:
        raise refusal(op, tensor, f"expanding to {tuple(args[1])} repeats it along the dims its pieces cut")
    sharded = {p.dim for p in tensor.placements if isinstance(p, Shard)}
    if any(new[d] != old[d] for d in sharded):
        raise refusal(op, tensor, f"expanding to {new} repeats it along a sharded dim")
    local_sizes = [-1, *(n if n != o else -1 for n, o in zip(new[prefix:], old[prefix:]))]
    stride = tuple(0 if n != o else s for n, o, s in zip(new, old, tensor.stride()))
    meta = TensorMeta(torch.Size(new), stride, tensor.dtype)
    spec = DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)
    out = wrap_local(local_of(tensor).expand(local_sizes), spec)
    return return_and_correct_aliasing(op, args, kwargs, out)


def _ragged_like(model: DTensor, flat: torch.Tensor, shape: Shape, counts: Sequence[int]) -> DTensor:
    """A tensor of ``shape`` around ``flat``, with ``counts`` elements on each rank of the ragged mesh dim."""
    units: Sequence[int] = counts if sum(counts) else [1] * len(counts)
    dims = ragged_dims(shape, math.gcd(*units)) if sum(counts) else ragged_dims(shape, 0)
    placements = tuple(
        RaggedShard(dims, units) if isinstance(p, RaggedShard) else p for p in model.placements
    )
    spec = contiguous_spec(model.device_mesh, placements, shape, flat.dtype)
    return wrap_local(flat.view(ragged_layout(spec).local_shape), spec)


def _slice_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    call = bound_arguments(op, args, kwargs)
    model = _without_memory(call["input_sizes"])
    part = aten.slice.Tensor(model, call["dim"], call["start"], call["end"], call["step"])
    return _embedded(op, call["grad_output"], part, tuple(model.shape))


def _select_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, shape, dim, index = args
    return _embedded(op, grad, aten.select.int(_without_memory(shape), dim, index), tuple(shape))


def _embedded(op: Any, part: DTensor, model: torch.Tensor, shape: Shape) -> DTensor:
    """A tensor of ``shape`` that is ``part`` where ``model`` lies in the flat order, and 0 elsewhere.

    The first and the last rank that have elements of it get the zeros before and after.
    """
    if tuple(part.shape) == shape:
        return aten.clone.default(part)
    _refuse_what_is_no_run(op, part, model)
    layout, own, start = ragged_layout(part), local_of(part), int(model.storage_offset())
    counts = list(layout.counts)
    owners = [rank for rank, count in enumerate(counts) if count] or [0]
    counts[owners[0]] += start
    counts[owners[-1]] += math.prod(shape) - start - part.numel()
    local = own.new_zeros(counts[layout.index])
    begin = start if layout.index == owners[0] else 0
    local[begin : begin + layout.numel] = own.reshape(-1)
    return _ragged_like(part, local, shape, counts)


def _cat(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Along dim 0, of parts that lie on the ranks in their order, as those of a split do."""
    call = bound_arguments(op, args, kwargs)
    parts, ragged = call["tensors"], next(t for t in call["tensors"] if is_ragged(t))
    if call["dim"] % max(1, ragged.ndim):
        raise refusal(op, ragged, f"parts joined along dim {call['dim']} are not one run of the flat order")
    if not all(is_ragged(t) and t.device_mesh == ragged.device_mesh for t in parts):
        raise refusal(op, ragged, "another part is not ragged, or lies on another mesh")
    layouts, last_owner = [ragged_layout(t) for t in parts], 0
    for part, layout in zip(parts, layouts):
        _refuse_what_is_no_run(op, part, _without_memory(part.shape))
        if part.shape[1:] != ragged.shape[1:] or layout.mesh_dim != layouts[0].mesh_dim:
            raise refusal(op, ragged, f"another part of shape {tuple(part.shape)} has {part.placements}")
        owners = [rank for rank, count in enumerate(layout.counts) if count]
        if owners and owners[0] < last_owner:
            raise refusal(op, ragged, "its parts do not follow each other in the order of the ranks")
        last_owner = owners[-1] if owners else last_owner
    shape = (sum(part.shape[0] for part in parts), *ragged.shape[1:])
    local = torch.cat([local_of(part).reshape(-1) for part in parts])
    return _ragged_like(ragged, local, shape, [sum(of_rank) for of_rank in zip(*(t.counts for t in layouts))])


def _stack(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    call = bound_arguments(op, args, kwargs)
    return aten.cat.default([aten.unsqueeze.default(t, call["dim"]) for t in call["tensors"]], call["dim"])


HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.flatten.using_ints,
            aten.select.int,
            aten.slice.Tensor,
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unbind.int,
        ),
        _view,
    ),
    aten.expand.default: _expand,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.select_backward.default: _select_backward,
    aten.slice_backward.default: _slice_backward,
}
