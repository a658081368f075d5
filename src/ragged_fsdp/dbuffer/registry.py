"""Which buffer a tensor lies in, without a reference that would keep either alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ragged_fsdp.dbuffer.buffer import DBuffer

__all__ = ["attach", "attached_buffer", "buffer_of_storage", "register"]

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


def attach(tensor: torch.Tensor, buffer: DBuffer | weakref.ref[DBuffer]) -> None:
    """Let ``tensor`` know its buffer, and keep it alive unless the reference is weak."""
    tensor._ragged_fsdp_buffer = buffer  # type: ignore[attr-defined]


def attached_buffer(tensor: torch.Tensor) -> DBuffer | None:
    """What :func:`attach` noted, if it still lives."""
    found = getattr(tensor, "_ragged_fsdp_buffer", None)
    return found() if isinstance(found, weakref.ref) else found
