"""Element-wise ops on ragged tensors: single ones, lists (foreach, fused), smaller operands and masks.

A rule says which placements each operand must have so that the op may run on the local pieces, and what its
results are. It is computed once per signature: the C++ dispatcher caches it.

A piece whose cut goes through several dims is flat in them, so a row, a column or a ``(1, 1)`` tensor has no
dim of its own to broadcast along. Such a call is run by hand: each element of the piece takes the value that
belongs to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_fsdp.dtensor.construct import whole, wrap_local
from ragged_fsdp.dtensor.geometry import (
    is_ragged,
    ragged_layout,
    ragged_mesh_dim,
    refusal,
    replicated,
    settled_placements,
    shard_box,
    with_placements,
)
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.torch_internals import (
    DTensorSpec,
    OpOverload,
    OpSchema,
    OutputSharding,
    TensorMeta,
    bound_arguments,
    local_of,
    propagate_tensor_meta,
    schema_of,
    spec_of,
)

__all__ = [
    "HANDLERS",
    "LIST_OPS",
    "add_elementwise",
    "is_elementwise",
    "rule",
    "run_spread",
]

aten = torch.ops.aten

# Element-wise in effect, though neither they nor their out-of-place forms are tagged so.
_UNTAGGED = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.copy.default,
    aten.copy_.default,
    aten.detach.default,
    aten.detach_.default,
    aten.empty_like.default,
    aten.equal.default,
    aten.fill.Scalar,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.lift_fresh.default,
    aten.ones_like.default,
    aten.view.dtype,
    aten.zero.default,
    aten.zero_.default,
    aten.zeros_like.default,
}
# May run before a pending reduction: they keep every value, or the zeros that any reduction leaves zeros.
_KEEPING = {
    "alias",
    "clone",
    "detach",
    "empty_like",
    "zero",
    "zero_",
    "zeros_like",
    "_foreach_zero_",
}
_LINEAR = {"neg", "neg_", "_foreach_neg", "_foreach_neg_"}
"""May run before a pending sum or mean; the maximum of negated values is another number."""
_FUSED = ("_fused_ada", "_fused_sgd")
LIST_OPS = ("_foreach_", *_FUSED)
"""How the names of ops on lists of tensors begin: tensor ``i`` of each list belongs together."""
_REDUCING = {"max", "min"}  # element-wise with two operands, tagged so; other overloads reduce


def _name(op: OpOverload) -> str:
    """The name without namespace and overload: ``add_``."""
    return schema_of(op).name.split("::")[1]


def _is_foreach(op: OpOverload) -> bool:
    """Whether the op takes lists of tensors that correspond element by element."""
    return _name(op).startswith(LIST_OPS)


@functools.cache
def is_elementwise(op: OpOverload) -> bool:
    """Whether the op treats each element by itself, so that it may run on any matching pieces.

    Torch tags the out-of-place forms; ``abs_`` or ``gelu.out`` it does not. An op on lists is what its
    namesake on tensors is: ``_foreach_mm`` would multiply pieces.
    """
    name = _name(op)
    if op in _UNTAGGED or name.startswith(_FUSED):
        return True
    if op.namespace != "aten":
        return False
    if torch.Tag.pointwise in op.tags:
        return True
    single = name.removeprefix("_foreach_").removesuffix("_")
    packet = getattr(aten, single, None)
    if packet is None or single in _REDUCING:
        return False
    forms = [getattr(packet, form) for form in packet.overloads()]
    return any(torch.Tag.pointwise in form.tags or (_is_foreach(op) and form in _UNTAGGED) for form in forms)


def add_elementwise(op: OpOverload) -> None:
    """Take ``op`` for element-wise from now on."""
    _UNTAGGED.add(op)
    is_elementwise.cache_clear()


def rule(propagator: Any, schema: Any) -> OutputSharding | None:
    """The cacheable rule of an element-wise op, or None where it must be run by hand."""
    return (_list_rule if _is_foreach(schema.op) else _tensor_rule)(propagator, schema)


def _tensor_rule(propagator: Any, schema: Any) -> OutputSharding | None:
    """The rule of an op on single tensors; None where the local pieces cannot meet an operand as it is."""
    op = schema.op
    written = _written_spec(schema)
    lead = written or _leading(schema.args_schema, schema.kwargs_schema)
    others = [a for a in schema.args_schema if _is_spec(a) and a.shape != lead.shape]
    if op is aten.equal.default and others:
        return None  # they differ already
    if is_ragged(lead) and any(_broadcast_placements(lead, spec) is None for spec in others):
        return None
    lead = _settled(schema, lead, written is not None)
    out_meta = propagate_tensor_meta(propagator, schema)
    for meta in [out_meta] if isinstance(out_meta, TensorMeta) else list(out_meta or ()):
        if meta is not None and meta.shape != lead.shape:
            raise refusal(op, lead, f"its result of shape {tuple(meta.shape)} is not laid out like it")
    args = tuple(_matched(op, lead, a) if _is_spec(a) else a for a in schema.args_schema)
    _check_written(schema, args)
    _check_keyword_tensors(schema, lead)
    return _sharding(schema, args, _specs_of(out_meta, lead))


def _list_rule(propagator: Any, schema: Any) -> OutputSharding:
    """The rule of a foreach or fused op: tensor ``i`` of each list belongs together."""
    op, args = schema.op, list(schema.args_schema)
    lists = [k for k, a in enumerate(args) if isinstance(a, (list, tuple)) and a and _is_spec(a[0])]
    in_place = _name(op).endswith("_")
    leads: list[DTensorSpec] = []
    for position in range(len(args[lists[0]])):
        column = [args[k][position] for k in lists if position < len(args[k])]
        first = column[0] if in_place else next((s for s in column if is_ragged(s)), column[0])
        leads.append(_settled(schema, first, in_place))
    for k, arg in enumerate(args):
        if k in lists:
            args[k] = type(arg)(_matched(op, lead, s) if _is_spec(s) else s for lead, s in zip(leads, arg))
        elif _is_spec(arg):
            args[k] = with_placements(arg, replicated(arg.mesh))
    _check_written(schema, tuple(args))
    _check_keyword_tensors(schema, None)
    metas = None if in_place else propagate_tensor_meta(propagator, schema)
    output = None if metas is None else tuple(_specs_of(m, lead) for m, lead in zip(metas, leads))
    return _sharding(schema, tuple(args), output)


def _is_spec(value: Any) -> bool:
    return isinstance(value, DTensorSpec)


def _sharding(schema: Any, args: tuple[Any, ...], output: Any) -> OutputSharding:
    if args == tuple(schema.args_schema):
        return OutputSharding(output, schema)
    wanted = OpSchema(schema.op, args, schema.kwargs_schema, schema_info=schema.schema_info)
    return OutputSharding(output, wanted, needs_redistribute=True)


def _specs_of(meta: Any, lead: DTensorSpec) -> Any:
    if meta is None:
        return None
    if isinstance(meta, TensorMeta):
        return DTensorSpec(lead.mesh, lead.placements, tensor_meta=meta)
    return tuple(_specs_of(m, lead) for m in meta)


def _written_spec(schema: Any) -> DTensorSpec | None:
    """The spec that the result must have because it exists already: ``self`` or ``out=``."""
    if _name(schema.op).endswith("_"):
        return schema.args_schema[0]
    for argument in schema_of(schema.op).arguments:
        if argument.is_out and _is_spec(schema.kwargs_schema.get(argument.name)):
            return schema.kwargs_schema[argument.name]
    return None


def _leading(args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """The largest ragged operand, as a tensor or as a spec: the result is laid out like it."""
    ragged = filter(is_ragged, (*args, *kwargs.values()))
    return max(ragged, key=lambda operand: (operand.ndim, math.prod(operand.shape)))


def _settled(schema: Any, lead: DTensorSpec, written: bool) -> DTensorSpec:
    """``lead`` without pending reductions, unless the op commutes with them."""
    pending = [p for p in lead.placements if p.is_partial()]
    if not pending or _commutes(schema, pending):
        return lead
    if written:
        raise refusal(schema.op, lead, "it would be written before its pending reduction")
    return with_placements(lead, settled_placements(lead.placements))


def _commutes(schema: Any, pending: Iterable[Any]) -> bool:
    """Whether the op on what each rank has is the op on what the reductions ``pending`` will make of it."""
    name = _name(schema.op)
    if name == "_to_copy":  # an integer forgets fractions that together are more than one
        dtype = schema.kwargs_schema.get("dtype")
        return dtype is None or dtype.is_floating_point
    sums = all(type(p) is Partial and p.reduce_op in ("sum", "avg") for p in pending)
    return name in _KEEPING or (name in _LINEAR and sums)


def _matched(op: Any, lead: DTensorSpec, spec: DTensorSpec) -> DTensorSpec:
    """What ``spec`` must be so that its local piece broadcasts against the local piece of ``lead``."""
    if spec.shape == lead.shape:
        placements = lead.placements
    elif math.prod(spec.shape) == 1:
        return with_placements(spec, replicated(spec.mesh))
    else:
        follow = _broadcast_placements(lead, spec)
        if follow is None:
            raise refusal(op, lead, f"an operand of shape {tuple(spec.shape)} does not match it")
        placements = follow
    if spec.placements == placements:
        return spec
    if spec.mesh != lead.mesh:
        raise refusal(op, lead, f"another operand lies on another mesh with placements {spec.placements}")
    return with_placements(spec, placements)


def _broadcast_placements(lead: DTensorSpec, spec: DTensorSpec) -> tuple[Placement, ...] | None:
    """Placements of a smaller operand whose local part broadcasts as the whole one would; None if none."""
    mesh_dim = ragged_mesh_dim(lead.placements)
    missing = lead.ndim - spec.ndim
    if mesh_dim is None or missing < 0:
        return None
    prefix = len(lead.placements[mesh_dim].dims)
    spans_prefix = missing == 0 and tuple(spec.shape[:prefix]) == tuple(lead.shape[:prefix])
    covered = spec.shape[: max(0, prefix - missing)]  # its sizes along the dims that the pieces cut
    if not spans_prefix and (any(size != 1 for size in covered) or len(covered) > 1):
        return None  # the cut dims are one dim of the local tensor: at most one 1 can broadcast against it
    mesh_shape = lead.mesh.shape
    last = shard_box(tuple(lead.shape), mesh_shape, tuple(n - 1 for n in mesh_shape), lead.placements)
    if spans_prefix and not math.prod(last[1][prefix:]):
        return None  # an uneven Shard leaves the last rank no column: its piece has no rows to meet

    def follow(placement: Placement) -> Placement:
        if isinstance(placement, RaggedShard):
            return placement if spans_prefix else Replicate()
        if isinstance(placement, Shard):
            dim = placement.dim - missing
            spans = dim >= 0 and spec.shape[dim] == lead.shape[placement.dim]
            return Shard(dim) if spans else Replicate()
        return placement

    return tuple(follow(p) for p in lead.placements)


def _check_written(schema: Any, args: tuple[Any, ...]) -> None:
    """What the op writes must already be laid out as it needs: a redistributed copy would be lost."""
    for argument, before, after in zip(schema_of(schema.op).arguments, schema.args_schema, args):
        if argument.alias_info is None or not argument.alias_info.is_write or before == after:
            continue
        if argument.name == "grads" and schema.kwargs_schema.get("grad_scale") is None:
            continue  # fused optimizers write gradients only to unscale them
        pairs = zip(before, after) if isinstance(before, (list, tuple)) else [(before, after)]
        for own, needed in pairs:
            if own != needed:
                raise refusal(
                    schema.op,
                    needed,
                    f"{argument.name} would be written, but it is laid out as {own.placements}",
                )


def _check_keyword_tensors(schema: Any, lead: DTensorSpec | None) -> None:
    """Keyword tensors are never redistributed by the dispatcher: they must fit as they are."""
    outs = {argument.name for argument in schema_of(schema.op).arguments if argument.is_out}
    for name, spec in schema.kwargs_schema.items():
        if not _is_spec(spec) or all(p.is_replicate() for p in spec.placements):
            continue
        fits = lead is not None and spec.shape == lead.shape and spec.placements == lead.placements
        if not fits:
            what = "out=" if name in outs else f"{name}="
            raise refusal(schema.op, lead or spec, f"{what} is laid out as {spec.placements}")


def run_spread(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op`` with every operand laid out like the leading one; NotImplemented if they are."""
    # what is written leads, though an operand be larger: the op would write to a copy of it
    lead = args[0] if _name(op).endswith("_") else _leading(args, kwargs)
    smaller = [isinstance(a, torch.Tensor) and a.ndim > 0 and a.shape != lead.shape for a in args]
    for operand, to_spread in zip(args, smaller):
        if to_spread and torch.broadcast_shapes(operand.shape, lead.shape) != lead.shape:
            raise refusal(op, lead, f"an operand of shape {tuple(operand.shape)} is larger than it")
    if not any(smaller):
        return NotImplemented
    spread = (_like(lead, operand) if to_spread else operand for operand, to_spread in zip(args, smaller))
    return op(*spread, **kwargs)


