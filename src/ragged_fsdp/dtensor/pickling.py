"""Pickling, ``torch.save``, ``deepcopy`` and staging of DTensors that lie inside a larger buffer.

A DTensor reports its local tensor's storage offset as its own, and torch takes a tensor with a non-zero
data pointer for one that owns memory. Such a tensor is pickled and copied as its part alone, which also
keeps the rest of the buffer out of the file. An asynchronous checkpoint stages the buffer once, for all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.geometry import is_ragged
from ragged_fsdp.torch_internals import local_of, spec_of, stock

__all__ = ["claim", "deepcopy", "offload_tensor", "reduce_ex"]


# Captured before patches.py replaces the names.
_stock_reduce_ex: Any = stock("DTensor.__reduce_ex__")
_stock_deepcopy: Any = stock("DTensor.__deepcopy__")
_stock_offload: Any = stock("StateDictStager._offload_tensor")


def claim(storage: torch.UntypedStorage) -> None:
    """Note that ``storage`` is memory of ours, in which tensors with any placements lie side by side."""
    storage._of_ragged_fsdp = True  # type: ignore[attr-defined]


def reduce_ex(self: DTensor, proto: Any) -> Any:
    """``DTensor.__reduce_ex__``: pickling and ``torch.save``."""
    return _stock_reduce_ex(_compact(self) if _lies_inside(self) else self, proto)


def deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    """``DTensor.__deepcopy__``."""
    if not _lies_inside(self):
        return _stock_deepcopy(self, memo)
    if id(self) not in memo:
        compact = _compact(self)
        # kept as long as the memo: it is keyed by id, and a freed object's id comes back
        memo.setdefault(id(memo), []).append(compact)
        memo[id(self)] = _stock_deepcopy(compact, memo)
    return memo[id(self)]


def offload_tensor(self: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
    """``StateDictStager._offload_tensor``: a tensor on the host for an asynchronous checkpoint."""
    if not isinstance(x, DTensor) or not _lies_inside(x):
        return _stock_offload(self, x, memo, non_blocking=non_blocking)
    # the stager knows storages it has seen: the pieces of a buffer share one copy of it
    local = self.deepcopy_with_tensor_offload(local_of(x), memo, non_blocking=non_blocking)
    memo[id(x)] = staged = DTensor(local, spec_of(x), requires_grad=False)
    return staged


def _lies_inside(tensor: DTensor) -> bool:
    """Whether torch would misread it; ragged tensors are always compacted, for the size of the file."""
    local = local_of(tensor)
    if is_ragged(spec_of(tensor)):
        return local.untyped_storage().nbytes() != local.nbytes
    return bool(local.storage_offset()) and getattr(local.untyped_storage(), "_of_ragged_fsdp", False)


def _compact(tensor: DTensor) -> DTensor:
    """The same tensor, attributes and gradient, around a copy of its part."""
    local = local_of(tensor).detach().clone()
    compact = DTensor(local, spec_of(tensor), requires_grad=tensor.requires_grad)
    compact.__dict__.update(tensor.__dict__)
    if tensor.is_leaf:
        compact.grad = tensor.grad
    return compact
