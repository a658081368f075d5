"""Reductions that need more than a cached rule: extremes, means, variances, along dims.

Each handler is called with the op and the arguments of the call; DTensor ops used inside are
dispatched again, below autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.broadcast import coordinates_of
from ragged_fsdp.dtensor.construct import moved, settled, whole, wrap_local
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import (
    contiguous_stride,
    is_ragged,
    ragged_layout,
    with_placements,
)
from ragged_fsdp.dtensor.reduce_dims import (
    EXTREMES,
    Combine,
    along_dims,
    beside,
    on_whole_rows,
    partial_scalar,
    why_rows_are_cut,
)
from ragged_fsdp.torch_internals import (
    bound_arguments,
    call_with,
    local_of,
    schema_of,
    spec_of,
)

__all__ = ["HANDLERS"]

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_SUM = Combine("sum", lambda dtype: 0)
_PRODUCT = Combine("product", lambda dtype: 1)


def _dims_of(tensor: DTensor, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(tensor.ndim))
    return [dim] if isinstance(dim, int) else list(dim)


def _linear(combine: Combine) -> Handler:
    """sum, prod, any, all along dims: any op whose local results combine like its elements."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        call = bound_arguments(op, args, kwargs)
        tensor, keepdim = call["self"], bool(call.get("keepdim"))
        dims = _dims_of(tensor, call.get("dim"))
        options = {"dtype": call["dtype"]} if call.get("dtype") is not None else {}
        one_dim = schema_of(op).overload_name in ("dim", "dim_int")

        def reduce(local: torch.Tensor, local_dims: list[int], keep: bool) -> torch.Tensor:
            if not one_dim:
                return op(local, local_dims, keep, **options)
            for done, at in enumerate(sorted(local_dims)):
                local = op(local, at if keep else at - done, keep, **options)
            return local

        return along_dims(op, tensor, dims, keepdim, reduce, combine)

    return handler


def _extreme_dims(largest: bool) -> Handler:
    """amax, amin."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        call = bound_arguments(op, args, kwargs)
        tensor = call["self"]
        dims = _dims_of(tensor, call["dim"])
        return along_dims(op, tensor, dims, call["keepdim"], op, EXTREMES["max" if largest else "min"])

    return handler


def _extreme_all(largest: bool) -> Handler:
    """max and min over all elements."""
    reduce = aten.amax.default if largest else aten.amin.default

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        return reduce(args[0])

    return handler


def _mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """A sum divided by the count: the mean of uneven pieces is not the mean of their means."""
    call = bound_arguments(op, args, kwargs)
    tensor, dims = call["self"], _dims_of(call["self"], call.get("dim"))
    options = {"dtype": call["dtype"]} if call.get("dtype") is not None else {}
    count = math.prod(tensor.shape[d] for d in dims)
    if call.get("dim") is None or call["dim"] == []:
        total = aten.sum.default(tensor, **options)
        if call.get("keepdim"):
            total = aten.view.default(total, [1] * tensor.ndim)
    else:
        total = aten.sum.dim_IntList(tensor, call["dim"], call["keepdim"], **options)
    # on the local tensor, so that the result is known for what the reduction of a ragged tensor left
    return wrap_local(aten.div.Scalar(local_of(total), count), spec_of(total))


def _norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Norms without a cached rule: infinite and negative orders, some dims, keepdim."""
    call = bound_arguments(op, args, kwargs)
    tensor, order = call["self"], call.get("ord", call.get("p", 2))
    dims, keepdim = _dims_of(tensor, call.get("dim")), bool(call.get("keepdim"))
    if call.get("dtype") is not None:
        tensor = tensor.to(call["dtype"])
    if call.get("dim") and len(dims) == tensor.ndim and not keepdim:
        return aten.linalg_vector_norm.default(tensor, order)
    if math.isinf(order):
        reduce = aten.amax.default if order > 0 else aten.amin.default
        combine = EXTREMES["max" if order > 0 else "min"] if order < 0 else Combine("max", lambda dtype: 0)
        return along_dims(op, aten.abs.default(tensor), dims, keepdim, reduce, combine)
    prefix = ragged_layout(tensor).cut_dims
    if all(d % tensor.ndim >= prefix for d in dims) and tensor.ndim > prefix:

        def reduce_rows(local: torch.Tensor, local_dims: list[int], keep: bool) -> torch.Tensor:
            return aten.linalg_vector_norm.default(local, order, local_dims, keep)

        if not any(p.is_shard() for p in tensor.placements):
            return along_dims(op, tensor, dims, keepdim, reduce_rows, _SUM)
    powers = aten.sum.dim_IntList(aten.pow.Tensor_Scalar(aten.abs.default(tensor), order), dims, keepdim)
    return aten.pow.Tensor_Scalar(powers, 1.0 / order)


