"""Pickling, ``torch.save`` and ``deepcopy`` of ragged tensors that lie inside a larger buffer.

A DTensor reports its local tensor's storage offset as its own, and torch takes a tensor with a non-zero
data pointer for one that owns memory. Such a tensor is pickled and copied as its part alone, which also
keeps the rest of the buffer out of the file.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.geometry import is_ragged

__all__ = ["install"]


def install() -> None:
    """Replace ``DTensor.__reduce_ex__`` and ``DTensor.__deepcopy__``."""
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


def _lies_inside(tensor: DTensor) -> bool:
    local = tensor._local_tensor
    return is_ragged(tensor._spec) and local.untyped_storage().nbytes() != local.nbytes


def _compact(tensor: DTensor) -> DTensor:
    """The same tensor, attributes and gradient, around a copy of its part."""
    local = tensor._local_tensor.detach().clone()
    compact = DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)
    compact.__dict__.update(tensor.__dict__)
    if tensor.is_leaf:
        compact.grad = tensor.grad
    return compact
