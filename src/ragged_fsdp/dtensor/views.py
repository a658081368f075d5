"""Views of the flat order: other shapes and runs of a ragged tensor, in the same memory.

They stay ragged and alias; every other view is refused. A gather would give a result, but writes into it
would be lost: other people's matrix optimizers must fail early rather than train wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from ragged_fsdp.dtensor.construct import wrap_local
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import contiguous_spec, ragged_layout
from ragged_fsdp.placement import RaggedShard, ragged_dims
from ragged_fsdp.routes import overlap
from ragged_fsdp.torch_internals import (
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
    model = op(torch.empty([int(size) for size in tensor.shape], device="meta"), *args[1:], **kwargs)
    out = _run(op, tensor, model) if torch.is_tensor(model) else [_run(op, tensor, part) for part in model]
    return return_and_correct_aliasing(op, args, kwargs, out)


def _run(op: Any, tensor: DTensor, model: torch.Tensor) -> DTensor:
    """A run of the flat order of ``tensor``: what ``model`` shows of a contiguous tensor, in its shape."""
    layout, own = ragged_layout(tensor), local_of(tensor)
    if model.shape == tensor.shape:
        return wrap_local(own.view(layout.local_shape), spec_of(tensor))
    if not model.is_contiguous():
        raise refusal(op, tensor, "its result is not one run of the flat order")
    if any(isinstance(p, Shard) for p in tensor.placements):
        raise refusal(op, tensor, "beside a Shard placement the new shape is not one run of the flat order")
    start, shape = int(model.storage_offset()), tuple(model.shape)
    counts = [overlap(start, model.numel(), s, n) for s, n in zip(layout.starts, layout.counts)]
    begin = max(start, layout.start) - layout.start if counts[layout.index] else 0
    # where it has no elements any units describe it
    units, dims = (
        (counts, ragged_dims(shape, math.gcd(*counts)))
        if any(counts)
        else ([1] * len(counts), ragged_dims(shape, 0))
    )
    placements = (RaggedShard(dims, units) if isinstance(p, RaggedShard) else p for p in tensor.placements)
    spec = contiguous_spec(tensor.device_mesh, tuple(placements), shape, own.dtype)
    part = own.view(-1)[begin : begin + counts[layout.index]]
    return wrap_local(part.view(ragged_layout(spec).local_shape), spec)


HANDLERS: dict[Any, Handler] = dict.fromkeys(
    (
        aten.view.default,
        aten._unsafe_view.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
    ),
    _view,
)
