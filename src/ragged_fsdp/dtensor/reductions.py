"""Reductions over all elements whose partial results combine: the cacheable rules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Shard

from ragged_fsdp.dtensor.geometry import is_ragged
from ragged_fsdp.dtensor.internals import DTensorSpec, OpSchema, OutputSharding, TensorMeta
from ragged_fsdp.placement import RaggedShard

__all__ = ["full_rule", "is_full_reduction"]

aten = torch.ops.aten

_NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar}
_FULL = _NORMS | {aten.sum.default, aten.prod.default, aten.any.default, aten.all.default}
# Like the norms, but without the final root (where torch has it).
_POWER_SUMS = {getattr(getattr(aten, n, None), "Scalar", None) for n in ("_foreach_powsum",)} - {None}


def is_full_reduction(schema: OpSchema) -> bool:
    """Whether the op reduces all elements to a scalar per tensor, and an empty piece has a result."""
    op, args = schema.op, schema.args_schema
    if op in _POWER_SUMS:
        return True
    if op not in _FULL:
        return False
    if op in _NORMS:
        order = args[1] if len(args) > 1 else 2
        if isinstance(order, (int, float)) and (math.isinf(order) or order < 0):
            return False  # max and min have no value on an empty piece
    if op is aten.linalg_vector_norm.default:
        dims = args[2] if len(args) > 2 else None
        keepdim = args[3] if len(args) > 3 else False
        return not keepdim and (dims is None or len(dims) in (0, args[0].ndim))
    return True


def full_rule(propagator: Any, schema: OpSchema) -> OutputSharding | None:
    """Ask stock about the flattened tensor under Shard(0): the same sums, hence the same Partial."""
    args = schema.args_schema
    if schema.op is aten.linalg_vector_norm.default and len(args) > 2:
        args = (*args[:2], None, *args[3:])
    flat_args = tuple(
        type(a)(_flat(s) for s in a) if isinstance(a, (list, tuple)) else _flat(a) for a in args
    )
    flat_schema = OpSchema(schema.op, flat_args, schema.kwargs_schema, schema_info=schema.schema_info)
    sharding = propagator.propagate_op_sharding_non_cached(flat_schema)
    if sharding.needs_redistribute:
        return None
    return OutputSharding(sharding.output_spec, schema)


def _flat(spec: Any) -> Any:
    if not isinstance(spec, DTensorSpec):
        return spec
    if not is_ragged(spec) and not any(isinstance(p, Shard) for p in spec.placements):
        return spec
    placements = tuple(Shard(0) if isinstance(p, (RaggedShard, Shard)) else p for p in spec.placements)
    meta = TensorMeta(torch.Size((spec.shape.numel(),)), (1,), spec.tensor_meta.dtype)
    return DTensorSpec(spec.mesh, placements, tensor_meta=meta)
