"""Every name of torch that is not public API, imported in one place.

What is *replaced* in torch is listed, with reasons, in :mod:`ragged_fsdp.dtensor.patches`; this
module only reads. Names that moved between releases are found by feature, never by version number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor._api as api_module
import torch.distributed.tensor._collective_utils as collective_module
import torch.distributed.tensor._redistribute as redistribute_module
import torch.distributed.tensor._utils as utils_module
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding, RuntimeSchemaInfo
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import return_and_correct_aliasing

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "OpDispatcher",
    "OpSchema",
    "OutputSharding",
    "RuntimeSchemaInfo",
    "StridedShard",
    "TensorMeta",
    "all_gather",
    "api_module",
    "bound_arguments",
    "call_with",
    "collective_module",
    "composite_kernel",
    "functional",
    "op_overloads",
    "redistribute_module",
    "reduce_scatter",
    "return_and_correct_aliasing",
    "tracing",
    "utils_module",
]

tracing = _are_we_tracing

# Renamed in torch 2.13; the old names warn there.
all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def op_overloads(prefixes: tuple[str, ...]) -> list[torch._ops.OpOverload]:
    """The aten ops of this torch whose names begin with one of ``prefixes``, every overload."""
    found = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten" and packet.startswith(prefixes):
            found.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return found


def composite_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether ``op`` decomposes into others by itself (seen only in inference mode)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        op.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


def bound_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    bound = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    bound.update(zip((a.name for a in op._schema.arguments), args))
    bound.update(kwargs)
    return bound


def call_with(op: Any, bound: dict[str, Any]) -> Any:
    """Call ``op`` with arguments given by name."""
    positional = [bound[a.name] for a in op._schema.arguments if not a.kwarg_only]
    keyword = {a.name: bound[a.name] for a in op._schema.arguments if a.kwarg_only}
    return op(*positional, **keyword)
