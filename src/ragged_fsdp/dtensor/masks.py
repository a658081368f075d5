"""``x[mask] = value``: the one write by index that treats each element by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.construct import whole
from ragged_fsdp.dtensor.errors import refusal
from ragged_fsdp.torch_internals import bound_arguments

__all__ = ["HANDLERS"]

aten = torch.ops.aten


def _put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Fill where one mask of the tensor's own shape says so, with one number."""
    call = bound_arguments(op, args, kwargs)
    tensor, indices, value = call["self"], call["indices"], call["values"]
    mask = indices[0] if len(indices) == 1 else None
    by_mask = isinstance(mask, DTensor) and mask.dtype is torch.bool and mask.shape == tensor.shape
    if not by_mask or value.numel() != 1 or call["accumulate"]:
        raise refusal(op, tensor, "it writes by index, and only one mask and one number say where and what")
    number = whole(value) if isinstance(value, DTensor) else value
    return aten.masked_fill_.Scalar(tensor, mask, number.item())


HANDLERS: dict[Any, Callable[..., Any]] = {aten.index_put_.default: _put}
