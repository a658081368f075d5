"""The kernels of the modelled wire: hold a stream for a time, and copy with few multiprocessors.

Time is read from ``%globaltimer``, so its length does not change with the clock of the multiprocessors,
which drops under load.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

__all__ = ["CHANNELS", "copy_by_channels", "hold_since", "spin_error", "spin_ns", "stamp"]

CHANNELS = 32
"""Thread blocks of a copy: what NCCL takes on such a device, leaving the others to compute."""
_BLOCK = 16384
_WARPS = 16
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _wire_stamp(time_ptr):
    tl.store(time_ptr, globaltimer())


@triton.jit(do_not_specialize=["duration_ns"])  # a new length must not compile a new kernel
def _wire_spin(time_ptr, duration_ns):
    start = tl.load(time_ptr)
    now = globaltimer()
    while now - start < duration_ns:
        now = globaltimer()


@triton.jit(do_not_specialize=["numel"])
def _wire_copy(target_ptr, source_ptr, numel, BLOCK: tl.constexpr):
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start + BLOCK <= numel:  # whole blocks need no mask, so their loads are wide
        offsets = start + tl.arange(0, BLOCK)
        tl.store(target_ptr + offsets, tl.load(source_ptr + offsets))
        start += step
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < numel
    tl.store(target_ptr + offsets, tl.load(source_ptr + offsets, mask=inside), mask=inside)


_TIME: list[torch.Tensor] = []


def stamp() -> None:
    """Note on the device when the current stream comes here."""
    if not _TIME:
        _TIME.append(torch.zeros(1, dtype=torch.int64, device="cuda"))
    _wire_stamp[(1,)](_TIME[0], num_warps=1)


def hold_since(duration_ns: int) -> None:
    """Hold the current stream until ``duration_ns`` after the last stamp."""
    _wire_spin[(1,)](_TIME[0], duration_ns, num_warps=1)


def spin_ns(duration_ns: int) -> None:
    """Hold the current stream for ``duration_ns``."""
    stamp()
    hold_since(duration_ns)


def copy_by_channels(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy flat ``source`` to flat ``target`` (same size, not overlapping) with :data:`CHANNELS` blocks."""
    nbytes = source.nbytes
    if not nbytes:
        return
    common = nbytes | source.data_ptr() | target.data_ptr()
    width = next(w for w in _INTEGERS if common % w == 0)
    a, b = (t.view(torch.uint8).view(_INTEGERS[width]) for t in (target, source))
    _wire_copy[(CHANNELS,)](a, b, nbytes // width, BLOCK=_BLOCK, num_warps=_WARPS)


def spin_error(duration_ns: int = 5_000_000) -> float:
    """Relative error of a spin as CUDA events see it: the best of a few, the first ones warming up."""
    errors = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        spin_ns(duration_ns)
        end.record()
        end.synchronize()
        errors.append(abs(start.elapsed_time(end) * 1e6 / duration_ns - 1))
    return min(errors)
