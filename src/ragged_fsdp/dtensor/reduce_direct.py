"""Reductions that need more than a cached rule: extremes, means, variances, along dims.

Each handler is called with the op and the arguments of the call; DTensor ops used inside are
dispatched again, below autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.dtensor.geometry import ragged_layout, replicated
from ragged_fsdp.dtensor.internals import bound_arguments, call_with
from ragged_fsdp.dtensor.reduce_dims import EXTREMES, Combine, along_dims, on_whole_rows, partial_scalar

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
        one_dim = "int" in op._overloadname or op._overloadname == "dim"

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
    return aten.div.Scalar(total, count)


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
    prefix = len(tensor.placements[ragged_layout(tensor).mesh_dim].dims)
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
        mean = aten.mean.dim(tensor, dims, True)
        if len(dims) == tensor.ndim:
            mean = aten.view.default(_settled(mean), [])
        squares = aten.square.default(aten.sub.Tensor(tensor, _settled(mean)))
        total = aten.sum.dim_IntList(squares, dims, call["keepdim"])
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


def _arg_extreme(largest: bool) -> Handler:
    """argmax and argmin: along whole rows, or of all elements (the first of equals)."""

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
        call = bound_arguments(op, args, kwargs)
        tensor, dim, keepdim = call["self"], call["dim"], call["keepdim"]
        if dim is not None:
            return on_whole_rows(op, tensor, dim, lambda local, at: op(local, at, keepdim))
        best = _settled((aten.amax if largest else aten.amin).default(tensor))._local_tensor
        own = tensor._local_tensor.reshape(-1)
        hit = own == best
        if own.is_floating_point():
            hit = torch.where(torch.isnan(best), torch.isnan(own), hit)
        positions = _global_positions(tensor)[hit]
        first = positions.min() if positions.numel() else positions.new_full((), tensor.numel())
        found = partial_scalar(tensor, first, "min")
        return aten.view.default(found, [1] * tensor.ndim) if keepdim else found

    return handler


def _global_positions(tensor: DTensor) -> torch.Tensor:
    """The place of each element of the local piece in the flattened global tensor."""
    layout = ragged_layout(tensor)
    inner = torch.arange(layout.start, layout.stop, device=tensor._local_tensor.device)
    position, step = torch.zeros_like(inner), 1
    for size, offset, global_size in zip(
        reversed(layout.inner_shape), reversed(layout.inner_offset), reversed(tensor.shape)
    ):
        position += (inner % max(size, 1) + offset) * step
        inner, step = inner // max(size, 1), step * global_size
    return position


def _whole_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ops along one dim whose result depends on the row alone: sort, cumsum, softmax, max with indices."""
    call = bound_arguments(op, args, kwargs)
    dim = call["dim"]

    def run(local: torch.Tensor, at: int) -> Any:
        own = {**call, "self": local, "dim": [at] if isinstance(dim, (list, tuple)) else at}
        return call_with(op, own)

    if isinstance(dim, (list, tuple)) and len(dim) != 1:
        raise refusal(op, call["self"], f"it runs along the dims {tuple(dim)} at once")
    return on_whole_rows(op, call["self"], dim[0] if isinstance(dim, (list, tuple)) else dim, run)


def _count_nonzero(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    call = bound_arguments(op, args, kwargs)
    nonzero = aten.ne.Scalar(call["self"], 0)
    dim = call.get("dim")
    if dim is None or dim == []:
        return aten.sum.default(nonzero)
    return aten.sum.dim_IntList(nonzero, [dim] if isinstance(dim, int) else dim)


def _truth(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """any and all of all elements, reduced at once: programs branch on them, alike on every rank."""
    local = op(args[0]._local_tensor).to(torch.uint8)
    verdict = _settled(partial_scalar(args[0], local, "max" if op is aten.any.default else "min"))
    return aten._to_copy.default(verdict, dtype=torch.bool)


def _item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The one element, on every rank, though it lies on one of them."""
    return args[0].redistribute(placements=replicated(args[0].device_mesh))._local_tensor.item()


def _settled(tensor: DTensor) -> DTensor:
    """The tensor without pending reductions."""
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.redistribute(placements=placements)


HANDLERS: dict[Any, Handler] = {
    aten._local_scalar_dense.default: _item,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.max.default: _extreme_all(True),
    aten.min.default: _extreme_all(False),
    aten.amax.default: _extreme_dims(True),
    aten.amin.default: _extreme_dims(False),
    aten.argmax.default: _arg_extreme(True),
    aten.argmin.default: _arg_extreme(False),
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
            aten._softmax.default,
            aten.cummax.default,
            aten.cummin.default,
            aten.cumprod.default,
            aten.cumsum.default,
            aten.logsumexp.default,
            aten.max.dim,
            aten.median.dim,
            aten.min.dim,
            aten.mode.default,
            aten.sort.default,
            aten.sort.stable,
            aten.topk.default,
        ),
        _whole_rows,
    ),
}
