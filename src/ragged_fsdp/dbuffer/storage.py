"""One allocation whose bytes come and go while the tensors over it stay valid.

Autograd may keep an unsharded parameter, or a view of it, from forward to backward. The tensor object
must survive the release of its memory in between, so memory is released by resizing the storage to
zero and brought back by resizing it again; every tensor over the storage then sees the new bytes.

Tensors are made with ``set_`` instead of ``view``: each gets a version counter of its own, so a write
through the flat tensor (the all-gather) does not look like an in-place change of the others.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ragged_fsdp.dtensor.geometry import contiguous_stride
from ragged_fsdp.dtensor.saving import claim
from ragged_fsdp.torch_internals import accelerator_get_stream

__all__ = ["FlatStorage", "debug_enabled", "stream_getter"]

_POISON_BYTE = 0xFF  # every float dtype reads a run of these as NaN


def debug_enabled() -> bool:
    """Whether ``RAGGED_FSDP_DEBUG`` asks for poisoned storage and order checks."""
    return os.environ.get("RAGGED_FSDP_DEBUG", "0") not in ("", "0")


@functools.cache
def stream_getter(device: torch.device) -> Callable[[], Any]:
    """A function: on which stream is work for ``device`` launched now? None where there are no streams."""
    if device.type in ("cpu", "meta"):
        return _no_stream
    if device.index is None:
        return torch.accelerator.current_stream
    # what that calls once it has an index: streams are asked for a dozen times per layer
    return functools.partial(accelerator_get_stream, device.index)


def _no_stream() -> None:
    return None


class FlatStorage:
    """``nbytes`` of memory on ``device``, released and materialised on the stream that uses it.

    ``stream`` is the stream of the last allocation: the caching allocator orders any reuse of the memory
    behind the work of that stream. Where memory is released on another stream, the stream of the allocation
    waits for it; uses on further streams must have been waited for by the stream that releases.
    """

    def __init__(
        self, nbytes: int, device: torch.device, *, pin_memory: bool = False, allocate: bool = True
    ) -> None:
        numel = nbytes if allocate or device.type == "meta" else 0
        self._describe(torch.empty(numel, dtype=torch.uint8, device=device, pin_memory=pin_memory))
        self.nbytes = nbytes
        self.is_materialized = self.untyped.nbytes() == nbytes
        claim(self.untyped)

    def _describe(self, tensor: torch.Tensor) -> None:
        """Be the memory of a tensor at the start of its storage, allocated on the current stream."""
        self.untyped, self.nbytes, self.device = tensor.untyped_storage(), tensor.nbytes, tensor.device
        self.is_materialized = True
        """Whether the bytes exist; noted, not asked for: it is read several times per layer."""
        self.is_borrowed = False
        self.debug = debug_enabled()
        self._current_stream = stream_getter(tensor.device)
        self.stream = self._current_stream()

    @classmethod
    def over(cls, tensor: torch.Tensor) -> FlatStorage:
        """The memory of a tensor that somebody else allocated: it is never resized, only let go."""
        if tensor.storage_offset() or not tensor.is_contiguous():
            raise ValueError(
                "expected a contiguous tensor at the start of its storage, "
                f"got strides {tensor.stride()} at offset {tensor.storage_offset()}."
            )
        made = cls.of(tensor)
        made.is_borrowed = True
        claim(made.untyped)
        return made

    @classmethod
    def of(cls, tensor: torch.Tensor) -> FlatStorage:
        """The memory of a tensor that fills its storage and was just allocated on the current stream."""
        made = object.__new__(cls)
        made._describe(tensor)
        return made

    def materialize(self) -> None:
        """Bring the bytes back, uninitialised, on the current stream; nothing to do if they exist."""
        if self.is_materialized:
            return
        self.stream = self._current_stream()
        self.untyped.resize_(self.nbytes)
        self.is_materialized = True
        if self.debug:
            self.poison()

    def release(self) -> None:
        """Give the bytes back to the allocator; tensors over them stay, and see those that come back."""
        if not self.is_materialized or self.is_borrowed or not self.nbytes:
            return
        if self.debug:
            self.poison()
        if self.stream is not None:
            self.leave()
        self.untyped.resize_(0)
        self.is_materialized = False

    def enter(self) -> None:
        """Let the current stream use the memory, behind all that have left it."""
        now = self._current_stream()
        if now != self.stream:
            now.wait_stream(self.stream)

    def leave(self) -> None:
        """The current stream has used the memory, whose reuse is ordered behind that of the allocation."""
        now = self._current_stream()
        if now != self.stream:
            self.stream.wait_stream(now)

    def poison(self) -> None:
        """Fill with NaN bytes: a read of memory that was released or never written becomes visible."""
        if self.device.type != "meta":
            self.tensor(0, (self.nbytes,), torch.uint8).fill_(_POISON_BYTE)

    def tensor(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at ``offset_bytes``, with a version counter of its own."""
        if offset_bytes % dtype.itemsize:
            raise ValueError(
                f"offset of {offset_bytes} bytes is not a multiple of {dtype}'s {dtype.itemsize}."
            )
        end_bytes = offset_bytes + math.prod(shape) * dtype.itemsize
        if end_bytes > self.nbytes:  # set_ would let the storage grow, away from under whoever uses it now
            raise ValueError(f"{tuple(shape)} of {dtype} would end at byte {end_bytes} of {self.nbytes}.")
        stride = contiguous_stride(shape)
        empty = torch.empty(0, dtype=dtype, device=self.device)
        had_bytes = self.untyped.nbytes()
        made = empty.set_(self.untyped, offset_bytes // dtype.itemsize, tuple(shape), stride)
        if had_bytes == 0:
            self.untyped.resize_(0)  # set_ has let it grow
        return made
