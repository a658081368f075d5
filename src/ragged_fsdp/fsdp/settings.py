"""The switches of a group that users change between steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["GroupSettings"]

_HERE = nullcontext()


@dataclass
class GroupSettings:
    """One per group; ``FSDPModule``'s setters write it, the group reads it when it acts."""

    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduce_unused: bool = False
    """Whether a trainable parameter without a gradient takes part with zeros and gets a gradient."""
    divide_factor: float | None = None
    """What the sum of gradients is divided by; None is the number of data-parallel ranks."""
    sum_only: bool = False
    """Whether collectives may only sum; scaling is then done before or after them."""
    unshard_async_op: bool = False
    keep_storage: bool = False
    """Whether a reshard leaves the gathered storage allocated, so that its address does not change."""
    max_grad_buffers: int = 1
    """Gradient buffers alive at once below this group's root; the largest setting counts."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
    custom_all_gather: Any = None
    custom_reduce_scatter: Any = None
    comm_memory: Any = None
    """A :class:`~ragged_fsdp.fsdp.comm_memory.ProcessGroupMemory` for what collectives read and write."""

    def allocating(self, device: torch.device) -> AbstractContextManager:
        """The context in which to allocate memory for collectives."""
        return _HERE if self.comm_memory is None else self.comm_memory.allocating(device)
