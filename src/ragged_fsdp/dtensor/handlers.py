"""Ops that the dispatcher hands to handlers of its own, before any sharding rule is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.direct import ragged_operands, run_direct
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import is_ragged
from ragged_fsdp.dtensor.reduce_dims import is_pending
from ragged_fsdp.torch_internals import local_of, spec_of

__all__ = ["wrap_all"]

aten = torch.ops.aten

# These handlers look at sizes or run on the local tensors: right for ragged ones as they are.
_FINE = {aten.is_same_size.default, aten.as_strided.default, aten.is_pinned.default}
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


def wrap_all(table: dict[Any, Callable[..., Any]]) -> None:
    """Let the handlers of ``table`` see no ragged operand that they would misread."""
    for op, handler in list(table.items()):
        if op is _UNSCALE:
            table[op] = _unscaling(handler)
        elif op not in _FINE:
            table[op] = _guarded(handler)
    table[aten._local_scalar_dense.default] = _item(table)


def _item(table: dict[Any, Callable[..., Any]]) -> Callable[..., Any]:
    """``item()``: refused where it would give each rank a number of its own.

    On any DTensor the item of a Partial is the local one. An optimizer that asks for the norm of a ragged
    parameter in this way would go on with another norm on every rank.
    """

    def item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if is_ragged(spec_of(tensor)):
            return run_direct(op, args, kwargs)
        if is_pending(spec_of(tensor)):
            why = "its reduction over the ranks is pending: call full_tensor() before item()"
            raise refusal(op, tensor, why)
        # Not ours: dispatched once more without this handler, since stock has none.
        ours = table.pop(op, item)
        try:
            return op(*args, **kwargs)
        finally:
            table[op] = ours

    return item


def _guarded(handler: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ragged = ragged_operands(args, kwargs)
        if not ragged:
            return handler(op, args, kwargs)
        result = run_direct(op, args, kwargs)
        if result is NotImplemented:
            raise refusal(op, ragged[0], "it has no meaning on uneven pieces")
        return result

    return guarded


def _unscaling(handler: Callable[..., Any]) -> Callable[..., Any]:
    """``GradScaler``: the stock handler takes the mesh of the first gradient for that of all."""

    def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grads, found_inf, inv_scale = args
        if not ragged_operands(args, kwargs):
            return handler(op, args, kwargs)
        flag = local_of(found_inf) if isinstance(found_inf, DTensor) else found_inf
        scale = local_of(inv_scale) if isinstance(inv_scale, DTensor) else inv_scale
        op([local_of(g) if isinstance(g, DTensor) else g for g in grads], flag, scale, **kwargs)
        for mesh, mesh_dim in _sharded_mesh_dims(grads):
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, mesh.get_group(mesh_dim))
        return None

    return unscale


def _sharded_mesh_dims(grads: list[Any]) -> list[tuple[Any, int]]:
    """The distinct (mesh, mesh dim) over which some gradient is not replicated, in list order."""
    found: dict[tuple[Any, int], None] = {}
    for grad in grads:
        if isinstance(grad, DTensor):
            for mesh_dim, placement in enumerate(grad.placements):
                if not placement.is_replicate():
                    found[grad.device_mesh, mesh_dim] = None
    return list(found)
