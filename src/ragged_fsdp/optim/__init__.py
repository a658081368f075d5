"""Optimizers for ragged parameters; each name is loaded on first use.

::

    fused        FusedAdamW, FusedAdam, FusedSGD: neighbours in memory as one tensor, torch's kernels
    adam8bit     AdamW8bit, Adam8bit: moments in 8 bits
    shampoo      Shampoo, on blocks that stay on their rank
    muon         Muon, on whole matrices
    clip         clip_grad_norm_ for any mix of gradients
    offload      offload_state: the state of any optimizer in the host's memory

    exchange     each matrix to one rank and back: for Muon, or a matrix optimizer of your own
    blocks       which blocks a parameter has and where they lie, state per block: for adam8bit and shampoo
    base         options, state laid out like parameters, prepared steps: for all of them

What stands above may use what stands below the gap, never the other way round, and ``exchange`` knows no
optimizer (one exception: Shampoo's step length is that of Adam, whose arithmetic is in ``adam8bit``). Each of
``muon``, ``adam8bit`` and ``exchange`` says in its own description what its files are.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; keep in step with _HOMES
    from ragged_fsdp.optim.adam8bit import Adam8bit as Adam8bit
    from ragged_fsdp.optim.adam8bit import AdamW8bit as AdamW8bit
    from ragged_fsdp.optim.blocks import block_policy as block_policy
    from ragged_fsdp.optim.clip import clip_grad_norm_ as clip_grad_norm_
    from ragged_fsdp.optim.exchange import Flattened as Flattened
    from ragged_fsdp.optim.exchange import Fused as Fused
    from ragged_fsdp.optim.fused import FusedAdam as FusedAdam
    from ragged_fsdp.optim.fused import FusedAdamW as FusedAdamW
    from ragged_fsdp.optim.fused import FusedSGD as FusedSGD
    from ragged_fsdp.optim.muon import Muon as Muon
    from ragged_fsdp.optim.offload import offload_state as offload_state
    from ragged_fsdp.optim.shampoo import Shampoo as Shampoo

_HOMES = {
    "Adam8bit": "ragged_fsdp.optim.adam8bit",
    "AdamW8bit": "ragged_fsdp.optim.adam8bit",
    "Muon": "ragged_fsdp.optim.muon",
    "Shampoo": "ragged_fsdp.optim.shampoo",
    "Flattened": "ragged_fsdp.optim.exchange",
    "Fused": "ragged_fsdp.optim.exchange",
    "block_policy": "ragged_fsdp.optim.blocks",
    "FusedAdam": "ragged_fsdp.optim.fused",
    "FusedAdamW": "ragged_fsdp.optim.fused",
    "FusedSGD": "ragged_fsdp.optim.fused",
    "clip_grad_norm_": "ragged_fsdp.optim.clip",
    "offload_state": "ragged_fsdp.optim.offload",
}

__all__ = list(_HOMES)


if not TYPE_CHECKING:  # a checker that saw it would take every misspelt name for one of any type

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'ragged_fsdp.optim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_HOMES, *(name for name in globals() if name.startswith("__"))])
