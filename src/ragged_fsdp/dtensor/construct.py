"""Making ragged DTensors: from whole tensors, from local ones, like others, as views, from random numbers.

**Views** of the flat order (other shapes, runs of it) stay ragged and alias; every other view is refused. A
gather would give a result, but writes into it would be lost: other people's matrix optimizers must fail early
rather than train wrong.

**Random numbers** are those of the unsharded tensor, and so is the generator after them. Each rank draws the
numbers of the whole tensor from its generator (seeded alike on every rank) and keeps its own piece. Uniform
and normal numbers on CPU are drawn in bounded chunks; elsewhere a generator's order depends on the size
drawn, so the whole tensor is drawn at once and freed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dtensor.geometry import (
    RaggedLayout,
    contiguous_spec,
    contiguous_stride,
    is_ragged,
    outer_mesh_dims,
    ragged_layout,
    ragged_mesh_dim,
    ragged_spec,
    refusal,
    replicated,
    settled_placements,
    unragged,
    with_placements,
)
from ragged_fsdp.dtensor.redistribute import redistribute_local_tensor
from ragged_fsdp.placement import RaggedShard, ragged_dims
from ragged_fsdp.routes import overlap
from ragged_fsdp.torch_internals import (
    STOCK,
    DTensorSpec,
    TensorMeta,
    current_mesh,
    local_of,
    return_and_correct_aliasing,
    schema_of,
    spec_of,
)

__all__ = [
    "HANDLERS",
    "distribute_tensor",
    "draw",
    "moved",
    "own_piece",
    "settled",
    "whole",
    "wrap_local",
]

aten = torch.ops.aten

# CPU generators draw these element after element, in blocks of 16 at most: chunks of a multiple of 16
# give the numbers of one large draw.
_CHUNKABLE = {aten.normal_.default, aten.uniform_.default}
_CHUNK_NUMEL = 1 << 22
_BLOCK_NUMEL = 16


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


def own_piece(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """What this rank holds under ``spec`` of a whole tensor, which every rank has; a copy."""
    every = with_placements(spec, replicated(spec.mesh), dtype=full.dtype)
    return redistribute_local_tensor(full, every, with_placements(every, spec.placements))


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
        placements: one per mesh dim; at most one of them ragged, or a ``StridedRaggedShard`` and then a
            ``RaggedShard`` of whole rows.
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
        return STOCK["distribute_tensor"](tensor, device_mesh, placements, src_data_rank=src_data_rank)
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
    base = STOCK["distribute_tensor"](source, mesh, unragged(spec.placements), src_data_rank=src_data_rank)
    local = local_of(moved(base, spec.placements)).detach().requires_grad_(tensor.requires_grad)
    return DTensor(local, spec, requires_grad=tensor.requires_grad)


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
    if layout.tile is not None:
        raise refusal(op, tensor, "in the order of tiles another shape is no view")
    if not model.is_contiguous():
        raise refusal(op, tensor, "its result is not one run of the flat order")
    if outer_mesh_dims(tensor.placements):
        raise refusal(op, tensor, "beside a Shard placement the new shape is not one run of the flat order")
    start, shape = int(model.storage_offset()), tuple(model.shape)
    counts = [overlap(start, model.numel(), s, n) for s, n in zip(layout.starts, layout.counts)]
    begin = max(start, layout.start) - layout.start if counts[layout.index] else 0
    units = counts if any(counts) else [1] * len(counts)  # without elements any units describe it
    placement = RaggedShard(ragged_dims(shape, math.gcd(*counts)), units)
    spec = contiguous_spec(tensor.device_mesh, unragged(tensor.placements, placement), shape, own.dtype)
    part = own.view(-1)[begin : begin + counts[layout.index]]
    return wrap_local(part.view(ragged_layout(spec).local_shape), spec)


def draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a random op whose first operand is ragged."""
    tensor = args[0]
    if not is_ragged(tensor):
        return NotImplemented
    local, name = local_of(tensor), schema_of(op).name
    in_place = name.endswith("_")
    if not (in_place or name.endswith("_like")):
        raise refusal(op, tensor, "its random numbers do not correspond to elements")
    if in_place and any(p.is_partial() for p in tensor.placements):
        raise refusal(op, tensor, "it would be written before its pending reduction")
    sharded = bool(outer_mesh_dims(tensor.placements)) or ragged_layout(tensor).tile is not None
    if local.is_meta:
        drawn = op(local, *args[1:], **kwargs)
    elif op in _CHUNKABLE and local.device.type == "cpu" and not sharded:
        drawn = _draw_chunks(op, local, ragged_layout(tensor), args[1:], kwargs)
    else:
        model = torch.empty(tensor.shape, dtype=local.dtype, device=local.device)
        drawn = own_piece(op(model, *args[1:], **kwargs), spec_of(tensor))
        drawn = local.copy_(drawn) if in_place else drawn
    if in_place:
        return tensor
    return wrap_local(drawn, with_placements(spec_of(tensor), tensor.placements, dtype=drawn.dtype))


def _draw_chunks(
    op: Any, local: torch.Tensor, layout: RaggedLayout, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Draw all numbers in order, through a scratch buffer, keeping those of the own interval in ``local``."""
    numel, flat = layout.inner_numel, local.view(-1)
    scratch = torch.empty(min(numel, _CHUNK_NUMEL + _BLOCK_NUMEL), dtype=local.dtype)
    begin = 0
    while begin < numel:
        end = begin + _CHUNK_NUMEL
        if numel - end < _BLOCK_NUMEL:  # a last draw of fewer than a block would take another path
            end = numel
        drawn = op(scratch[: end - begin], *args, **kwargs)
        lo, hi = max(begin, layout.start), min(end, layout.stop)
        if lo < hi:
            flat[lo - layout.start : hi - layout.start] = drawn[lo - begin : hi - begin]
        begin = end
    return local


HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten.new_empty.default,
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
            aten.new_empty_strided.default,
        ),
        _new,
    ),
    **dict.fromkeys(
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
    ),
}
