"""Device time of a call."""

from collections.abc import Callable

import torch

__all__ = ["device_ms"]


def device_ms(call: Callable[[], object]) -> float:
    """Milliseconds between two events around ``call`` on the current stream; returns when it is done."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
