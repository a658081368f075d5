"""Pickling, ``torch.save``, ``deepcopy`` and staging of DTensors that lie inside a larger buffer.

A DTensor reports its local tensor's storage offset as its own, and torch takes a tensor with a non-zero
data pointer for one that owns memory. Such a tensor is pickled and copied as its part alone, which also
keeps the rest of the buffer out of the file. An asynchronous checkpoint stages the buffer once, for all.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.geometry import is_ragged

__all__ = ["install"]


def install() -> None:
    """Replace ``DTensor.__reduce_ex__``, ``DTensor.__deepcopy__`` and what stages tensors on the host."""
    _patch_copies()
    _patch_staging()


def _patch_copies() -> None:
    stock_reduce, stock_deepcopy = DTensor.__reduce_ex__, DTensor.__deepcopy__

    def reduce_ex(self: DTensor, proto: Any) -> Any:
        return stock_reduce(_compact(self) if _lies_inside(self) else self, proto)

    def deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
        if not _lies_inside(self):
            return stock_deepcopy(self, memo)
        if id(self) not in memo:
            compact = _compact(self)
            # kept as long as the memo: it is keyed by id, and a freed object's id comes back
            memo.setdefault(id(memo), []).append(compact)
            memo[id(self)] = stock_deepcopy(compact, memo)
        return memo[id(self)]

    DTensor.__reduce_ex__ = reduce_ex  # type: ignore[assignment, method-assign]
    DTensor.__deepcopy__ = deepcopy  # type: ignore[assignment, method-assign]


def _patch_staging() -> None:
    stock = StateDictStager._offload_tensor

    def offload(self: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
        if not isinstance(x, DTensor) or not _lies_inside(x):
            return stock(self, x, memo, non_blocking=non_blocking)
        # the stager knows storages it has seen: the pieces of a buffer share one copy of it
        local = self.deepcopy_with_tensor_offload(x._local_tensor, memo, non_blocking=non_blocking)
        memo[id(x)] = staged = DTensor(local, x._spec, requires_grad=False)
        return staged

    StateDictStager._offload_tensor = offload  # type: ignore[method-assign]


def _lies_inside(tensor: DTensor) -> bool:
    """Whether torch would misread it; ragged tensors are always compacted, for the size of the file."""
    local = tensor._local_tensor
    if is_ragged(tensor._spec):
        return local.untyped_storage().nbytes() != local.nbytes
    return bool(local.storage_offset())


def _compact(tensor: DTensor) -> DTensor:
    """The same tensor, attributes and gradient, around a copy of its part."""
    local = tensor._local_tensor.detach().clone()
    compact = DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)
    compact.__dict__.update(tensor.__dict__)
    if tensor.is_leaf:
        compact.grad = tensor.grad
    return compact
