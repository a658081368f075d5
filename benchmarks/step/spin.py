"""A kernel that holds its stream for a given time and computes nothing.

It watches ``%globaltimer``, so its length does not change with the clock of the multiprocessors,
which drops under load; one thread block of one warp leaves the rest of the device to the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

__all__ = ["spin_error", "spin_ns"]


@triton.jit(do_not_specialize=["duration_ns"])  # a new length must not compile a new kernel
def _spin(out_ptr, duration_ns):
    start = globaltimer()
    now = start
    while now - start < duration_ns:
        now = globaltimer()
    tl.store(out_ptr, now)


_SINK: list[torch.Tensor] = []


def spin_ns(duration_ns: int) -> None:
    """Hold the current stream for ``duration_ns``."""
    if not _SINK:
        _SINK.append(torch.empty(1, dtype=torch.int64, device="cuda"))
    _spin[(1,)](_SINK[0], duration_ns, num_warps=1)


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
