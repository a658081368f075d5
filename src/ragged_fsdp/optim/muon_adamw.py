"""The AdamW that Muon runs for parameters that are not hidden matrices: torch's, on local tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ragged_fsdp.optim.state import local_of

__all__ = ["adamw_step"]


def adamw_step(group: dict[str, Any], state: dict[Tensor, dict[str, Any]]) -> None:
    """One AdamW step of a param group, on local tensors (each element by itself, so any sharding will do)."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in group["params"]:
        if parameter.grad is not None:
            _init_state(parameter, state[parameter])
            by_device.setdefault(local_of(parameter).device, []).append(parameter)
    for device, parameters in by_device.items():
        # A rank without elements of a parameter counts its steps too: `step` is saved from any rank.
        empty = [p for p in parameters if not local_of(p).numel()]
        for parameter in empty:
            state[parameter]["step"] += 1
        held = [p for p in parameters if local_of(p).numel()]
        if held:
            _update(held, group, state, fused=device.type == "cuda")


def _init_state(parameter: Tensor, state: dict[str, Any]) -> None:
    local = local_of(parameter)
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    elif state["step"].device != local.device:
        state["step"] = state["step"].to(local.device)  # loaded from a checkpoint made elsewhere


def _update(
    parameters: list[Tensor], group: dict[str, Any], state: dict[Tensor, dict[str, Any]], *, fused: bool
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [local_of(p) for p in parameters],
        [local_of(p.grad) for p in parameters if p.grad is not None],
        [local_of(state[p]["exp_avg"]) for p in parameters],
        [local_of(state[p]["exp_avg_sq"]) for p in parameters],
        [],
        [state[p]["step"] for p in parameters],
        foreach=not fused,
        fused=fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=float(group["lr"]),
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
