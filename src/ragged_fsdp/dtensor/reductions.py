"""Reductions over all elements whose partial results combine: the cacheable rules."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Shard

from ragged_fsdp.dtensor.geometry import is_ragged
from ragged_fsdp.dtensor.reduce_dims import pending
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.torch_internals import DTensorSpec, OpSchema, OutputSharding, TensorMeta

__all__ = ["full_rule", "is_full_reduction"]

aten = torch.ops.aten


def _overloads(*names: str) -> set[Any]:
    """Those of the named overloads that this torch has."""
    found = set()
    for name in names:
        packet, overload = name.split(".")
        if hasattr(aten, packet) and overload in getattr(aten, packet).overloads():
            found.add(getattr(getattr(aten, packet), overload))
    return found


_NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar}
_FULL = _NORMS | {aten.sum.default, aten.prod.default}
_FULL |= _overloads("_foreach_powsum.Scalar")


def is_full_reduction(schema: Any) -> bool:
    """Whether the op reduces all elements to a scalar per tensor, and an empty piece has a result."""
    op, args = schema.op, schema.args_schema
    if op not in _FULL:
        return False
    if op in _NORMS:
        order = args[1] if len(args) > 1 else 2
        if isinstance(order, (int, float)) and (math.isinf(order) or order < 0):
            return False  # max and min have no value on an empty piece
    if op is aten.linalg_vector_norm.default:
        # dims count those of the global tensor, of which a flat piece has one
        return not (len(args) > 2 and args[2]) and not (len(args) > 3 and args[3])
    return True


def full_rule(propagator: Any, schema: Any) -> OutputSharding | None:
    """Ask stock about the flattened tensor under Shard(0): the same sums, hence the same Partial.

    None where a pending reduction of another mesh dim must come first.
    """
    first, *rest = schema.args_schema
    tensors = first if isinstance(first, (list, tuple)) else [first]
    outputs = []
    for spec in tensors:  # one by one: the tensors of a list may lie on different meshes
        operand = [_flat(spec)] if isinstance(first, (list, tuple)) else _flat(spec)
        question = OpSchema(schema.op, (operand, *rest), schema.kwargs_schema, schema_info=schema.schema_info)
        answer = propagator.propagate_op_sharding_non_cached(question)
        if answer.needs_redistribute:
            return None
        outputs.append(answer.output_spec)
    if not isinstance(first, (list, tuple)):
        return OutputSharding(pending(outputs[0]), schema)
    return OutputSharding(tuple(pending(output[0]) for output in outputs), schema)


def _flat(spec: Any) -> Any:
    if not is_ragged(spec) and not any(isinstance(p, Shard) for p in spec.placements):
        return spec
    placements = tuple(Shard(0) if isinstance(p, (RaggedShard, Shard)) else p for p in spec.placements)
    meta = TensorMeta(torch.Size((math.prod(spec.shape),)), (1,), spec.tensor_meta.dtype)
    return DTensorSpec(spec.mesh, placements, tensor_meta=meta)
