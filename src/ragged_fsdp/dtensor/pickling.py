"""Pickling and ``torch.save`` of ragged tensors whose local part lies inside a larger buffer.

A DTensor reports its local tensor's storage offset as its own, and torch takes a tensor with a non-zero
data pointer for one that owns memory. Such a tensor is pickled as a copy of its part alone, which also
keeps the rest of the group's buffer out of the file.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.geometry import is_ragged

__all__ = ["install"]


def install() -> None:
    """Replace ``DTensor.__reduce_ex__`` once."""
    if getattr(DTensor.__reduce_ex__, "is_ragged_patch", False):
        return
    stock = DTensor.__reduce_ex__

    def reduce_ex(self: DTensor, protocol: Any) -> Any:
        local = self._local_tensor
        if is_ragged(self) and local.storage_offset():
            copy = DTensor(local.detach().clone(), self._spec, requires_grad=self.requires_grad)
            return stock(copy, protocol)
        return stock(self, protocol)

    reduce_ex.is_ragged_patch = True  # type: ignore[attr-defined]
    DTensor.__reduce_ex__ = reduce_ex  # type: ignore[method-assign]
