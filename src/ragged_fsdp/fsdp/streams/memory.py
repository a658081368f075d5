"""Memory of a step that stays with the runtime, so that nothing else cuts it up.

Two groups are gathered at a time and one gradient buffer is reduced, each the size of a layer. Given back
to the allocator, their blocks would be cut up for activations and gradients, and the next layer would
reserve new ones:

- :class:`GatherPool`, a memory pool of gathered layers of one size: two blocks serve all layers for the
whole run.
- :class:`Arena`, storage for gradient buffers that is lent to one buffer at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ragged_fsdp.dbuffer import FlatStorage

__all__ = ["Arena", "GatherPool", "arena_bytes", "pooled_bytes"]

_GROUPS_ALIVE = 2
_OWN_SEGMENT_BYTES = 10 << 20  # below this, torch's allocator lets blocks share a segment anyway
_COMMON_POOL = nullcontext()


def pooled_bytes(sizes: Sequence[int]) -> int:
    """The largest size that more groups have than are gathered at a time; 0 if none, or only small ones."""
    counts = Counter(sizes)
    largest = max((size for size, groups in counts.items() if groups > _GROUPS_ALIVE), default=0)
    return largest if largest >= _OWN_SEGMENT_BYTES else 0


class GatherPool:
    """Where the storage of gathered weights of ``nbytes`` is allocated.

    Groups of any other size (embedding and head, at the root) stay in the common pool: a block of a size that
    nobody else asks for would lie idle.
    """

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


def arena_bytes(needs: Sequence[int]) -> int:
    """The largest need that at least two groups have.

    A single larger group (embedding and head, at the root) reduces last, when the rest of the step's memory
    is free again: keeping a buffer of its size through the step would raise the peak.
    """
    largest = sorted(needs, reverse=True)
    return largest[1] if len(largest) > 1 else 0


class Arena:
    """A few storages of one size, lent to one gradient buffer at a time.

    A gradient buffer lives in backward only, where the peak of a step is, so keeping it costs nothing. It is
    allocated when a forward that will have a backward starts: one that came between the gradients of the
    first backward would divide the memory in which later gradients must find room. A forward without
    gradients (evaluation, generation) does not need it and frees it.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: list[FlatStorage] = []
        self._lent = 0

    def lease(self, nbytes: int, device: torch.device, limit: int) -> FlatStorage | None:
        """A storage of at least ``nbytes``; None if it is too large for the arena or ``limit`` are lent."""
        if nbytes > self.nbytes or self._lent >= limit:
            return None
        if not self._free or self._free[-1].untyped.nbytes() != self.nbytes:
            self.fill(device, self._lent + 1)
        self._lent += 1
        return self._free.pop()

    def fill(self, device: torch.device, limit: int) -> None:
        """Allocate what is missing of ``limit`` storages."""
        for storage in [s for s in self._free if s.nbytes != self.nbytes]:  # the arena was resized
            storage.release()
            self._free.remove(storage)
        missing = limit - self._lent - len(self._free)
        self._free += [FlatStorage(self.nbytes, device, allocate=False) for _ in range(missing)]
        for storage in self._free:
            storage.materialize()

    def give_back(self, storage: FlatStorage) -> None:
        """The buffer that was lent is not used by any stream any more."""
        if storage.debug:
            storage.poison()
        self._lent -= 1
        self._free.append(storage)

    def release(self) -> None:
        """Free what is not lent."""
        for storage in self._free:
            storage.release()
