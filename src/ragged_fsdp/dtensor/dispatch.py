"""Where ops on ragged tensors are decided.

The C++ dispatcher asks :func:`propagate` on every sharding-cache miss. An op that runs on the local pieces
gets a rule, which C++ caches; every other one is run by hand, by its entry in ``HANDLERS``; what neither
knows is refused. A few ops never reach the rules, because the dispatcher hands them to functions of its own:
:func:`guard_handlers` lets those see no ragged operand that they would misread.

**Several meshes at once**: stock refuses ops on tensors of several meshes, and so do we where nothing of ours
takes part. The cases an optimizer step needs are element-wise on lists, where each tensor meets only those of
its own position (see :mod:`ragged_fsdp.dtensor.pointwise`), and scalars such as norms and clip factors, which
are the same number on every rank once they are reduced. Norms of several meshes, stacked, lie on a *number
mesh*: one with the ranks and groups of the first mesh, but with dim names of its own. What is computed from
them lies on it too, so a clip factor is recognised by its mesh when it meets the gradients of any other one.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor import construct, pointwise, reductions
from ragged_fsdp.dtensor.construct import whole, wrap_local
from ragged_fsdp.dtensor.geometry import contiguous_spec, is_ragged, refusal, replicated
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.torch_internals import (
    STOCK,
    DTensorSpec,
    OpOverload,
    OpSchema,
    OutputSharding,
    composite_kernel,
    local_of,
    pytree,
    schema_of,
    spec_of,
    tracing,
    unset_fake_temporarily,
)

__all__ = ["guard_handlers", "propagate", "register_op"]

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_KINDS = (RaggedShard, StridedRaggedShard)
_NUMBER_DIM = "ragged_fsdp_number"

HANDLERS: dict[Any, Handler] = {
    **construct.HANDLERS,
    **pointwise.HANDLERS,
    **reductions.HANDLERS,
}


def propagate(self: Any, op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool) -> Any:
    """An ``OutputSharding``, which the C++ dispatcher caches, or the finished result of a rarer op."""
    ragged, several_meshes = _look_at(op_info)
    if several_meshes and (ragged or any(map(_is_ours, op_info.flat_args_schema))):
        result = _across_meshes(op_call, args, kwargs)
        if result is not NotImplemented:
            return result
    if not ragged:
        stock = STOCK["OpDispatcher._propagate_op_sharding_dispatch_slow_path"]
        return stock(self, op_call, args, kwargs, op_info, try_cache)
    rule = _caches.rule if try_cache and not tracing() else _rule
    sharding = rule(self.sharding_propagator, op_info.schema)
    return _run_by_hand(op_call, args, kwargs) if sharding is None else sharding


def _look_at(op_info: Any) -> tuple[bool, bool]:
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


def _rule(propagator: Any, schema: OpSchema) -> OutputSharding | None:
    """The cacheable rule of an op, or None where it must be run by hand."""
    op = schema.op
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None
    if pointwise.is_elementwise(op):
        return pointwise.rule(propagator, schema)
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


def register_op(op: OpOverload, handler: Handler | None = None) -> None:
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


def _run_by_hand(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op without a cacheable rule; raises where none is known."""
    result = _result_of_handler(op, args, kwargs)
    if result is NotImplemented and composite_kernel(op):  # reached only in inference mode
        result = op.decompose(*args, **kwargs)
    if result is NotImplemented:
        raise refusal(op, _ragged_operands(args, kwargs)[0], "it has no meaning on uneven pieces")
    return result


