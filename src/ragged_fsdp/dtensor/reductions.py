"""Reductions of ragged tensors, to one number or along dims.

Over all elements the sums and norms that an optimizer step takes have cacheable rules (:func:`full_rule`):
each rank reduces its piece, and the results are a Partial. Everything else is run by hand (``HANDLERS``).
Where the reduced dims come after those that the pieces cut, each row is whole on its rank: the op runs
locally and the result is ragged alike. Where all cut dims are reduced, each rank reduces its rows and the
results are combined later: a Partial. Where only some are, the piece is first laid into the inner tensor,
filled with the identity.

A handler is called with the op and the arguments of the call; DTensor ops used inside are dispatched again,
below autograd.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Shard

from ragged_fsdp.dtensor.construct import settled, wrap_local
from ragged_fsdp.dtensor.geometry import (
    contiguous_spec,
    is_ragged,
    ragged_layout,
    refusal,
    with_placements,
)
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.tiling import untiled
from ragged_fsdp.torch_internals import (
    DTensorSpec,
    OpSchema,
    OutputSharding,
    TensorMeta,
    bound_arguments,
    local_of,
)

__all__ = ["HANDLERS", "full_rule", "is_full_reduction", "is_pending"]

aten = torch.ops.aten
Shape = tuple[int, ...]
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar}
_FULL = _NORMS | {aten.sum.default, aten.prod.default}
if hasattr(aten, "_foreach_powsum"):  # not in torch 2.11
    _FULL.add(aten._foreach_powsum.Scalar)


def pending(spec: DTensorSpec) -> DTensorSpec:
    """``spec``, marked as what a reduction of a ragged tensor left to be combined.

    ``item()`` of a Partial is the number of this rank alone, and a rank without a piece has none to tell: of
    such a tensor it is refused.
    """
    spec._of_ragged_pieces = True  # type: ignore[attr-defined]
    return spec


def is_pending(spec: DTensorSpec) -> bool:
    """Whether ``spec`` is what a reduction of a ragged tensor left to be combined."""
    return getattr(spec, "_of_ragged_pieces", False) and any(p.is_partial() for p in spec.placements)


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


@dataclass(frozen=True)
class Combine:
    """How partial results of several ranks combine, and the value of an empty piece."""

    reduce_op: str
    identity: Callable[[torch.dtype], Any]


def _extreme_identity(dtype: torch.dtype, largest: bool) -> Any:
    """What leaves a maximum (or a minimum) of this dtype unchanged."""
    if dtype is torch.bool:
        return not largest
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    return torch.iinfo(dtype).min if largest else torch.iinfo(dtype).max


_SUM = Combine("sum", lambda dtype: 0)
_MAX = Combine("max", lambda dtype: _extreme_identity(dtype, True))
_MIN = Combine("min", lambda dtype: _extreme_identity(dtype, False))


def _along_dims(
    tensor: DTensor,
    dims: Sequence[int],
    keepdim: bool,
    reduce: Callable[[torch.Tensor, list[int], bool], torch.Tensor],
    combine: Combine,
) -> DTensor:
    """Reduce ``dims`` of a ragged tensor with ``reduce(local, dims, keepdim)``."""
    layout, own = ragged_layout(tensor), local_of(tensor)
    prefix = layout.cut_dims
    reduced = sorted({d % max(1, tensor.ndim) for d in dims})
    inner = _reduced_shape(layout.inner_shape, reduced, keepdim)
    rows_are_whole = bool(tensor.ndim and tensor.numel()) and all(d >= prefix for d in reduced)

    def after(mesh_dim: int, placement: Placement) -> Placement:
        if isinstance(placement, RaggedShard) and mesh_dim != layout.mesh_dim:  # whole rows of dim 0
            return Partial(combine.reduce_op) if 0 in reduced else placement
        if isinstance(placement, RaggedShard):
            return placement if rows_are_whole else Partial(combine.reduce_op)
        if isinstance(placement, Shard):
            if placement.dim in reduced:
                return Partial(combine.reduce_op)
            return Shard(placement.dim - (0 if keepdim else sum(d < placement.dim for d in reduced)))
        return placement

    placements = tuple(after(d, p) for d, p in enumerate(tensor.placements))
    shape = _reduced_shape(tuple(tensor.shape), reduced, keepdim)
    spec = contiguous_spec(tensor.device_mesh, placements, shape, own.dtype)
    if not layout.numel:
        # not as many rows as the piece has: without a column it has none, and others will send theirs
        held = ragged_layout(spec).local_shape if rows_are_whole else inner
        sample = reduce(own.new_ones((1,) * len(layout.inner_shape)), reduced, keepdim)
        local = sample.new_full(held, combine.identity(sample.dtype))
    elif rows_are_whole:
        local = reduce(own, [d - prefix + 1 for d in reduced], keepdim)
    elif reduced[:prefix] == list(range(prefix)):
        local = reduce(own, [0, *(d - prefix + 1 for d in reduced[prefix:])], False).reshape(inner)
    else:
        flat = own.new_full((layout.inner_numel,), combine.identity(own.dtype))
        flat[layout.start : layout.stop] = own.reshape(-1)
        local = reduce(untiled(flat, layout.inner_shape, layout.tile), reduced, keepdim)
    return wrap_local(local, pending(with_placements(spec, placements, dtype=local.dtype)))


def _reduced_shape(shape: Shape, reduced: list[int], keepdim: bool) -> Shape:
    return tuple(1 if d in reduced else s for d, s in enumerate(shape) if keepdim or d not in reduced)


def _dims_of(call: dict[str, Any]) -> list[int]:
    """The dims that a call reduces: all, if it names none."""
    dim = call.get("dim")
    if dim is None or dim == []:
        return list(range(call["self"].ndim))
    return [dim] if isinstance(dim, int) else list(dim)


def _combining(combine: Combine) -> Handler:
    """sum, amax, amin: ops along dims whose local results combine like the elements."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        call = bound_arguments(op, args, kwargs)
        options = {"dtype": call["dtype"]} if call.get("dtype") is not None else {}

        def reduce(local: torch.Tensor, local_dims: list[int], keep: bool) -> torch.Tensor:
            return op(local, local_dims, keep, **options)

        found = _along_dims(call["self"], _dims_of(call), bool(call.get("keepdim")), reduce, combine)
        # the least integer, which stands for an empty piece, has no negative: -x.max() would stay pending
        return found if combine is _SUM or found.dtype.is_floating_point else settled(found)

    return handler


