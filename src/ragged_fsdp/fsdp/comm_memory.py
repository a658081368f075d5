"""Where the memory of collectives comes from, if not from the device's common pool.

NCCL can move registered memory faster: memory from ``ncclMemAlloc``, which a process group hands out through
an allocator of its own. Gathered weights are freed and brought back by resizing their storage, so it is the
allocator below ``resize_`` that is exchanged: within :meth:`ProcessGroupMemory.allocating` this thread's
allocations come from a memory pool over the process group's allocator.

A communication object of the user (``set_custom_all_gather``, ``set_custom_reduce_scatter``) may have an
``allocate`` of its own, which returns a tensor. A gradient buffer lies in that tensor. Gathered weights
cannot, since their storage must be the same in forward and backward; they are copied out of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ProcessGroupMemory", "allocator_of", "process_group_memory"]

_POOLS: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroupMemory] = weakref.WeakKeyDictionary()


class ProcessGroupMemory:
    """A memory pool over the allocator of a process group's backend."""

    def __init__(self, backend: Any) -> None:
        self._pool = torch.cuda.MemPool(backend.mem_allocator)

    def allocating(self, device: torch.device) -> AbstractContextManager:
        """Within it, this thread's allocations on ``device`` come from the pool."""
        return torch.cuda.use_mem_pool(self._pool, device)


def process_group_memory(pg: dist.ProcessGroup, device: torch.device) -> ProcessGroupMemory | None:
    """The pool of ``pg``, one for all its groups; None if its backend has no allocator for ``device``."""
    backend = pg._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    if pg not in _POOLS:
        _POOLS[pg] = ProcessGroupMemory(backend)
    return _POOLS[pg]


def allocator_of(comm: Any) -> Callable[..., torch.Tensor] | None:
    """``comm.allocate(size, *, dtype, device)``, if there is a communication object and it has one."""
    return getattr(comm, "allocate", None)