def _result_of_handler(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    settled = tuple(_settled(op, args))
    if any(after is not before for after, before in zip(settled, args)):
        return op(*settled, **kwargs)
    if torch.Tag.nondeterministic_seeded in op.tags:
        return construct.draw(op, args, kwargs)
    if pointwise.is_elementwise(op) and op not in HANDLERS:
        return pointwise.run_spread(op, args, kwargs)
    handler = HANDLERS.get(op)
    return NotImplemented if handler is None else handler(op, args, kwargs)


def _settled(op: Any, args: tuple[Any, ...]) -> Iterator[Any]:
    """The arguments, ragged ones that are only read without pending reductions of other mesh dims."""
    for argument, value in zip(schema_of(op).arguments, args):
        pending = isinstance(value, DTensor) and any(p.is_partial() for p in value.placements)
        if pending and is_ragged(value) and argument.alias_info is None:
            yield construct.settled(value)
        else:
            yield value


def _ragged_operands(args: Any, kwargs: Any) -> list[DTensor]:
    """The ragged tensors among the arguments of a call, in order."""
    leaves = pytree.tree_leaves((args, kwargs))
    return [leaf for leaf in leaves if is_ragged(leaf)]


# These handlers of torch look at sizes or run on the local tensors: right for ragged ones as they are.
_FINE = {aten.is_same_size.default, aten.as_strided.default, aten.is_pinned.default}
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


def guard_handlers(table: dict[Any, Handler]) -> None:
    """Let the handlers of torch's ``table`` see no ragged operand that they would misread."""
    for op, handler in list(table.items()):
        if op is _UNSCALE:
            table[op] = _unscaling(handler)
        elif op not in _FINE:
            table[op] = _guarded(handler)
    table[aten._local_scalar_dense.default] = _item(table)


def _guarded(handler: Handler) -> Handler:
    def guarded(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (_run_by_hand if _ragged_operands(args, kwargs) else handler)(op, args, kwargs)

    return guarded


def _item(table: dict[Any, Handler]) -> Handler:
    """``item()``: refused where it would give each rank a number of its own.

    On any DTensor the item of a Partial is the local one. An optimizer that asks for the norm of a ragged
    parameter in this way would go on with another norm on every rank.
    """

    def item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        if is_ragged(tensor):
            return whole(tensor).item()  # on every rank, though it lies on one of them
        if reductions.is_pending(spec_of(tensor)):
            why = "its reduction over the ranks is pending: call full_tensor() before item()"
            raise refusal(op, tensor, why)
        # Not ours: dispatched once more without this handler, since stock has none.
        ours = table.pop(op, item)
        try:
            return op(*args, **kwargs)
        finally:
            table[op] = ours

    return item


def _unscaling(handler: Handler) -> Handler:
    """``GradScaler``: the stock handler takes the mesh of the first gradient for that of all."""

    def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grads, found_inf, inv_scale = args
        if not _ragged_operands(args, kwargs):
            return handler(op, args, kwargs)
        flag = local_of(found_inf) if isinstance(found_inf, DTensor) else found_inf
        scale = local_of(inv_scale) if isinstance(inv_scale, DTensor) else inv_scale
        op([local_of(g) if isinstance(g, DTensor) else g for g in grads], flag, scale, **kwargs)
        cut = {
            (grad.device_mesh, mesh_dim): None  # each once, in list order, which is alike on every rank
            for grad in grads
            if isinstance(grad, DTensor)
            for mesh_dim, placement in enumerate(grad.placements)
            if not placement.is_replicate()
        }
        for mesh, mesh_dim in cut:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, mesh.get_group(mesh_dim))
        return None

    return unscale


def _is_ours(spec: Any) -> bool:
    """Whether a tensor is ragged, what a reduction of a ragged one left, or a number of several meshes."""
    if type(spec) is not DTensorSpec:
        return False
    return is_ragged(spec) or reductions.is_pending(spec) or _is_number_mesh(spec.mesh)


def _across_meshes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` with the numbers of other meshes at home; NotImplemented if there are none.

    A stack of scalars becomes a replicated tensor of a number mesh.
    """
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    if op is aten.stack.default and all(leaf.numel() == 1 for leaf in leaves):
        stacked = op([whole(t) if isinstance(t, DTensor) else t for t in args[0]], *args[1:], **kwargs)
        return _replicated_on(_number_mesh(leaves[0].device_mesh), stacked)
    home = _home(leaves)
    at_home = [_brought_to(home, leaf) for leaf in leaves]
    if all(after is before for after, before in zip(at_home, leaves)):
        return NotImplemented
    moved = iter(at_home)
    plain = pytree.tree_map(lambda v: next(moved) if isinstance(v, DTensor) else v, (args, kwargs))
    return op(*plain[0], **plain[1])


def _home(leaves: list[DTensor]) -> DeviceMesh:
    """The mesh of the first tensor that is no scalar: numbers of other meshes come to it."""
    placed = [leaf for leaf in leaves if not _is_number_mesh(leaf.device_mesh)] or leaves
    return next((leaf.device_mesh for leaf in placed if leaf.numel() != 1), placed[0].device_mesh)


def _brought_to(home: DeviceMesh, value: DTensor) -> torch.Tensor:
    """A number of another mesh as a plain one, other results of a number mesh replicated at home."""
    if value.device_mesh == home or is_ragged(value):
        return value
    if value.numel() == 1:
        return whole(value)
    return _replicated_on(home, whole(value)) if _is_number_mesh(value.device_mesh) else value


def _replicated_on(mesh: DeviceMesh, tensor: torch.Tensor) -> DTensor:
    return wrap_local(tensor, contiguous_spec(mesh, replicated(mesh), tensor.shape, tensor.dtype))


@functools.lru_cache(maxsize=256)
def _number_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` under dim names that tell its tensors from those of ``mesh``; no group is made."""
    if _is_number_mesh(mesh):
        return mesh
    names = tuple(f"{_NUMBER_DIM}_{dim}" for dim in range(mesh.ndim))
    groups = mesh.get_all_groups()
    with unset_fake_temporarily():
        return DeviceMesh.from_group(
            groups if mesh.ndim > 1 else groups[0], mesh.device_type, mesh.mesh, mesh_dim_names=names
        )


def _is_number_mesh(mesh: DeviceMesh) -> bool:
    names = mesh.mesh_dim_names
    return names is not None and names[0].startswith(_NUMBER_DIM)
