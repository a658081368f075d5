"""The learning rate as a function of the step."""

import math

from ragged_fsdp.trainer.config import OptimizerConfig

__all__ = ["lr_factor"]


def lr_factor(step: int, steps: int, config: OptimizerConfig) -> float:
    """Share of the peak learning rate used in ``step`` (from 0) of ``steps``."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    progress = (step - config.warmup) / max(1, steps - config.warmup)  # 0 to 1
    low = config.min_lr
    if config.schedule == "cosine":
        return low + (1 - low) * (1 + math.cos(math.pi * min(1.0, progress))) / 2
    if config.schedule == "linear":
        return 1 - (1 - low) * min(1.0, progress)
    if config.schedule == "wsd":  # warmup, stable, decay
        into_decay = (progress - (1 - config.decay)) / config.decay if config.decay else 0.0
        return 1 - (1 - low) * min(1.0, max(0.0, into_decay))
    return 1.0
