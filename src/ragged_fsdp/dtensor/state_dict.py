"""Loading full state dicts into ragged tensors (``set_model_state_dict`` and its relatives)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.construct import wrap_local
from ragged_fsdp.dtensor.differences import first_difference
from ragged_fsdp.dtensor.geometry import is_ragged, ragged_spec, replicated, with_placements
from ragged_fsdp.dtensor.redistribute import redistribute_local_tensor
from ragged_fsdp.torch_internals import local_of, spec_of, stock

__all__ = [
    "distribute_state_dict",
    "distribute_tensors",
    "stock_distribute_state_dict",
    "stock_distribute_tensors",
]

# Captured before patches.py replaces the names.
stock_distribute_tensors: Any = stock("_distribute_tensors")
stock_distribute_state_dict: Any = stock("_distribute_state_dict")


def distribute_state_dict(
    full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], device: torch.device, pg: Any = None
) -> None:
    """Load a full state dict that every rank has; torch broadcasts each tensor from the first rank.

    The ranks first compare what they have: a broadcast between tensors of different sizes or dtypes ends the
    process, leaves garbage, or leaves other ranks waiting.
    """
    said: dict[DeviceMesh, list[str]] = {}
    for target in local_state_dict.values():
        if isinstance(target, DTensor) and is_ragged(spec_of(target)):
            said.setdefault(target.device_mesh, [])
    pairs = [(key, value, local_state_dict.get(key)) for key, value in full_state_dict.items()]
    for key, value, target in pairs:
        if isinstance(target, DTensor) and target.device_mesh in said and torch.is_tensor(value):
            said[target.device_mesh].append(f"{key} {tuple(value.shape)} {value.dtype}")
    for mesh, lines in said.items():
        _check_same(mesh, lines)
    for key, value, target in pairs:
        if isinstance(target, DTensor) and is_ragged(spec_of(target)) and torch.is_tensor(value):
            _check_shape(key, value, target)
    stock_distribute_state_dict(full_state_dict, local_state_dict, device, pg)


def _check_same(mesh: DeviceMesh, lines: Sequence[str]) -> None:
    """Raise on every rank of ``mesh``, naming the first difference, unless all have the same ``lines``.

    A rank that learns of a difference along one dim passes it on along the next.
    """
    heard: str | None = None
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        said: list[Any] = [None] * group.size()
        if len(said) == 1:
            continue
        dist.all_gather_object(said, (heard, digest), group=group)
        heard = next((message for message, _ in said if message is not None), None)
        if heard is None and len({other for _, other in said}) > 1:
            texts: list[Any] = [None] * group.size()
            dist.all_gather_object(texts, list(lines), group=group)
            difference = first_difference(texts, dist.get_process_group_ranks(group))
            heard = f"the ranks do not load the same full state dict, in the same order; {difference}."
    if heard is not None:
        raise ValueError(heard)


def _check_shape(key: str, full: torch.Tensor, local: DTensor) -> None:
    """Raise alike on every rank: one that owns nothing of the tensor would go on alone."""
    if full.shape != local.shape:
        raise ValueError(
            f"{key}: the state dict has shape {tuple(full.shape)}, expected {tuple(local.shape)}."
        )


def distribute_tensors(
    local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None
) -> None:
    """Replace each ``(local, full)`` pair by the local tensor holding its part of the full one."""
    others = []
    for key in keys:
        pair: Any = local_state_dict.get(key)
        ragged = isinstance(pair, tuple) and isinstance(pair[0], DTensor) and is_ragged(spec_of(pair[0]))
        if ragged:
            local, full = pair
            _check_shape(key, full, local)
            local_state_dict[key] = _filled(local, full)
        else:
            others.append(key)
    if others or not keys:
        stock_distribute_tensors(local_state_dict, others, device, pg)


def _filled(local: DTensor, full: torch.Tensor) -> DTensor:
    spec = spec_of(local)
    whole = ragged_spec(spec.mesh, replicated(spec.mesh), spec.shape, full.dtype)
    target = with_placements(whole, spec.placements)
    piece = redistribute_local_tensor(full.contiguous(), whole, target)
    if local.is_meta:
        return wrap_local(piece, target)
    local_of(local).detach().copy_(piece)
    return local