def _extreme_of_all(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """max and min over all elements."""
    return (aten.amax if op is aten.max.default else aten.amin).default(args[0])


def _result_dtype(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """The dtype of the result; raises torch's error where there is none."""
    options = tuple(tuple(each) if isinstance(each, list) else each for each in args[1:])
    return _dtype_of(op, tuple(map(int, args[0].shape)), args[0].dtype, options, tuple(kwargs.items()))


@functools.lru_cache(maxsize=1 << 12)
def _dtype_of(
    op: Any, shape: Shape, dtype: torch.dtype, options: tuple[Any, ...], named: tuple[tuple[str, Any], ...]
) -> torch.dtype:
    """Asked of a tensor without memory, which costs the host more than the reduction: once per signature."""
    return op(torch.empty(shape, dtype=dtype, device="meta"), *options, **dict(named)).dtype


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What torch's kernels add up in: a sum of many fp16 numbers is larger than fp16 has."""
    return torch.promote_types(dtype, torch.float32)


def _mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Each sum is divided by the count of all: the mean of uneven pieces is not the mean of their means."""
    call, dtype = bound_arguments(op, args, kwargs), _result_dtype(op, args, kwargs)
    tensor, dims = call["self"], _dims_of(call)
    count = math.prod(tensor.shape[d] for d in dims)

    def reduce(local: torch.Tensor, local_dims: list[int], keep: bool) -> torch.Tensor:
        return (aten.sum.dim_IntList(local, local_dims, keep, dtype=_wide(dtype)) / count).to(dtype)

    # where there is no element no rank has one
    combine = _SUM if count else Combine("sum", lambda dtype: float("nan"))
    return _along_dims(tensor, dims, bool(call.get("keepdim")), reduce, combine)


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Norms without a cached rule: infinite and negative orders, some dims, keepdim."""
    call, result = bound_arguments(op, args, kwargs), _result_dtype(op, args, kwargs)
    tensor, order, dtype = call["self"], call.get("ord", call.get("p", 2)), call.get("dtype")
    dims, keepdim = _dims_of(call), bool(call.get("keepdim"))
    if call.get("dim") and len(dims) == tensor.ndim and not keepdim:
        return aten.linalg_vector_norm.default(tensor, order, dtype=dtype)

    def reduce(local: torch.Tensor, local_dims: list[int], keep: bool) -> torch.Tensor:
        return aten.linalg_vector_norm.default(local, order, local_dims, keep, dtype=dtype)

    if math.isinf(order):
        combine = _MIN if order < 0 else Combine("max", lambda dtype: 0)
        return _along_dims(tensor, dims, keepdim, reduce, combine)
    prefix, sharded = ragged_layout(tensor).cut_dims, any(isinstance(p, Shard) for p in tensor.placements)
    if not sharded and tensor.ndim > prefix and all(d % tensor.ndim >= prefix for d in dims):
        return _along_dims(tensor, dims, keepdim, reduce, _SUM)  # rows are whole: nothing to combine
    if order == 0:  # how many there are that are not 0
        terms, root = aten.ne.Scalar(tensor, 0), 1.0
    else:
        wide = tensor.to(_wide(dtype or tensor.dtype))
        terms, root = aten.pow.Tensor_Scalar(aten.abs.default(wide), order), 1.0 / order
    total = aten.sum.dim_IntList(terms, dims, keepdim, dtype=_wide(result))
    return aten.pow.Tensor_Scalar(total, root).to(result)


def _foreach_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Only orders without a cached rule come here; the tensors are independent of each other."""
    call = bound_arguments(op, args, kwargs)
    order, dtype = call["ord"], call.get("dtype")
    return [aten.linalg_vector_norm.default(t, order, None, False, dtype=dtype) for t in call["self"]]


def _variance(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """var and std, in two passes."""
    call, dtype = bound_arguments(op, args, kwargs), args[0].dtype
    if not dtype.is_floating_point:
        raise refusal(op, args[0], f"it takes floating point numbers, got {dtype}")
    tensor, dims = args[0].to(_wide(dtype)), _dims_of(call)
    correction = 1 if call.get("correction") is None else call["correction"]
    count = math.prod(tensor.shape[d] for d in dims)
    # one mean of all elements is a number beside any piece; along dims it is spread where rows are cut
    mean = settled(aten.mean.dim(tensor, dims, len(dims) < tensor.ndim))
    squares = aten.pow.Tensor_Scalar(aten.sub.Tensor(tensor, mean), 2)
    total = settled(aten.sum.dim_IntList(squares, dims, call["keepdim"]))
    variance = aten.div.Scalar(total, max(0, count - correction))
    return (aten.sqrt.default(variance) if op is aten.std.correction else variance).to(dtype)


def _truth(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """any and all of all elements, reduced at once: programs branch on them, alike on every rank."""

    def reduce(local: torch.Tensor, local_dims: list[int], keep: bool) -> torch.Tensor:
        return op(local).to(torch.uint8)

    combine = _MAX if op is aten.any.default else _MIN
    verdict = _along_dims(args[0], range(args[0].ndim), False, reduce, combine)
    return aten._to_copy.default(settled(verdict), dtype=torch.bool)


def _allclose(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    call = bound_arguments(op, args, kwargs)
    options = (call["rtol"], call["atol"], call["equal_nan"])
    close = aten.isclose.default(call["self"], call["other"], *options)
    return bool(_truth(aten.all.default, (close,), {}).to_local())


def _equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Only tensors of different shapes come here: they are not equal."""
    return False


HANDLERS: dict[Any, Handler] = {
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.max.default: _extreme_of_all,
    aten.min.default: _extreme_of_all,
    aten.amax.default: _combining(_MAX),
    aten.amin.default: _combining(_MIN),
    aten.sum.dim_IntList: _combining(_SUM),
    aten.any.default: _truth,
    aten.all.default: _truth,
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.allclose.default: _allclose,
    aten.equal.default: _equal,
    aten.var.correction: _variance,
    aten.std.correction: _variance,
}
