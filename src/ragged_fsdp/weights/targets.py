"""The tensors of a model that weights are read into: by name, each with the part that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ragged_fsdp.dbuffer.checks import device_of
from ragged_fsdp.dtensor import ragged_layout
from ragged_fsdp.dtensor.geometry import is_ragged, shard_box
from ragged_fsdp.fsdp.runtime.group import ParamGroup
from ragged_fsdp.fsdp.runtime.state import state_of
from ragged_fsdp.routes import Region
from ragged_fsdp.torch_internals import local_of
from ragged_fsdp.weights.names import plain_name

__all__ = [
    "Target",
    "groups_of",
    "holders_of",
    "local_flat",
    "materialize_meta",
    "named_tensors",
    "region_of",
    "retie",
    "targets_of",
    "tied_names",
]


@dataclass(frozen=True)
class Target:
    """One tensor of a model's state dict, under all the names it has."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """The first of its names, which errors use."""
        return self.names[0]


def targets_of(model: nn.Module) -> list[Target]:
    """Parameters and persistent buffers, tied ones once, in the order of the state dict."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, value in _held(model):
        names.setdefault(id(value), []).append(plain_name(name))
        tensors[id(value)] = value
    return [Target(tuple(names[key]), tensors[key]) for key in names]


def holders_of(targets: Iterable[Target]) -> list[int]:
    """The ranks that a model is sharded over; none if it is not."""
    meshes = [target.tensor.device_mesh for target in targets if isinstance(target.tensor, DTensor)]
    return sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and the registered tensors themselves, without a state dict's hooks and copies."""
    persistent = set(model.state_dict(keep_vars=True))
    yield from model.named_parameters(remove_duplicate=False)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if plain_name(name) in persistent or name in persistent:
            yield name, buffer


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers as they are registered now, by every name they have."""
    held = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {plain_name(name): tensor for named in held for name, tensor in named}


def groups_of(model: nn.Module) -> Iterator[ParamGroup]:
    """The groups of parameters that ``fully_shard`` of this package made."""
    seen: set[int] = set()
    for module in model.modules():
        state = state_of(module)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield from state.groups


def region_of(name: str, tensor: Tensor) -> Region:
    """The boxes of the whole tensor that this rank holds, in the order of its memory."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return (((0,) * len(shape), shape),)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"{name}: has pending reductions ({tensor.placements}); it cannot hold weights")
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    if is_ragged(tensor):
        return tuple(ragged_layout(tensor).boxes())
    return (shard_box(shape, tensor.device_mesh.shape, tuple(coordinate), tensor.placements),)


def local_flat(name: str, tensor: Tensor) -> Tensor:
    """This rank's memory of a tensor, as one dim."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    if type(local) not in (Tensor, nn.Parameter):
        raise TypeError(f"{name}: holds a {type(local).__name__}; weights are read into plain tensors only")
    if not local.is_contiguous():
        raise ValueError(f"{name}: its memory is not contiguous (strides {local.stride()})")
    return local.detach().view(-1)


def replicate_dims(tensor: Tensor) -> list[int]:
    """The mesh dims along which other ranks hold the same part."""
    if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
        return []
    mesh = tensor.device_mesh
    return [d for d, p in enumerate(tensor.placements) if isinstance(p, Replicate) and mesh.size(d) > 1]


def tied_names(model: nn.Module) -> list[tuple[str, str]]:
    """(first name, other name) of parameters held under several names: ``to_empty`` forgets what is tied."""
    first: dict[nn.Parameter, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    return [(first[p], name) for name, p in named if first.setdefault(p, name) != name]


def retie(model: nn.Module, tied: list[tuple[str, str]]) -> None:
    """Let names that were tied hold one parameter again."""
    for first, other in tied:
        module_name, _, own_name = other.rpartition(".")
        setattr(model.get_submodule(module_name), own_name, model.get_parameter(first))


def uninitialised_buffers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that hold buffers without memory which no checkpoint has, by the name of the first of those."""
    persistent = set(model.state_dict(keep_vars=True))
    found: dict[str, nn.Module] = {}
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        for name, buffer in module.named_buffers(recurse=False):
            full = prefix + name
            if buffer.is_meta and full not in persistent and plain_name(full) not in persistent:
                found.setdefault(plain_name(full), module)
                break
    return found


def materialize_meta(
    model: nn.Module, device: torch.device | str | None, init: Callable[[nn.Module], Any] | None
) -> None:
    """Give what is on the meta device memory, and buffers that no checkpoint has their values by ``init``."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    if not any(tensor.is_meta for _, tensor in tensors):
        return
    to_init = uninitialised_buffers(model)
    if device is None:
        mesh = next((t.device_mesh for _, t in tensors if isinstance(t, DTensor)), None)
        device = device_of(mesh) if mesh is not None else torch.device("cpu")
    present = {name: tensor.detach() for name, tensor in tensors if not tensor.is_meta}
    tied = tied_names(model)
    empty = [group for group in groups_of(model) if all(param.sharded.is_meta for param in group.params)]
    for group in empty:
        group.without_values = True
    try:
        model.to_empty(device=torch.device(device))
    finally:
        for group in empty:
            group.without_values = False
    retie(model, tied)
    now = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for name, value in present.items():  # to_empty forgot what had values
            now[name].copy_(value)
        for module in to_init.values():
            assert init is not None  # refused before
            init(module)