def _foreach_norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Only orders without a cached rule come here; the tensors are independent of each other."""
    call = bound_arguments(op, args, kwargs)
    order, dtype = call["ord"], call.get("dtype")
    return [aten.linalg_vector_norm.default(t, order, None, False, dtype=dtype) for t in call["self"]]


def _foreach_max(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [aten.max.default(tensor) for tensor in args[0]]


def _variance(root: bool) -> Handler:
    """var and std, in two passes."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        call = bound_arguments(op, args, kwargs)
        tensor, dims = call["self"], _dims_of(call["self"], call["dim"])
        correction = 1 if call.get("correction") is None else call["correction"]
        count = math.prod(tensor.shape[d] for d in dims)
        mean = settled(aten.mean.dim(tensor, dims, True))
        squares = torch.square(local_of(tensor) - beside(tensor, mean))
        total = settled(aten.sum.dim_IntList(wrap_local(squares, spec_of(tensor)), dims, call["keepdim"]))
        variance = aten.div.Scalar(total, max(0, count - correction) or float("nan"))
        return aten.sqrt.default(variance) if root else variance

    return handler


def _with_mean(variance: Handler) -> Handler:
    """var_mean and std_mean."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
        call = bound_arguments(op, args, kwargs)
        return variance(op, args, kwargs), aten.mean.dim(call["self"], call["dim"], call["keepdim"])

    return handler


def _both_extremes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """aminmax, of all elements or along one dim."""
    call = bound_arguments(op, args, kwargs)
    dims = [] if call["dim"] is None else [call["dim"]]
    low = aten.amin.default(call["self"], dims, call["keepdim"])
    return low, aten.amax.default(call["self"], dims, call["keepdim"])


def _nansum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    call = bound_arguments(op, args, kwargs)
    known = aten.nan_to_num.default(call["self"], 0.0, math.inf, -math.inf)
    return aten.sum.dim_IntList(known, call["dim"], call["keepdim"], dtype=call["dtype"])


def _allclose(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    call = bound_arguments(op, args, kwargs)
    options = (call["rtol"], call["atol"], call["equal_nan"])
    return bool(
        _truth(
            aten.all.default, (aten.isclose.default(call["self"], call["other"], *options),), {}
        ).to_local()
    )


def _equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Only tensors of different shapes come here: they are not equal."""
    return False


def _extreme_with_index(largest: bool) -> Handler:
    """max, min, argmax, argmin: along one dim, or the place among all elements."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = bound_arguments(op, args, kwargs)
        tensor, dim, keepdim = call["self"], call["dim"], call["keepdim"]
        if dim is not None and not why_rows_are_cut(tensor, dim):
            return on_whole_rows(op, tensor, dim, lambda local, at: op(local, at, keepdim))
        values, indices = _first_extreme(tensor, dim, keepdim, largest)
        return indices if len(schema_of(op).returns) == 1 else (values, indices)

    return handler


def _first_extreme(tensor: DTensor, dim: int | None, keepdim: bool, largest: bool) -> tuple[DTensor, DTensor]:
    """The extreme along ``dim`` (of all elements if None) and where it is first found, both reduced."""
    extreme: Any = aten.amax.default if largest else aten.amin.default
    dims = _dims_of(tensor, dim)
    best = settled(extreme(tensor, dims, True))
    if tensor.is_floating_point():  # backends lose a NaN in a maximum
        nan = settled(aten.amax.default(aten.isnan.default(tensor).to(torch.uint8), dims, True))
        best = aten.masked_fill.Scalar(best, nan > 0, math.nan)
    own, wanted = local_of(tensor), beside(tensor, best)
    hit = (own == wanted) | ((own != own) & (wanted != wanted))
    here, steps = coordinates_of(tensor), contiguous_stride(tensor.shape)
    if dim is None:
        places = sum((c * step for c, step in zip(here, steps)), torch.zeros_like(own, dtype=torch.int64))
    else:
        places = here[dim]
    candidates = torch.where(hit, places, torch.iinfo(torch.int64).max)
    spec = with_placements(spec_of(tensor), tensor.placements, dtype=torch.int64)
    first = settled(aten.amin.default(wrap_local(candidates, spec), dims, keepdim))
    return best if keepdim else extreme(best, dims, False), first


def _whole_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops along one dim whose result depends on the row alone, of one tensor or several: sort, softmax."""
    call = bound_arguments(op, args, kwargs)
    name = "dims" if "dims" in call else "dim"
    dims = list(call[name]) if isinstance(call[name], (list, tuple)) else None
    tensors = {key: value for key, value in call.items() if isinstance(value, DTensor)}
    lead = next(tensor for tensor in tensors.values() if is_ragged(spec_of(tensor)))
    rows = {key: local_of(_with_rows_of(op, lead, tensor)) for key, tensor in tensors.items()}

    def run(local: torch.Tensor, at: int) -> Any:
        return call_with(op, {**call, **rows, name: at if dims is None else [at]})

    if dims is not None and len(dims) != 1:
        raise refusal(op, lead, f"it runs along the dims {tuple(dims)} at once")
    return on_whole_rows(op, lead, call[name] if dims is None else dims[0], run)


