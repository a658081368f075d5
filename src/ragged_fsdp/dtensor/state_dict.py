"""Loading full state dicts into ragged tensors (``set_model_state_dict`` and its relatives)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._state_dict_utils as state_dict_module
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.construct import wrap_local
from ragged_fsdp.dtensor.geometry import is_ragged, ragged_spec, replicated, with_placements
from ragged_fsdp.dtensor.redistribute import redistribute_local_tensor

__all__ = ["distribute_tensors", "stock_distribute_tensors"]

# Captured before patches.py replaces the name.
stock_distribute_tensors: Any = state_dict_module._distribute_tensors


def distribute_tensors(
    local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None
) -> None:
    """Replace each ``(local, full)`` pair by the local tensor holding its part of the full one."""
    others = []
    for key in keys:
        pair: Any = local_state_dict.get(key)
        ragged = isinstance(pair, tuple) and isinstance(pair[0], DTensor) and is_ragged(pair[0]._spec)
        if ragged:
            local, full = pair
            if full.shape != local.shape:  # on every rank: one that owns nothing of it would go on alone
                raise ValueError(
                    f"{key}: the state dict has shape {tuple(full.shape)}, expected {tuple(local.shape)}."
                )
            local_state_dict[key] = _filled(local, full)
        else:
            others.append(key)
    if others:
        stock_distribute_tensors(local_state_dict, others, device, pg)


def _filled(local: DTensor, full: torch.Tensor) -> DTensor:
    spec = local._spec
    whole = ragged_spec(spec.mesh, replicated(spec.mesh), spec.shape, full.dtype)
    target = with_placements(whole, spec.placements)
    piece = redistribute_local_tensor(full.contiguous(), whole, target)
    if local.is_meta:
        return wrap_local(piece, target)
    local._local_tensor.detach().copy_(piece)
    return local
