# mypy: allow-untyped-defs
"""What limits the products of a step on this machine's GPU: multiprocessors that are taken, and power.

Both are ratios of two times of the same product, so that neither the clock of the day nor the size of the
GPU matters. Measured by ``ragged-fsdp calibrate``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

__all__ = ["boost", "grouped_beside", "hold_multiprocessors", "room_to_hold"]

_EXPERTS, _ROWS, _WIDTH = 64, 512, 2048
_PRODUCTS = 10
_HELD_WARPS = 16
_HELD_NUMEL = 16384
"""32 registers of each thread. The block holds three times as many and leaves few of the 65,536 of a
multiprocessor: as beside a block of a collective, there is no room for one of a product."""
_STARTS_SECONDS = 2e-3
"""In this time a kernel that was launched on an idle device has begun."""
_REPEATS = 5
_IDLE_SECONDS = 1.0
"""So long a GPU has to idle to have its highest clock again."""
_BURST = 3
"""Products of some milliseconds together: the clock does not fall so soon."""


@triton.jit(do_not_specialize=["nanoseconds"])
def _hold(kept_ptr, nanoseconds, NUMEL: tl.constexpr):
    # volatile: else the compiler would load only when the time is over, and hold nothing until then
    place = kept_ptr + tl.arange(0, NUMEL)
    a = tl.load(place, volatile=True)
    b = tl.load(place + NUMEL, volatile=True)
    c = tl.load(place + 2 * NUMEL, volatile=True)
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()
    tl.store(place, a)
    tl.store(place + NUMEL, b)
    tl.store(place + 2 * NUMEL, c)


def room_to_hold(device: torch.device) -> Tensor:
    """What the thread blocks of :func:`hold_multiprocessors` keep in their registers."""
    return torch.zeros(3 * _HELD_NUMEL, dtype=torch.int32, device=device)


def hold_multiprocessors(blocks: int, seconds: float, kept: Tensor) -> None:
    """Launch, on the current stream, thread blocks that do nothing for so long, one to a multiprocessor.

    ``kept`` is a :func:`room_to_hold`.
    """
    _hold[(blocks,)](kept, int(seconds * 1e9), _HELD_NUMEL, num_warps=_HELD_WARPS)


def grouped_beside(device: torch.device) -> float:
    """Times as long as alone that grouped products take while one multiprocessor is held."""
    kinds: Any = {"device": device, "dtype": torch.bfloat16}
    rows, weights = (
        torch.randn(_EXPERTS * _ROWS, _WIDTH, **kinds),
        torch.randn(_EXPERTS, _WIDTH, _WIDTH, **kinds),
    )
    ends = torch.arange(_ROWS, _EXPERTS * _ROWS + 1, _ROWS, dtype=torch.int32, device=device)

    def products() -> None:
        for _ in range(_PRODUCTS):
            F.grouped_mm(rows, weights, offs=ends)

    kept, beside = room_to_hold(device), torch.cuda.Stream(device)
    torch.cuda.synchronize()  # the other stream reads what this one zeroes
    with torch.cuda.stream(beside):
        hold_multiprocessors(1, 1e-6, kept)  # compiles it
    products()
    alone_s = statistics.median(_timed(products) for _ in range(_REPEATS))
    found = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize()
        held = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(beside):
            hold_multiprocessors(1, 10 * alone_s, kept)
            held.record()
        time.sleep(_STARTS_SECONDS)
        found.append(_timed(products, within=held))
    return round(max(1.0, statistics.median(found) / alone_s), 2)


def boost(device: torch.device, sustained_s: float, product: Callable[[], Any]) -> float:
    """The highest clock over that under load, of which ``sustained_s`` is the time of one ``product``."""
    product()
    found = []
    for _ in range(_REPEATS):
        torch.cuda.synchronize(device)
        time.sleep(_IDLE_SECONDS)
        product()  # wakes it up
        found.append(_timed(lambda: [product() for _ in range(_BURST)]) / _BURST)
    return round(max(1.0, sustained_s / min(found)), 3)


def _timed(work: Callable[[], Any], within: torch.cuda.Event | None = None) -> float:
    """Device seconds of ``work``; ``ValueError`` unless it ended before the event ``within``."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    if within is not None and end.elapsed_time(within) <= 0:
        raise ValueError(
            "calibrate: the kernel that holds a multiprocessor ended before the products beside it."
        )
    return begin.elapsed_time(end) / 1e3