def _with_rows_of(op: Any, lead: DTensor, tensor: DTensor) -> DTensor:
    """``tensor`` with row ``i`` on the rank that has row ``i`` of ``lead``."""
    prefix = ragged_layout(lead).cut_dims
    if tensor.shape[:prefix] != lead.shape[:prefix]:
        raise refusal(op, lead, f"an operand of shape {tuple(tensor.shape)} has other rows")
    return moved(tensor, lead.placements)


def _count_nonzero(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    call = bound_arguments(op, args, kwargs)
    nonzero = aten.ne.Scalar(call["self"], 0)
    dim = call.get("dim")
    if dim is None or dim == []:
        return aten.sum.default(nonzero)
    return aten.sum.dim_IntList(nonzero, [dim] if isinstance(dim, int) else dim)


def _truth(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """any and all of all elements, reduced at once: programs branch on them, alike on every rank."""
    local = op(local_of(args[0])).to(torch.uint8)
    verdict = settled(partial_scalar(args[0], local, "max" if op is aten.any.default else "min"))
    return aten._to_copy.default(verdict, dtype=torch.bool)


def _item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one element, on every rank, though it lies on one of them."""
    return whole(args[0]).item()


HANDLERS: dict[Any, Handler] = {
    aten._local_scalar_dense.default: _item,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.max.default: _extreme_all(True),
    aten.min.default: _extreme_all(False),
    aten.amax.default: _extreme_dims(True),
    aten.amin.default: _extreme_dims(False),
    aten.argmax.default: _extreme_with_index(True),
    aten.argmin.default: _extreme_with_index(False),
    aten.max.dim: _extreme_with_index(True),
    aten.min.dim: _extreme_with_index(False),
    aten.sum.dim_IntList: _linear(_SUM),
    aten.prod.dim_int: _linear(_PRODUCT),
    aten.any.default: _truth,
    aten.all.default: _truth,
    aten.any.dim: _linear(_SUM),
    aten.any.dims: _linear(_SUM),
    aten.all.dim: _linear(_PRODUCT),
    aten.all.dims: _linear(_PRODUCT),
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._foreach_max.default: _foreach_max,
    aten.allclose.default: _allclose,
    aten.aminmax.default: _both_extremes,
    aten.equal.default: _equal,
    aten.nansum.default: _nansum,
    aten.var.correction: _variance(root=False),
    aten.std.correction: _variance(root=True),
    aten.var_mean.correction: _with_mean(_variance(root=False)),
    aten.std_mean.correction: _with_mean(_variance(root=True)),
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    **dict.fromkeys(
        (
            aten._log_softmax.default,
            aten._log_softmax_backward_data.default,
            aten._softmax.default,
            aten._softmax_backward_data.default,
            aten.cummax.default,
            aten.cummin.default,
            aten.cumprod.default,
            aten.cumsum.default,
            aten.flip.default,
            aten.gather.default,
            aten.logsumexp.default,
            aten.median.dim,
            aten.mode.default,
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter_add.default,
            aten.sort.default,
            aten.sort.stable,
            aten.topk.default,
        ),
        _whole_rows,
    ),
}