def _like(lead: DTensor, operand: torch.Tensor) -> DTensor:
    """The operand repeated to the shape of ``lead``: only the piece that this rank needs of it."""
    values = whole(operand) if isinstance(operand, DTensor) else operand
    here = _coordinates_of(lead)[lead.ndim - values.ndim :]
    own = values[tuple(at if size != 1 else torch.zeros_like(at) for at, size in zip(here, values.shape))]
    return wrap_local(own, with_placements(spec_of(lead), lead.placements, dtype=own.dtype))


def _coordinates_of(tensor: DTensor) -> list[torch.Tensor]:
    """The index of each element of the local piece along each dim of the global tensor."""
    own = local_of(tensor)
    along: list[list[torch.Tensor]] = [[own.new_empty(0, dtype=torch.int64)] for _ in tensor.shape]
    for offsets, sizes in ragged_layout(tensor).boxes():
        ranges = (torch.arange(o, o + s, device=own.device) for o, s in zip(offsets, sizes))
        for parts, grid in zip(along, torch.meshgrid(*ranges, indexing="ij")):
            parts.append(grid.reshape(-1))
    return [torch.cat(parts).view(own.shape) for parts in along]


def _put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """``x[mask] = number``: the one write by index that treats each element by itself."""
    call = bound_arguments(op, args, kwargs)
    tensor, indices, value = call["self"], call["indices"], call["values"]
    mask = indices[0] if len(indices) == 1 else None
    by_mask = isinstance(mask, DTensor) and mask.dtype is torch.bool and mask.shape == tensor.shape
    if not by_mask or value.numel() != 1 or call["accumulate"]:
        raise refusal(op, tensor, "it writes by index, and only one mask and one number say where and what")
    number = whole(value) if isinstance(value, DTensor) else value
    return aten.masked_fill_.Scalar(tensor, mask, number.item())


HANDLERS: dict[Any, Callable[..., Any]] = {aten.index_put_.default: _put}
