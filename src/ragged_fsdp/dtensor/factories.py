"""``new_*``: tensors made after the model of a ragged one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.construct import wrap_local
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import contiguous_stride, replicated, with_placements
from ragged_fsdp.torch_internals import DTensorSpec, TensorMeta, local_of, spec_of

__all__ = ["HANDLERS"]

aten = torch.ops.aten


def _new(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Ragged alike for the same shape (autograd clones gradients so), replicated for any other."""
    model, shape, rest = args[0], tuple(args[1]), args[2:]
    own = local_of(model)
    strided = op is aten.new_empty_strided.default
    if shape == tuple(model.shape):
        if strided and tuple(args[2]) != contiguous_stride(shape):
            raise refusal(op, model, f"a ragged tensor is contiguous, asked for stride {tuple(args[2])}")
        make = aten.new_empty.default if strided else op
        local = make(own, own.shape, *(() if strided else rest), **kwargs)
        return wrap_local(local, with_placements(spec_of(model), model.placements, dtype=local.dtype))
    local = op(own, *args[1:], **kwargs)
    mesh = model.device_mesh
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return wrap_local(local, DTensorSpec(mesh, replicated(mesh), tensor_meta=meta))


HANDLERS: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (
        aten.new_empty.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty_strided.default,
    ),
    _new,
)
