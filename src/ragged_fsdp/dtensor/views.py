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
from ragged_fsdp.dtensor.geometry import RaggedLayout, contiguous_spec, is_ragged, ragged_layout
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


def _reshape(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same elements in another shape."""
    tensor: DTensor = args[0]
    shape = _NEW_SHAPE[op](tuple(tensor.shape), *args[1:], **kwargs)
    spec, layout = spec_of(tensor), ragged_layout(tensor)
    if math.prod(shape) != tensor.numel():
        raise ValueError(f"{op}: shape {shape} is invalid for a tensor of {tensor.numel()} elements.")
    if shape == tuple(tensor.shape):
        out = wrap_local(local_of(tensor).view(layout.local_shape), spec)
        return return_and_correct_aliasing(op, args, kwargs, out)
    _refuse_other_shards(op, tensor)
    out = _sub_tensor(op, tensor, layout, shape, 0, tensor.numel())
    return return_and_correct_aliasing(op, args, kwargs, out)


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


def _select(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim, index = args
    size = _checked_first_dim(op, tensor, dim)
    if not -size <= index < size:
        raise IndexError(f"{op}: index {index} is out of range for dim 0 of size {size}.")
    return return_and_correct_aliasing(op, args, kwargs, _rows(op, tensor, index % size, 1, squeeze=True))


def _slice(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call = bound_arguments(op, args, kwargs)
    tensor, step = call["self"], call["step"]
    size = _checked_first_dim(op, tensor, call["dim"])
    lo, hi, _ = slice(call["start"], call["end"]).indices(size)
    if step != 1 and hi - lo > 1:
        raise refusal(op, tensor, f"a slice with step {step} is not one run of its flat order")
    return return_and_correct_aliasing(op, args, kwargs, _rows(op, tensor, lo, max(0, hi - lo)))


def _split(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, sizes, dim = (*args, 0) if len(args) == 2 else args
    length = _checked_first_dim(op, tensor, dim)
    if isinstance(sizes, int):
        sizes = [min(sizes, length - lo) for lo in range(0, length, max(1, sizes))] or [0]
    out, lo = [], 0
    for size in sizes:
        out.append(_rows(op, tensor, lo, size))
        lo += size
    return return_and_correct_aliasing(op, args, kwargs, out)


def _unbind(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim = (*args, 0) if len(args) == 1 else args
    size = _checked_first_dim(op, tensor, dim)
    out = [_rows(op, tensor, index, 1, squeeze=True) for index in range(size)]
    return return_and_correct_aliasing(op, args, kwargs, out)


def _rows(op: Any, tensor: DTensor, lo: int, size: int, *, squeeze: bool = False) -> DTensor:
    """The indices ``[lo, lo + size)`` of dim 0: a run of the flat order."""
    shape, row = tuple(tensor.shape), math.prod(tensor.shape[1:])
    new_shape = shape[1:] if squeeze else (size, *shape[1:])
    return _sub_tensor(op, tensor, ragged_layout(tensor), new_shape, lo * row, (lo + size) * row)


def _sub_tensor(
    op: Any, tensor: DTensor, layout: RaggedLayout, shape: Shape, start: int, stop: int
) -> DTensor:
    """The elements ``[start, stop)`` of the flat order as a ragged tensor of ``shape``."""
    own = local_of(tensor)
    if not own.is_contiguous():
        raise refusal(op, tensor, "its local piece is not contiguous, so this view of it does not exist")
    counts = [overlap(start, stop - start, s, n) for s, n in zip(layout.starts, layout.counts)]
    begin = max(start, layout.start) - layout.start if counts[layout.index] else 0
    return _ragged_like(tensor, own.view(-1)[begin : begin + counts[layout.index]], shape, counts)


def _ragged_like(model: DTensor, flat: torch.Tensor, shape: Shape, counts: Sequence[int]) -> DTensor:
    """A tensor of ``shape`` around ``flat``, with ``counts`` elements on each rank of the ragged mesh dim."""
    units: Sequence[int] = counts if sum(counts) else [1] * len(counts)
    dims = ragged_dims(shape, math.gcd(*units)) if sum(counts) else ragged_dims(shape, 0)
    placements = tuple(
        RaggedShard(dims, units) if isinstance(p, RaggedShard) else p for p in model.placements
    )
    spec = contiguous_spec(model.device_mesh, placements, shape, flat.dtype)
    return wrap_local(flat.view(ragged_layout(spec).local_shape), spec)


def _checked_first_dim(op: Any, tensor: DTensor, dim: int) -> int:
    """The size of dim 0; raises for any other dim, and where parts of it are no runs of the flat order."""
    _refuse_other_shards(op, tensor)
    if not tensor.ndim or dim % tensor.ndim:
        raise refusal(op, tensor, f"a part of dim {dim} is not one run of its flat order")
    return tensor.shape[0]


def _refuse_other_shards(op: Any, tensor: DTensor) -> None:
    """Raise where another mesh dim cuts the tensor too."""
    if any(isinstance(p, Shard) for p in tensor.placements):
        raise refusal(op, tensor, "beside a Shard placement the new shape is not one run of the flat order")


def _slice_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    call = bound_arguments(op, args, kwargs)
    grad, shape = call["grad_output"], tuple(call["input_sizes"])
    _checked_first_dim(op, grad, call["dim"])
    lo, hi, _ = slice(call["start"], call["end"]).indices(shape[0])
    if call["step"] != 1 and hi - lo > 1:
        raise refusal(op, grad, f"a slice with step {call['step']} is not one run of its flat order")
    return _embedded(grad, shape, lo * math.prod(shape[1:]))


def _select_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    grad, shape, dim, index = args
    _refuse_other_shards(op, grad)
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
    return _ragged_like(part, local, shape, counts)


def _cat(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Along dim 0, of parts that lie on the ranks in their order, as those of a split do."""
    call = bound_arguments(op, args, kwargs)
    parts, ragged = call["tensors"], next(t for t in call["tensors"] if is_ragged(t))
    if not all(is_ragged(t) and t.device_mesh == ragged.device_mesh for t in parts):
        raise refusal(op, ragged, "another part is not ragged, or lies on another mesh")
    layouts, last_owner = [ragged_layout(t) for t in parts], 0
    for part, layout in zip(parts, layouts):
        _checked_first_dim(op, part, call["dim"])
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


def _viewed(shape: Shape, size: Sequence[int]) -> Shape:
    if list(size).count(-1) != 1:
        return tuple(size)
    known = math.prod(s for s in size if s != -1)
    return tuple((math.prod(shape) // known if known else 0) if s == -1 else s for s in size)


def _unsqueezed(shape: Shape, dim: int) -> Shape:
    at = dim % (len(shape) + 1)
    return (*shape[:at], 1, *shape[at:])


def _squeezed(shape: Shape, dim: int | Sequence[int] | None = None) -> Shape:
    if dim is None:
        return tuple(s for s in shape if s != 1)
    dims = {d % max(1, len(shape)) for d in ((dim,) if isinstance(dim, int) else dim)}
    return tuple(s for d, s in enumerate(shape) if not (d in dims and s == 1))


def _flattened(shape: Shape, start_dim: int = 0, end_dim: int = -1) -> Shape:
    if not shape:
        return (1,)
    lo, hi = start_dim % len(shape), end_dim % len(shape)
    return (*shape[:lo], math.prod(shape[lo : hi + 1]), *shape[hi + 1 :])


_NEW_SHAPE: dict[Any, Callable[..., Shape]] = {
    aten.view.default: _viewed,
    aten._unsafe_view.default: _viewed,
    aten.reshape.default: _viewed,
    aten.unsqueeze.default: _unsqueezed,
    aten.squeeze.default: _squeezed,
    aten.squeeze.dim: _squeezed,
    aten.squeeze.dims: _squeezed,
    aten.flatten.using_ints: _flattened,
}

HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(_NEW_SHAPE, _reshape),
    aten.cat.default: _cat,
    aten.expand.default: _expand,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.stack.default: _stack,
    aten.unbind.int: _unbind,
}
