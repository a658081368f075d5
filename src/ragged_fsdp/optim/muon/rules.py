"""Which parameters Muon orthogonalizes, how large its steps are, and the AdamW of all other parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ragged_fsdp.optim.state import local_part

__all__ = [
    "ADJUST_LR",
    "HEAD_OUTSIDE_LAYERS",
    "NEVER_HIDDEN",
    "adamw_step",
    "is_hidden_matrix",
    "scale_function",
]

NEVER_HIDDEN = re.compile(r"(^|[._])(bias|\w*norm\w*|ln(_\w+|\d+)?|\w*embed\w*|wte|wpe|lm_head)([._]|$)")
"""Names, or parts of names between dots and underscores, of embeddings, norms, biases and heads."""

HEAD_OUTSIDE_LAYERS = re.compile(r"(^|[._])(head|output|score|classifier|shared)([._]|$)")
"""Names of heads and of a shared embedding, unless in a numbered layer: ``layers.3.attention.output`` is a
hidden matrix."""

_NUMBERED = re.compile(r"(^|\.)\d+(\.|$)")


def is_hidden_matrix(name: str | None, parameter: Tensor) -> bool:
    """The default rule: two or three dims, both sides of the matrix longer than 1, and no telling name.

    Names matter: an embedding looks like any other matrix, and the stacked biases of experts have two
    dims. Without a name only the shape decides.
    """
    if parameter.ndim not in (2, 3) or min(parameter.shape[-2:]) < 2:
        return False
    if name is None:
        return True
    if NEVER_HIDDEN.search(name):
        return False
    return not HEAD_OUTSIDE_LAYERS.search(name) or _NUMBERED.search(name) is not None


ADJUST_LR: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
    "none": lambda rows, columns: 1.0,
}
"""Factor on the learning rate from (fan out, fan in): Keller Jordan's; one that gives updates the RMS that
AdamW's have (Moonshot); the one that keeps the spectral norm of the change of the outputs; or none."""


def scale_function(adjust_lr_fn: str | None, transposed: bool) -> Callable[[int, int], float]:
    """The factor as a function of the rows and columns of a matrix."""
    name = "original" if adjust_lr_fn is None else adjust_lr_fn
    if name not in ADJUST_LR:
        raise ValueError(f"adjust_lr_fn must be one of {sorted(ADJUST_LR)} or None, got {adjust_lr_fn!r}.")
    by_fans = ADJUST_LR[name]
    return (lambda rows, columns: by_fans(columns, rows)) if transposed else by_fans


def adamw_step(group: dict[str, Any], state: dict[Tensor, dict[str, Any]]) -> None:
    """One AdamW step of a param group, on local tensors (each element by itself, so any sharding will do)."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in group["params"]:
        if parameter.requires_grad and parameter.grad is not None:  # as for matrices
            _init_state(parameter, state[parameter])
            by_device.setdefault(local_part(parameter).device, []).append(parameter)
    for device, parameters in by_device.items():
        # A rank without elements of a parameter counts its steps too: `step` is saved from any rank.
        empty = [p for p in parameters if not local_part(p).numel()]
        for parameter in empty:
            state[parameter]["step"] += 1
        held = [p for p in parameters if local_part(p).numel()]
        if held:
            _update(held, group, state, fused=device.type == "cuda")


def _init_state(parameter: Tensor, state: dict[str, Any]) -> None:
    local = local_part(parameter)
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    elif not isinstance(state["step"], Tensor) or state["step"].device != local.device:
        # loaded from a checkpoint made elsewhere
        state["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device=local.device)


def _update(
    parameters: list[Tensor], group: dict[str, Any], state: dict[Tensor, dict[str, Any]], *, fused: bool
) -> None:
    beta1, beta2 = group["betas"]
    adamw(
        [local_part(p) for p in parameters],
        [local_part(p.grad) for p in parameters if p.grad is not None],
        [local_part(state[p]["exp_avg"]) for p in parameters],
        [local_part(state[p]["exp_avg_sq"]) for p in parameters],
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
