"""The optimizer of a run, from torch or from :mod:`ragged_fsdp.optim`, and the layout it asks for."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ragged_fsdp.experts import expert_modules
from ragged_fsdp.experts.layers import expert_parameters
from ragged_fsdp.policy import Granularity
from ragged_fsdp.trainer.config import OptimizerConfig
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.weights.names import plain_name

__all__ = ["GranularityPolicy", "LearningRate", "build_optimizer", "granularity_for"]

_SHAMPOO_BLOCK = (128, 128)

GranularityPolicy = Callable[[str, nn.Parameter], Granularity | None]


def granularity_for(config: OptimizerConfig, model: nn.Module) -> GranularityPolicy | None:
    """What must stay together on a rank for this optimizer; None if nothing must."""
    if config.optimizer not in ("adam8bit", "shampoo"):
        return None
    from ragged_fsdp.optim import block_policy

    blocks = block_policy(_SHAMPOO_BLOCK) if config.optimizer == "shampoo" else block_policy()
    vectors = _expert_vectors(model)
    return lambda name, parameter: None if parameter in vectors else blocks(name, parameter)


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not, also not those of each expert in one tensor; muon takes the matrices
    inside the layers and AdamW the rest."""
    optimizer = _built(config, model)
    if config.offload_optimizer:
        from ragged_fsdp.optim import offload_state

        offload_state(optimizer)
    return optimizer


def _built(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    named = [(plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ConfigError("model: no parameter requires a gradient, so there is nothing to train")
    betas = (config.beta1, config.beta2)
    if config.optimizer == "muon":
        from ragged_fsdp.optim import Muon

        return Muon(
            named,
            lr=config.muon_lr,
            weight_decay=config.weight_decay,
            adamw_lr=config.lr,
            adamw_betas=betas,
            adamw_eps=config.eps,
            adamw_weight_decay=0.0,
            ns_dtype=_muon_dtype(config, named[0][1]),
        )
    vectors = _expert_vectors(model)
    groups = _by_decay(named, vectors, config.weight_decay)
    adam: dict[str, Any] = {"lr": config.lr, "betas": betas, "eps": config.eps}
    from ragged_fsdp.optim import AdamW8bit, FusedAdamW, Shampoo

    if config.optimizer == "adamw":
        return FusedAdamW(groups, **adam)
    groups = [part for group in groups for part in _by_tile(group)]
    adam["exclude"] = [name for name, p in named if p in vectors]
    try:
        if config.optimizer == "adam8bit":
            return AdamW8bit(groups, **adam)
        return Shampoo(groups, **adam, block_shape=_SHAMPOO_BLOCK)
    except ValueError as error:  # a layout that cuts its blocks: by a granularity rule, or by tp
        raise ConfigError(f"optimizer = {config.optimizer}: {error}") from error


def _expert_vectors(model: nn.Module) -> set[nn.Parameter]:
    """Parameters with a vector for each expert, such as biases: they are no matrices.

    A block over several of them would be cut where expert parallelism spreads the experts.
    """
    found = (p for module in expert_modules(model).values() for p in expert_parameters(module).values())
    return {p for p in found if p.ndim == 2}


def _muon_dtype(config: OptimizerConfig, weight: nn.Parameter) -> torch.dtype:
    full = torch.promote_types(weight.dtype, torch.float32)
    auto = torch.bfloat16 if weight.is_cuda and full == torch.float32 else full
    return {"auto": auto, "bf16": torch.bfloat16, "fp32": torch.float32}[config.muon_dtype]


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


def _by_tile(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The group apart by the tiles in which its parameters are stored, which are then their blocks."""
    apart: dict[Any, list[Any]] = {}
    for name, param in group["params"]:
        placements = getattr(param, "placements", ())
        tile = next((p.tile for p in placements if getattr(p, "tile", None)), None)
        apart.setdefault(tile, []).append((name, param))
    return [
        {**group, "params": params, **({} if tile is None else {"block_shape": tile})}
        for tile, params in apart.items()
    ]


def _by_decay(
    named: list[tuple[str, nn.Parameter]], expert_vectors: set[nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    matrices = [(name, p) for name, p in named if p.ndim >= 2 and p not in expert_vectors]
    vectors = [(name, p) for name, p in named if p.ndim < 2 or p in expert_vectors]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
