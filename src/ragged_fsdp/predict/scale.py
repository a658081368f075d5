"""What only many GPUs have: somebody is always the slowest, and something always fails.

Both are simple models with stated parameters, not measurements of a cluster.

*Slowest of N.* If the computation of one GPU varies by a standard deviation of ``jitter``, every collective
waits for the slowest of N, which is about ``jitter * sqrt(2 ln N)`` behind the mean.

*Failures.* A GPU fails, with all that belongs to it, once in ``mtbf_hours``; a job of N GPUs N times as
often. A failure costs half a checkpoint interval of work and ``restart_s``. The interval is Young's
``sqrt(2 * save_s * mtbf of the job)`` unless it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Goodput", "Scale", "goodput", "slowest"]


@dataclass(frozen=True)
class Scale:
    """Parameters of the models."""

    jitter: float = 0.005
    """Standard deviation of a GPU's computation, as a share."""
    mtbf_hours: float = 50_700.0
    """GPU-hours between failures: 419 in 54 days on 16,384 GPUs (Llama 3, arXiv:2407.21783)."""
    restart_s: float = 600.0
    save_s: float = 30.0
    """Seconds for which a checkpoint stops training."""
    checkpoint_s: float = 0.0
    """Between checkpoints; 0: Young's interval."""

    def __post_init__(self) -> None:
        for name in ("jitter", "restart_s", "save_s", "checkpoint_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if self.mtbf_hours <= 0:
            raise ValueError(f"mtbf_hours: expected above 0, got {self.mtbf_hours}")


@dataclass(frozen=True)
class Goodput:
    """The share of time that moves training forward."""

    share: float
    hours_between_failures: float
    checkpoint_s: float


def slowest(gpus: int, scale: Scale) -> float:
    """How much longer the slowest of ``gpus`` computes than one of them."""
    return 1 + scale.jitter * math.sqrt(2 * math.log(gpus)) if gpus > 1 else 1.0


def goodput(step_s: float, gpus: int, scale: Scale) -> Goodput:
    """The share that remains after checkpoints and failures; 0 where work is lost faster than it is done."""
    between = scale.mtbf_hours * 3600 / gpus
    interval = scale.checkpoint_s or max(step_s, math.sqrt(2 * scale.save_s * between))
    lost = scale.save_s / (interval + scale.save_s) + (interval / 2 + scale.restart_s) / between
    return Goodput(max(0.0, 1 - lost), between / 3600, interval)
