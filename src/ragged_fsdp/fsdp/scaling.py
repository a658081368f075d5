"""Where the division of a gradient's sum takes place: in the collective, before it, after it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["Scaling", "scaling"]


@dataclass(frozen=True)
class Scaling:
    """How a sum over the ranks becomes the gradient."""

    average: bool
    before: float | None = None
    after: float | None = None


@functools.cache
def scaling(dtype: torch.dtype, ranks: int, divide_factor: float | None, sum_only: bool) -> Scaling:
    """Divide in the collective if it can, else the small shard afterwards; half precision in two steps.

    fp16 sums overflow and pre-divided ones underflow: dividing by about the square root on either side of
    the reduction avoids both.
    """
    factor = float(ranks) if divide_factor is None else divide_factor
    safe_range = dtype in (torch.float32, torch.bfloat16)
    if safe_range and divide_factor is None and not sum_only:
        return Scaling(average=ranks > 1)
    if safe_range:
        return Scaling(average=False, after=factor)
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Scaling(average=False, before=before, after=factor / before)
