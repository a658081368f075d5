"""Distributed Muon one tensor at a time, as the algorithm is written: the oracle of the fast version.

    u <- momentum update of g                      on each rank's own elements
    o <- redistribute(u, everything on the root)   RaggedShard with all units on one rank
    o <- Newton-Schulz(o)                          on the root; the others hold nothing
    o <- redistribute(o, where u was)
    w <- w (1 - lr * decay) - lr * scale * o

Slow (two collectives per matrix, one root at a time) and short. It takes 2-D parameters on a 1-D mesh and
plain matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor import RaggedShard, ragged_spec, wrap_local

__all__ = ["reference_update"]


@torch.no_grad()
def reference_update(
    parameter: Tensor,
    gradient: Tensor,
    momentum_buffer: Tensor,
    *,
    root: int,
    orthogonalize: Callable[[Tensor], Tensor],
    momentum: float,
    nesterov: bool,
    lr: float,
    scale: float,
    weight_decay: float,
    dtype: torch.dtype,
) -> None:
    """One step of one matrix by rank ``root`` of the mesh; changes parameter and buffer in place."""
    momentum_buffer.lerp_(gradient, 1.0 - momentum)
    update = gradient.lerp(momentum_buffer, momentum) if nesterov else momentum_buffer
    update = update.to(dtype)
    if isinstance(update, DTensor):
        update = _on_root(update, root, orthogonalize)
    else:
        update = orthogonalize(update[None])[0]
    parameter.mul_(1.0 - lr * weight_decay)
    parameter.add_(update.to(parameter.dtype), alpha=-lr * scale)


def _on_root(update: DTensor, root: int, orthogonalize: Callable[[Tensor], Tensor]) -> DTensor:
    mesh, placements = update.device_mesh, update.placements
    if mesh.ndim != 1 or update.ndim != 2:
        raise ValueError(
            f"the reference takes matrices on a 1-D mesh, got shape {tuple(update.shape)} on {mesh}."
        )
    on_root = [RaggedShard.on_one_rank(update.shape, mesh.size(), root)]
    local = update.redistribute(mesh, on_root).to_local()
    if local.numel():
        local = orthogonalize(local.reshape(1, *update.shape).clone()).view(local.shape)
    spec = ragged_spec(mesh, on_root, update.shape, update.dtype)
    return wrap_local(local, spec).redistribute(mesh, placements)
