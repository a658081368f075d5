"""Optimizers for ragged parameters; each name is loaded on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; keep in step with _HOMES
    from ragged_fsdp.optim.adam8bit import Adam8bit as Adam8bit
    from ragged_fsdp.optim.adam8bit import AdamW8bit as AdamW8bit
    from ragged_fsdp.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from ragged_fsdp.optim.fused_adamw import FusedAdam as FusedAdam
    from ragged_fsdp.optim.fused_adamw import FusedAdamW as FusedAdamW
    from ragged_fsdp.optim.fused_adamw import FusedSGD as FusedSGD
    from ragged_fsdp.optim.matrices import Flattened as Flattened
    from ragged_fsdp.optim.matrices import Fused as Fused
    from ragged_fsdp.optim.muon import Muon as Muon
    from ragged_fsdp.optim.quant_grid import block_policy as block_policy
    from ragged_fsdp.optim.shampoo import Shampoo as Shampoo

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


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
