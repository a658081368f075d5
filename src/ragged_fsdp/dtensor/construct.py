"""Making ragged DTensors: ``distribute_tensor``, the unchecked ``wrap_local``, and ``new_*`` like one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import (
    contiguous_stride,
    ragged_layout,
    ragged_mesh_dim,
    ragged_spec,
    replicated,
    settled_placements,
    unragged,
    with_placements,
)
from ragged_fsdp.dtensor.redistribute import redistribute_local_tensor
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.torch_internals import (
    DTensorSpec,
    TensorMeta,
    current_mesh,
    local_of,
    spec_of,
    stock,
)

__all__ = [
    "HANDLERS",
    "check_local",
    "distribute_tensor",
    "moved",
    "settled",
    "whole",
    "wrap_local",
]

aten = torch.ops.aten

# Captured before patches.py replaces the name.
_stock_distribute_tensor: Any = stock("distribute_tensor")


def wrap_local(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """A DTensor around ``local``, sharing its memory: no checks, no communication, no autograd."""
    return DTensor(local, spec, requires_grad=requires_grad)


def moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``tensor`` under other placements of its mesh: ``redistribute`` for code that runs below autograd."""
    if tensor.placements == tuple(placements):
        return tensor
    target = with_placements(spec_of(tensor), placements)
    return wrap_local(redistribute_local_tensor(local_of(tensor), spec_of(tensor), target), target)


def settled(tensor: DTensor) -> DTensor:
    """``tensor`` without pending reductions."""
    return moved(tensor, settled_placements(tensor.placements))


def whole(tensor: DTensor) -> torch.Tensor:
    """The whole plain tensor, on every rank."""
    return local_of(moved(tensor, replicated(tensor.device_mesh)))


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """``torch.distributed.tensor.distribute_tensor`` that also knows ragged placements.

    Args:
        tensor: the whole tensor, a contiguous leaf.
        device_mesh: the mesh; default is the current one.
        placements: one per mesh dim, at most one of them ragged.
        src_data_rank: the rank whose values all get; None lets each rank keep its part of its own copy,
            without communication.

    Raises:
        TypeError, ValueError: the arguments are not these, or the placements do not fit the shape or the
            mesh; raised before any communication.
    """
    if isinstance(placements, RaggedShard):
        raise TypeError(
            f"distribute_tensor: placements must be a list, one per mesh dim, got {placements!r}."
        )
    ragged = isinstance(placements, Iterable) and ragged_mesh_dim(placements) is not None
    if not ragged or isinstance(tensor, DTensor):
        return _stock_distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    assert placements is not None
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute_tensor: expected a tensor, got {type(tensor).__name__}.")
    if not tensor.is_leaf:
        raise RuntimeError("distribute_tensor: expected a leaf tensor, got the result of an operation.")
    if not tensor.is_contiguous():
        raise ValueError(
            f"distribute_tensor: a ragged placement needs a contiguous tensor, got shape "
            f"{tuple(tensor.shape)} with stride {tensor.stride()}; call contiguous() first."
        )
    mesh = device_mesh or current_mesh()
    spec = ragged_spec(mesh, placements, tensor.shape, tensor.dtype)  # raises before any collective
    ranks = min(mesh.shape)
    if src_data_rank is not None and src_data_rank not in range(ranks):
        raise ValueError(
            f"distribute_tensor: src_data_rank must be None or a rank of each mesh dim, in [0, {ranks}), "
            f"got {src_data_rank!r}."
        )
    source = tensor.detach()
    if src_data_rank is not None and not tensor.is_meta:
        source = source.clone()  # stock receives the source rank's values in place
    base = _stock_distribute_tensor(source, mesh, unragged(spec.placements), src_data_rank=src_data_rank)
    target = with_placements(spec_of(base), spec.placements)
    local = redistribute_local_tensor(local_of(base), spec_of(base), target)
    local = local.detach().requires_grad_(tensor.requires_grad)
    return DTensor(local, spec, requires_grad=tensor.requires_grad)


def check_local(local: torch.Tensor, spec: DTensorSpec) -> None:
    """Raise unless ``local`` has the shape that ``spec`` gives this rank."""
    layout = ragged_layout(spec)
    if tuple(local.shape) != layout.local_shape:
        raise ValueError(
            f"from_local: the local tensor of shape {tuple(spec.shape)} under {spec.placements} has shape "
            f"{layout.local_shape} on this rank, got {tuple(local.shape)}."
        )
    if not local.is_contiguous():
        raise ValueError(
            f"from_local: a ragged local tensor must be contiguous, got stride {local.stride()}."
        )


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
