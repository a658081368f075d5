"""Where ops on ragged tensors are decided: called by the C++ dispatcher on a sharding-cache miss."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ragged_fsdp.dtensor import pointwise, reductions
from ragged_fsdp.dtensor.direct import HANDLERS, ragged_operands, run_direct
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import is_ragged
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.torch_internals import (
    DTensorSpec,
    OpOverload,
    OpSchema,
    OutputSharding,
    composite_kernel,
    tracing,
)

__all__ = ["dispatch", "look_at", "register_op"]

_KINDS = (RaggedShard, StridedRaggedShard)


def look_at(op_info: Any) -> tuple[bool, bool]:
    """Whether any operand of the op is ragged, and whether they lie on several meshes.

    Runs for every op that the C++ cache does not know, stock tensors included: one cheap pass.
    """
    ragged, several, first = False, False, None
    for spec in op_info.flat_args_schema:
        if type(spec) is not DTensorSpec:
            continue
        mesh = spec.mesh
        if mesh is not first:
            if first is None:
                first = mesh
            elif mesh != first:
                several = True
        if not ragged:
            for placement in spec.placements:
                if type(placement) in _KINDS:
                    ragged = True
    if not ragged and op_info.schema.kwargs_schema:
        ragged = any(type(s) is DTensorSpec and is_ragged(s) for s in op_info.schema.kwargs_schema.values())
    return ragged, several


def dispatch(
    propagator: Any,
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    schema: OpSchema,
    try_cache: bool,
) -> Any:
    """An ``OutputSharding``, which the C++ dispatcher caches, or the finished result of a rarer op."""
    rule = _caches.rule if try_cache and not tracing() else _rule
    sharding = rule(propagator, schema)
    if sharding is not None:
        return sharding
    result = run_direct(op, args, kwargs)
    if result is not NotImplemented:
        return result
    if composite_kernel(op):  # reached only in inference mode
        result = op.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    raise refusal(op, ragged_operands(args, kwargs)[0], "it has no meaning on uneven pieces")


def _rule(propagator: Any, schema: OpSchema) -> OutputSharding | None:
    """The cacheable rule of an op, or None where it must be run by hand."""
    op = schema.op
    if torch.Tag.nondeterministic_seeded in op.tags or pointwise.runs_by_hand(schema):
        return None
    if pointwise.is_elementwise(op):
        name = pointwise.op_name(op)
        rule = pointwise.list_rule if pointwise.is_foreach(name) else pointwise.tensor_rule
        return rule(propagator, schema)
    if reductions.is_full_reduction(schema):
        return reductions.full_rule(propagator, schema)
    return None


class _Caches(threading.local):
    """Rules by signature, for calls whose signature the C++ cache cannot hold.

    On torch 2.11 those are all ops on lists of tensors; without this, foreach ops would be 30 to 60
    times slower there.
    """

    def __init__(self) -> None:
        self.rule = functools.lru_cache(maxsize=65536)(_rule)


_caches = _Caches()


def register_op(op: OpOverload, handler: Callable[..., Any] | None = None) -> None:
    """Let an op, of torch or of your own, run on ragged tensors.

    Args:
        op: one overload, such as ``torch.ops.mylib.myop.default``.
        handler: called as ``handler(op, args, kwargs)`` with DTensors, below autograd, whenever one of them
            is ragged; it returns the finished result, alike on every rank. None says that the op treats
            each element by itself: it then runs on the local pieces, at the speed of torch's own.

    Raises:
        TypeError: for an op that is no overload, or a handler that cannot be called.
    """
    if not isinstance(op, OpOverload):
        raise TypeError(f"register_op: expected an overload such as torch.ops.aten.add.Tensor, got {op!r}.")
    if handler is None:
        pointwise.add_elementwise(op)
    elif callable(handler):
        HANDLERS[op] = handler
    else:
        raise TypeError(
            f"register_op: handler must be callable as handler(op, args, kwargs), got {handler!r}."
        )
    _caches.rule.cache_clear()  # it may have been refused before
