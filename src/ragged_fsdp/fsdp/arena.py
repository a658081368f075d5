"""Storage for gradient buffers that stays allocated between training steps.

A gradient buffer is the largest block of a step and lives in backward only. Given back to the allocator, its
block is cut up for the activations of the next forward, and the next backward needs a new one: reserved
memory grows by a whole buffer. The peak of a step is in backward, where the buffer lives anyway, so keeping
it costs nothing there. It is allocated when a forward that will have a backward starts: one that came between
the gradients of the first backward would divide the memory in which later gradients must find room. A
forward without gradients (evaluation, generation) does not need it and frees it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragged_fsdp.dbuffer import FlatStorage

__all__ = ["Arena", "arena_bytes"]


def arena_bytes(needs: Sequence[int]) -> int:
    """The largest need that at least two groups have.

    A single larger group (embedding and head, at the root) reduces last, when the rest of the step's memory
    is free again: keeping a buffer of its size through the step would raise the peak.
    """
    largest = sorted(needs, reverse=True)
    return largest[1] if len(largest) > 1 else 0


class Arena:
    """A few storages of one size, lent to one gradient buffer at a time."""

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
