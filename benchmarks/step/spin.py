"""The kernels of the modelled wire: hold a stream for a time, and copy with few multiprocessors.

Time is read from ``%globaltimer``, so its length does not change with the clock of the multiprocessors,
which drops under load.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

__all__ = [
    "CHANNELS",
    "hold_since",
    "repeat_by_channels",
    "spin_error",
    "spin_ns",
    "stamp",
]

CHANNELS = 32
"""Thread blocks of a copy: what NCCL takes on such a device, leaving the others to compute."""
_BLOCK = 16384
_WARPS = 16
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _wire_stamp(time_ptr):
    tl.store(time_ptr, globaltimer())


@triton.jit
def _hold(start, duration_ns):
    now = globaltimer()
    while now - start < duration_ns:
        now = globaltimer()


@triton.jit(do_not_specialize=["duration_ns"])  # a new length must not compile a new kernel
def _wire_spin(time_ptr, duration_ns, SINCE_STAMP: tl.constexpr):
    start = globaltimer()
    if SINCE_STAMP:
        start = tl.load(time_ptr)
    _hold(start, duration_ns)


@triton.jit(do_not_specialize=["part_numel", "parts", "skipped", "duration_ns"])
def _wire_repeat(
    target_ptr,
    source_ptr,
    part_numel,
    parts,
    skipped,
    duration_ns,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy the source over each of ``parts`` consecutive parts of the target, but for part ``skipped``.

    The first thread block then stays until ``duration_ns`` after its start.
    """
    begin = globaltimer()
    blocks = tl.cdiv(part_numel, BLOCK).to(tl.int64)
    work = tl.program_id(0).to(tl.int64)
    while work < blocks * parts:
        part, start = work // blocks, work % blocks * BLOCK
        if part != skipped:
            offsets = start + tl.arange(0, BLOCK)
            target = target_ptr + tl.multiple_of(part * part_numel, ALIGN) + offsets
            if start + BLOCK <= part_numel:  # whole blocks need no mask, so their loads are wide
                tl.store(target, tl.load(source_ptr + offsets))
            else:
                inside = offsets < part_numel
                tl.store(target, tl.load(source_ptr + offsets, mask=inside), mask=inside)
        work += tl.num_programs(0)
    if tl.program_id(0) == 0:
        _hold(begin, duration_ns)


_TIMES: dict[int, torch.Tensor] = {}
"""A time per slot: two streams that shared one would hold each other's transfers too short or too long."""


def stamp(slot: int) -> None:
    """Note on the device when the current stream comes here; each stream needs a slot of its own."""
    if slot not in _TIMES:
        _TIMES[slot] = torch.zeros(1, dtype=torch.int64, device="cuda")
    _wire_stamp[(1,)](_TIMES[slot], num_warps=1)


def hold_since(slot: int, duration_ns: int) -> None:
    """Hold the current stream until ``duration_ns`` after the last stamp of its slot."""
    _wire_spin[(1,)](_TIMES[slot], duration_ns, SINCE_STAMP=True, num_warps=1)


def spin_ns(duration_ns: int) -> None:
    """Hold the current stream for ``duration_ns``."""
    _wire_spin[(1,)](None, duration_ns, SINCE_STAMP=False, num_warps=1)


def repeat_by_channels(
    target: torch.Tensor, source: torch.Tensor, parts: int = 1, skipped: int = -1, hold_ns: int = 0
) -> None:
    """Copy flat ``source`` over each part of flat ``target`` with :data:`CHANNELS` thread blocks.

    It is one kernel, as a collective is one: a second one would have to wait again until computation leaves
    multiprocessors free. Part ``skipped`` is left as it is, since the source may be that part itself. The
    stream is held for ``hold_ns`` at least.
    """
    nbytes = source.nbytes
    if not nbytes:
        if hold_ns:
            spin_ns(hold_ns)
        return
    common = nbytes | source.data_ptr() | target.data_ptr()
    width = next(w for w in _INTEGERS if common % w == 0)
    align = 2 if common % (2 * width) == 0 else 1
    a, b = (t.view(torch.uint8).view(_INTEGERS[width]) for t in (target, source))
    numel = nbytes // width
    _wire_repeat[(CHANNELS,)](
        a, b, numel, parts, skipped, hold_ns, BLOCK=_BLOCK, ALIGN=align, num_warps=_WARPS
    )


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
