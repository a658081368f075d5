"""Optimizers for ragged parameters; each name is loaded on first use."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Adam8bit": "ragged_fsdp.optim.adam8bit",
    "AdamW8bit": "ragged_fsdp.optim.adam8bit",
    "Muon": "ragged_fsdp.optim.muon",
    "Shampoo": "ragged_fsdp.optim.shampoo",
    "Flattened": "ragged_fsdp.optim.matrices",
    "Fused": "ragged_fsdp.optim.matrices",
    "block_policy": "ragged_fsdp.optim.quant_grid",
    "FusedAdam": "ragged_fsdp.optim.fused_adamw",
    "FusedAdamW": "ragged_fsdp.optim.fused_adamw",
    "FusedSGD": "ragged_fsdp.optim.fused_adamw",
    "clip_grad_norm_": "ragged_fsdp.optim.clip",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ragged_fsdp.optim' has no attribute {name!r}")
