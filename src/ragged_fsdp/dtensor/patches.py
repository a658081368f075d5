"""Every change made to torch, in one place.

``REPLACEMENTS`` has what takes the place of each function in ``torch_internals.REPLACED``, where the reasons
are. Each first asks whether a ragged placement is involved and otherwise calls the original, so tensors that
are not ours behave as before. :func:`install` runs once, at import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint  # names bound there are rebound too
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dtensor import construct, dispatch, pointwise, redistribute, saving
from ragged_fsdp.dtensor.geometry import (
    contiguous_stride,
    is_ragged,
    ragged_layout,
    ragged_mesh_dim,
    ragged_spec,
    settled_placements,
    with_placements,
)
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.torch_internals import (
    STOCK,
    RuntimeSchemaInfo,
    op_overloads,
    register_constant_class,
    replace,
)

__all__ = ["REPLACEMENTS", "install"]

_KINDS = (RaggedShard, StridedRaggedShard)
_MEMBERS = ("is_shard", "is_partial", "is_replicate", "__eq__", "dims", "local_units", "tile")  # for dynamo
_RANDOM: dict[Any, Any] = {torch.rand: DTensor.uniform_, torch.randn: DTensor.normal_}


def install() -> None:
    """Apply all patches; the package does, when it is imported."""
    for name, ours in REPLACEMENTS.items():
        replace(name, ours)
    dispatch.guard_handlers(STOCK["DTensor._op_dispatcher._custom_op_handlers"])
    _describe_ops()
    torch.serialization.add_safe_globals(list(_KINDS))  # for weights_only loading
    for kind in _KINDS:
        register_constant_class(kind, _MEMBERS)


def _describe_ops() -> None:
    """Say of ops that stock has no rule for what of a call, beside its tensors, decides their result.

    The C++ cache would give ``x.view(dtype)`` the dtype that the first call asked for. Torch 2.11 caches the
    sharding of, say, ``_fused_sgd_`` whatever the tensors in its lists: a gradient in another layout than at
    the first call would not be moved.
    """
    own = STOCK["DTensor._op_dispatcher.sharding_propagator.op_to_schema_info"]
    other = STOCK["DTensor._op_dispatcher.sharding_propagator.op_to_schema_info_for_single_dim_strategy"]
    described = {op: RuntimeSchemaInfo(needs_pytree=True) for op in op_overloads(pointwise.LIST_OPS)}
    described[torch.ops.aten.view.dtype] = RuntimeSchemaInfo(static_argnum=1)
    for op, info in described.items():
        if op not in own and op not in other:
            own[op] = info


def _redistribute_backward(ctx: Any, grad_output: DTensor) -> Any:
    if is_ragged(grad_output):
        settled = settled_placements(ctx.current_spec.placements)
        ctx.current_spec = with_placements(ctx.current_spec, settled)
    return STOCK["Redistribute.backward"](ctx, grad_output)


def _local_shape(
    global_shape: Sequence[int], mesh: Any, placements: Sequence[Placement], skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if ragged_mesh_dim(placements) is None:
        return STOCK["compute_local_shape_and_global_offset"](global_shape, mesh, placements, skip_offset)
    layout = ragged_layout(ragged_spec(mesh, placements, global_shape, torch.float32))
    if skip_offset:
        return layout.local_shape, ()
    boxes = layout.boxes()
    if not boxes:
        return layout.local_shape, (*global_shape[:1], *(0 for _ in global_shape[1:]))
    if len(boxes) > 1 or boxes[0][1] != layout.local_shape:
        raise NotImplementedError(
            f"the piece of shape {tuple(global_shape)} under {tuple(placements)} is not one box, so "
            "it has no single offset; use ragged_fsdp.dtensor.ragged_layout(...).boxes()."
        )
    return layout.local_shape, boxes[0][0]


def _init_helper(
    init_op: Any, size: Any, device_mesh: Any = None, placements: Any = None, **options: Any
) -> DTensor:
    """What torch.distributed.tensor.zeros, rand and their relatives call."""
    if init_op not in _RANDOM or ragged_mesh_dim(placements or ()) is None:
        return STOCK["_dtensor_init_helper"](init_op, size, device_mesh, placements, **options)
    wants_grad = options.pop("requires_grad", False)
    made = STOCK["_dtensor_init_helper"](
        torch.empty, size, device_mesh, placements, requires_grad=False, **options
    )
    return _RANDOM[init_op](made).requires_grad_(wants_grad)


def _from_local(
    ctx: Any,
    input: torch.Tensor,
    device_mesh: Any,
    placements: tuple[Placement, ...],
    run_check: bool,
    shape: Any = None,
    stride: Any = None,
    *rest: Any,
) -> DTensor:
    if ragged_mesh_dim(placements) is not None:
        if shape is None:
            raise ValueError(
                f"from_local: the global shape cannot be inferred from a piece of {placements}; pass "
                "shape= (and stride=, if at all, the contiguous one)."
            )
        spec = ragged_spec(device_mesh, placements, shape, input.dtype)
        contiguous = contiguous_stride(spec.shape)
        if stride is not None and tuple(stride) != contiguous:
            raise ValueError(f"from_local: a ragged tensor is contiguous, got stride {tuple(stride)}.")
        if tuple(input.shape) != (local_shape := ragged_layout(spec).local_shape):
            raise ValueError(
                f"from_local: the local tensor of shape {tuple(spec.shape)} under {spec.placements} has "
                f"shape {local_shape} on this rank, got {tuple(input.shape)}."
            )
        if not input.is_contiguous():
            raise ValueError(
                f"from_local: a ragged local tensor must be contiguous, got stride {input.stride()}."
            )
        shape, stride = spec.shape, contiguous
    return STOCK["_FromTorchTensor.forward"](
        ctx, input, device_mesh, placements, run_check, shape, stride, *rest
    )


def _to_local_backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[DTensor | None, None]:
    spec, asked = ctx.dtensor_spec, ctx.grad_placements
    involved = is_ragged(spec) or (asked is not None and ragged_mesh_dim(asked) is not None)
    if grad_output is None or not involved:
        return STOCK["_ToTorchTensor.backward"](ctx, grad_output)
    placements = asked or settled_placements(spec.placements)
    stride = contiguous_stride(spec.shape)
    local = grad_output.contiguous()
    grad = DTensor.from_local(local, spec.mesh, placements, shape=spec.shape, stride=stride)
    return grad, None


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "OpDispatcher._propagate_op_sharding_dispatch_slow_path": dispatch.propagate,
    "redistribute_local_tensor": redistribute.redistribute_local_tensor,
    "redistribute_cost": redistribute.redistribute_cost,
    "Redistribute.backward": _redistribute_backward,
    "compute_local_shape_and_global_offset": _local_shape,
    "distribute_tensor": construct.distribute_tensor,
    "_FromTorchTensor.forward": _from_local,
    "_ToTorchTensor.backward": _to_local_backward,
    "_dtensor_init_helper": _init_helper,
    "DTensor.__reduce_ex__": saving.reduce_ex,
    "DTensor.__deepcopy__": saving.deepcopy,
    "StateDictStager._offload_tensor": saving.offload_tensor,
    "DTensor.__create_write_items__": saving.create_write_items,
    "DTensor.__create_chunk_list__": saving.create_chunk_list,
    "DTensor.__get_tensor_shard__": saving.get_tensor_shard,
    "HuggingFaceStorageWriter._split_by_storage_plan": saving.split_by_storage_plan,
    "_distribute_tensors": saving.distribute_tensors,
    "_distribute_state_dict": saving.distribute_state_dict,
}
