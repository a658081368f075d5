"""Numbers about rows that are kept on the device from one step to the next, and change in place.

In place, so that a CUDA graph counts each time it is replayed: a new tensor for every sum would belong to the
graph, which would add to the sum from before the capture, in memory that others use by then. For the same
reason what was taken is set to zero and not forgotten. The first call, which makes the tensor, must not be
the one that is captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_up", "keep_largest"]


def add_up(kept: Tensor | None, found: Tensor) -> Tensor:
    """The sum of all that was found, in the tensor that is kept."""
    return _kept(kept, found).add_(found)


def keep_largest(kept: Tensor | None, found: Tensor) -> Tensor:
    """The largest of all that was found, which is not negative, in the tensor that is kept."""
    kept = _kept(kept, found)
    return torch.maximum(kept, found, out=kept)


def _kept(kept: Tensor | None, found: Tensor) -> Tensor:
    if kept is not None:
        return kept
    with torch.inference_mode(False):  # a tensor of inference mode could not be changed outside of it
        return torch.zeros_like(found)
