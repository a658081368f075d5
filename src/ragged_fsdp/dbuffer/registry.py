"""Which buffer a tensor lies in, without a reference that would keep either alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ragged_fsdp.dbuffer.buffer import DBuffer

__all__ = ["BufferLink", "attach", "attached_buffer", "buffer_of_storage", "register"]

# Keyed by the address of the storage object. A buffer keeps its storage alive, so an address in the
# table cannot be reused while its buffer exists; no tensor is referenced, not even weakly
# (torch.utils.swap_tensors refuses tensors that have weak references).
_BUFFERS: weakref.WeakValueDictionary[int, DBuffer] = weakref.WeakValueDictionary()


def register(buffer: DBuffer, storage: torch.UntypedStorage) -> None:
    """Note that ``storage`` holds ``buffer``."""
    _BUFFERS[storage._cdata] = buffer


def buffer_of_storage(storage: torch.UntypedStorage) -> DBuffer | None:
    """The buffer that ``storage`` holds, if any."""
    return _BUFFERS.get(storage._cdata)


class BufferLink:
    """What :func:`attach` puts on a tensor; copied or saved with the tensor's attributes it is empty.

    A strong reference keeps the buffer alive as long as the tensor; the copy of a tensor lies elsewhere.
    """

    __slots__ = ("buffer",)

    def __init__(self, buffer: DBuffer | weakref.ref[DBuffer]) -> None:
        self.buffer = buffer

    def __reduce__(self) -> tuple[type, tuple]:
        return set, ()  # a class that torch.load(weights_only=True) knows


def attach(tensor: torch.Tensor, link: BufferLink) -> None:
    """Let ``tensor`` know its buffer."""
    tensor._ragged_fsdp_buffer = link  # type: ignore[attr-defined]


def attached_buffer(tensor: torch.Tensor) -> DBuffer | None:
    """What :func:`attach` noted, if it still lives."""
    found = getattr(getattr(tensor, "_ragged_fsdp_buffer", None), "buffer", None)
    return found() if isinstance(found, weakref.ref) else found
