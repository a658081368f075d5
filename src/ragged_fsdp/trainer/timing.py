"""Where the time of a step goes, and what the device could do at best."""

import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["StepClock", "device_name", "memory_bytes", "peak_flops"]

# Dense bf16 peaks from the vendors' data sheets, by the start of the device's name.
_PEAK_TFLOPS = {
    "NVIDIA A100": 312.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA B200": 2250.0,
    "NVIDIA L40S": 362.0,
    "AMD Instinct MI300X": 1307.0,
}


def peak_flops(device: torch.device, given_tflops: float) -> float | None:
    """FLOP/s of the device at best: as given, or as known for it, or None."""
    if given_tflops:
        return given_tflops * 1e12
    if device.type == "cuda":
        name = device_name(device)
        for start in sorted(_PEAK_TFLOPS, key=len, reverse=True):
            if name.startswith(start):
                return _PEAK_TFLOPS[start] * 1e12
    return None


def device_name(device: torch.device) -> str:
    """What the numbers of a run were measured on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {os.cpu_count()} cores"


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Memory of this rank: its peak, and what it holds now.

    On a GPU the allocator's peaks since this was last asked; on a CPU the peak of the process.
    """
    if device.type == "cuda":
        found = {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "held": torch.cuda.memory_allocated(device),
        }
        torch.cuda.reset_peak_memory_stats(device)
        return found
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    try:
        held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        held = peak
    return {"allocated": max(peak, held), "held": held}  # the kernel may count the peak late


class StepClock:
    """Seconds per phase of a step. On a GPU phases are marked by events, read when asked for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, object, object]] = []
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside counts as ``name``; a phase may come several times in a step."""
        start = self._mark()
        yield
        self._spans.append((name, start, self._mark()))

    def lap(self) -> tuple[float, list[tuple[str, object, object]]]:
        """End the step: wall seconds since the last lap, and the marks for :func:`seconds_by_phase`."""
        now = time.perf_counter()
        wall, self._started = now - self._started, now
        spans, self._spans = self._spans, []
        return wall, spans

    def skip(self) -> None:
        """Forget the time since the last lap: what was done there is not part of a step."""
        self._started = time.perf_counter()
        self._spans = []

    def seconds_by_phase(self, spans: list[tuple[str, object, object]]) -> dict[str, float]:
        """The marks of a lap as seconds; on a GPU the work they mark must have ended."""
        seconds: dict[str, float] = {}
        for name, start, end in spans:
            took = start.elapsed_time(end) / 1e3 if self._cuda else end - start  # type: ignore[operator]
            seconds[name] = round(seconds.get(name, 0.0) + took, 6)
        return seconds

    def _mark(self) -> object:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
