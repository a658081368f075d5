"""Every change made to torch, in one place, each with its reason.

``TOUCHED`` lists the private (or otherwise internal) names that are replaced. Each replacement first
asks whether a ragged placement is involved and otherwise calls the original, so stock DTensors behave
as before. :func:`install` runs once, at import; it checks that every name exists with the parameters
it relies on and otherwise refuses the torch release in one line, with nothing changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._state_dict_utils as state_dict_module
import torch.distributed.checkpoint  # names bound there are rebound too
from torch.distributed.checkpoint import _state_dict_stager, hf_storage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dtensor import (
    compile_support,
    construct,
    dcp,
    dispatch,
    handlers,
    meshes,
    pickling,
    pointwise,
    redistribute,
    state_dict,
)
from ragged_fsdp.dtensor.geometry import (
    contiguous_stride,
    is_ragged,
    ragged_layout,
    ragged_mesh_dim,
    ragged_spec,
    settled_placements,
    with_placements,
)
from ragged_fsdp.dtensor.internals import (
    OpDispatcher,
    RuntimeSchemaInfo,
    api_module,
    collective_module,
    op_overloads,
    redistribute_module,
    utils_module,
)
from ragged_fsdp.dtensor.rebinding import rebind

__all__ = ["TOUCHED", "Touched", "install"]


@dataclass(frozen=True)
class Touched:
    """One name of torch that is replaced."""

    owner: Any
    name: str
    parameters: tuple[str, ...]
    reason: str

    @property
    def found(self) -> Any:
        """What torch has under that name now."""
        return inspect.getattr_static(self.owner, self.name, None) or getattr(self.owner, self.name, None)


TOUCHED = (
    Touched(
        OpDispatcher,
        "_propagate_op_sharding_dispatch_slow_path",
        ("self", "op_call", "args", "kwargs", "op_info", "try_cache"),
        "the sharding rules: the C++ dispatcher asks here on every cache miss",
    ),
    Touched(
        DTensor._op_dispatcher,
        "_custom_op_handlers",
        (),
        "these ops never reach the rules; argmax, for one, would be silently wrong",
    ),
    Touched(
        DTensor._op_dispatcher.sharding_propagator,
        "op_to_schema_info",
        (),
        "the C++ cache must know that an op takes lists: 2.11 overlooks those that stock has no rule for",
    ),
    Touched(
        redistribute_module,
        "redistribute_local_tensor",
        ("local_tensor", "current_spec", "target_spec", "async_op"),
        "the moves of redistribute and of implicit redistribution",
    ),
    Touched(
        collective_module,
        "redistribute_cost",
        ("current_spec", "target_spec"),
        "forbidding implicit moves (ExplicitRedistributionContext) asks what a move costs",
    ),
    Touched(
        redistribute_module.Redistribute,
        "backward",
        ("ctx", "grad_output"),
        "the gradient of Partial to ragged is gathered, as for Shard, instead of made Partial",
    ),
    Touched(
        utils_module,
        "compute_local_shape_and_global_offset",
        ("global_shape", "mesh", "placements", "skip_offset"),
        "local shapes for zeros, empty, from checkpoints; an offset only where the piece is one box",
    ),
    Touched(
        api_module,
        "distribute_tensor",
        ("tensor", "device_mesh", "placements", "src_data_rank"),
        "stock knows three kinds of placements and raises for others",
    ),
    Touched(
        api_module._FromTorchTensor,
        "forward",
        ("ctx", "input", "device_mesh", "placements", "run_check", "shape", "stride"),
        "from_local cannot infer a global shape from an uneven piece: ask for it, and check the piece",
    ),
    Touched(
        api_module._ToTorchTensor,
        "backward",
        ("ctx", "grad_output"),
        "stock rebuilds the global stride from the local tensor; a ragged one needs the spec's",
    ),
    Touched(
        api_module,
        "_dtensor_init_helper",
        ("init_op", "size", "device_mesh", "placements"),
        "rand and randn draw with an offset that knows even shards only",
    ),
    Touched(DTensor, "__reduce_ex__", ("self", "proto"), "pickling a piece that lies inside a larger buffer"),
    Touched(DTensor, "__deepcopy__", ("self", "memo"), "copying a piece that lies inside a larger buffer"),
    Touched(
        _state_dict_stager.StateDictStager,
        "_offload_tensor",
        ("self", "x", "memo", "non_blocking"),
        "asynchronous checkpoints copy tensors to the host with a deepcopy of their own",
    ),
    Touched(DTensor, "__create_write_items__", ("self", "fqn", "object"), "checkpoints: pieces as boxes"),
    Touched(DTensor, "__create_chunk_list__", ("self",), "checkpoints: pieces as boxes"),
    Touched(DTensor, "__get_tensor_shard__", ("self", "index"), "checkpoints: the box asked for, as a view"),
    Touched(
        hf_storage.HuggingFaceStorageWriter,
        "_split_by_storage_plan",
        ("self", "storage_plan", "items"),
        "a safetensors file holds one box of a tensor; a piece of several boxes needs several files",
    ),
    Touched(
        state_dict_module,
        "_distribute_tensors",
        ("local_state_dict", "keys", "device", "pg"),
        "loading full state dicts and broadcast from rank 0",
    ),
    Touched(
        state_dict_module,
        "_distribute_state_dict",
        ("full_state_dict", "local_state_dict", "device", "pg"),
        "full state dicts that differ between ranks: an error on all, instead of the end of the process",
    ),
)

_installed = False


def install() -> None:
    """Apply all patches, once."""
    global _installed
    if _installed:
        return
    _check_torch()
    _patch_dispatcher()
    _rebind(redistribute.stock_redistribute_local_tensor, redistribute.redistribute_local_tensor)
    _rebind(redistribute.stock_redistribute_cost, redistribute.redistribute_cost)
    _patch_redistribute_backward()
    _patch_local_shape()
    _rebind(construct.stock_distribute_tensor, construct.distribute_tensor)
    _patch_random_factories()
    _patch_from_local()
    _patch_to_local_backward()
    dcp.install()
    pickling.install()
    _rebind(state_dict.stock_distribute_tensors, state_dict.distribute_tensors)
    _rebind(state_dict.stock_distribute_state_dict, state_dict.distribute_state_dict)
    compile_support.register_placements()
    _installed = True


def _check_torch() -> None:
    for touched in TOUCHED:
        found = touched.found
        known = set(inspect.signature(_plain(found)).parameters) if callable(_plain(found)) else set()
        missing = [p for p in touched.parameters if p not in known]
        if found is not None and not missing:
            continue
        owner = getattr(touched.owner, "__name__", type(touched.owner).__name__)
        what = "is missing" if found is None else f"has no parameter {missing[0]!r}"
        raise ImportError(
            f"ragged_fsdp supports torch 2.11 to 2.15; in torch {torch.__version__} "
            f"{owner}.{touched.name} {what}."
        )


def _plain(found: Any) -> Any:
    return found.__func__ if isinstance(found, staticmethod) else found


def _rebind(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    rebind(original, replacement, skip=replacement.__module__)  # which keeps the original to call it


def _patch_dispatcher() -> None:
    stock = OpDispatcher._propagate_op_sharding_dispatch_slow_path

    def propagate(self: Any, op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool) -> Any:
        ragged, several_meshes = dispatch.look_at(op_info)
        if several_meshes:
            result = meshes.reduced_scalars(op_call, args, kwargs)
            if result is not NotImplemented:
                return result
        if ragged:
            propagator = self.sharding_propagator
            return dispatch.dispatch(propagator, op_call, args, kwargs, op_info.schema, try_cache)
        return stock(self, op_call, args, kwargs, op_info, try_cache)

    OpDispatcher._propagate_op_sharding_dispatch_slow_path = propagate  # type: ignore[method-assign]
    handlers.wrap_all(DTensor._op_dispatcher._custom_op_handlers)
    _describe_list_ops(DTensor._op_dispatcher.sharding_propagator)


def _describe_list_ops(propagator: Any) -> None:
    """Say of each list op that stock has no rule for that its lists are part of the signature.

    Without it torch 2.11 caches the sharding of, say, ``_fused_sgd_`` whatever the tensors in its lists:
    a gradient in another layout than at the first call would not be moved.
    """
    tables = [getattr(propagator, f"op_to_schema_info{kind}") for kind in ("", "_for_single_dim_strategy")]
    for op in op_overloads(pointwise.LIST_OPS):
        if not any(op in table for table in tables):
            propagator.op_to_schema_info[op] = RuntimeSchemaInfo(needs_pytree=True)


def _patch_redistribute_backward() -> None:
    owner: Any = redistribute_module.Redistribute
    stock = owner.backward

    def backward(ctx: Any, grad_output: DTensor) -> Any:
        if is_ragged(grad_output._spec):
            settled = settled_placements(ctx.current_spec.placements)
            ctx.current_spec = with_placements(ctx.current_spec, settled)
        return stock(ctx, grad_output)

    owner.backward = staticmethod(backward)


def _patch_local_shape() -> None:
    stock = utils_module.compute_local_shape_and_global_offset

    def compute_local_shape_and_global_offset(
        global_shape: Sequence[int], mesh: Any, placements: Sequence[Placement], skip_offset: bool = False
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if ragged_mesh_dim(placements) is None:
            return stock(tuple(global_shape), mesh, placements, skip_offset)
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

    _rebind(stock, compute_local_shape_and_global_offset)


def _patch_random_factories() -> None:
    stock = api_module._dtensor_init_helper
    draws: dict[Any, Any] = {torch.rand: DTensor.uniform_, torch.randn: DTensor.normal_}

    def init_helper(
        init_op: Any, size: Any, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> DTensor:
        if init_op not in draws or ragged_mesh_dim(placements or ()) is None:
            return stock(init_op, size, device_mesh, placements, **options)
        wants_grad = options.pop("requires_grad", False)
        made = stock(torch.empty, size, device_mesh, placements, requires_grad=False, **options)
        return draws[init_op](made).requires_grad_(wants_grad)

    api_module._dtensor_init_helper = init_helper


def _patch_from_local() -> None:
    owner: Any = api_module._FromTorchTensor
    stock = owner.forward

    def forward(
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
            construct.check_local(input, spec)
            shape, stride = spec.shape, contiguous
        return stock(ctx, input, device_mesh, placements, run_check, shape, stride, *rest)

    owner.forward = staticmethod(forward)


def _patch_to_local_backward() -> None:
    owner: Any = api_module._ToTorchTensor
    stock = owner.backward

    def backward(ctx: Any, grad_output: torch.Tensor | None) -> tuple[DTensor | None, None]:
        spec, asked = ctx.dtensor_spec, ctx.grad_placements
        involved = is_ragged(spec) or (asked is not None and ragged_mesh_dim(asked) is not None)
        if grad_output is None or not involved:
            return stock(ctx, grad_output)
        placements = asked or settled_placements(spec.placements)
        stride = contiguous_stride(spec.shape)
        local = grad_output.contiguous()
        grad = DTensor.from_local(local, spec.mesh, placements, shape=spec.shape, stride=stride)
        return grad, None

    owner.backward = staticmethod(backward)
