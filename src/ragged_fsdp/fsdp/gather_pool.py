"""A memory pool of its own for gathered weights.

Two groups are gathered at a time, and the layers of a model have one size. If their blocks came from the
common pool, autograd's gradients would cut a released block up and the next gather would reserve a new
one. In a pool of their own two blocks serve all layers for the whole run. Groups of any other size (embedding
and head, at the root) stay in the common pool: a block of a size nobody else asks for would lie idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["GatherPool", "pooled_bytes"]

_GROUPS_ALIVE = 2
_OWN_SEGMENT_BYTES = 10 << 20  # below this, torch's allocator lets blocks share a segment anyway
_COMMON_POOL = nullcontext()


def pooled_bytes(sizes: Sequence[int]) -> int:
    """The largest size that more groups have than are gathered at a time; 0 if none, or only small ones."""
    counts = Counter(sizes)
    largest = max((size for size, groups in counts.items() if groups > _GROUPS_ALIVE), default=0)
    return largest if largest >= _OWN_SEGMENT_BYTES else 0


class GatherPool:
    """Where the storage of gathered weights of ``nbytes`` is allocated."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._pool: Any = None

    def allocating(self, device: torch.device) -> AbstractContextManager:
        """Within it allocations of this thread on ``device`` come from the pool."""
        # a graph has a pool of its own, which lives as long as it can be replayed
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return _COMMON_POOL
        if self._pool is None:
            self._pool = torch.cuda.MemPool(use_on_oom=True)
        return torch.cuda.use_mem_pool(self._pool, device)
