"""The optimizer of a run, from torch or from :mod:`ragged_fsdp.optim`."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ragged_fsdp.trainer.config import OptimizerConfig
from ragged_fsdp.trainer.config_file import ConfigError

__all__ = ["LearningRate", "build_optimizer"]

_OURS = {"adam8bit": "Adam8bit", "muon": "Muon", "shampoo": "Shampoo"}


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not; muon takes the matrices inside the layers and AdamW the rest."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ConfigError("model: no parameter requires a gradient, so there is nothing to train")
    adam: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(_by_decay(named, config), **adam)
    return _ours(config, named, adam)


class LearningRate:
    """Sets the rate of every parameter group from the peaks the optimizer was built with."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]

    def set(self, factor: float) -> float:
        """Use ``factor`` times the peak of each group; returns the first group's rate."""
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        return self._peaks[0] * factor


def _by_decay(named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> list[dict[str, Any]]:
    named = list(named)
    matrices = [p for _, p in named if p.ndim >= 2]
    vectors = [p for _, p in named if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _ours(
    config: OptimizerConfig, named: list[tuple[str, nn.Parameter]], adam: dict[str, Any]
) -> torch.optim.Optimizer:
    raise NotImplementedError
