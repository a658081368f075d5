"""Which modules and parameters one ``fully_shard`` call manages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.fsdp.parts.param import MANAGED_ATTRIBUTE, Place
from ragged_fsdp.fsdp.runtime.state import state_of
from ragged_fsdp.torch_internals import get_registry, is_traceable_wrapper_subclass, parameters_of

__all__ = ["Managed", "collect", "moved_buffers", "replace_buffers"]


@dataclass(frozen=True)
class Managed:
    """What one call manages: parameters by name relative to the module passed, and where they are."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    params: tuple[nn.Parameter, ...]
    places: tuple[tuple[Place, ...], ...]
    buffers: tuple[torch.Tensor, ...]


def collect(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> Managed:
    """The modules below ``roots`` that no earlier call manages, and their parameters."""
    modules = tuple(m for m in _modules(roots) if not ignored or not _only_ignored(m, ignored))
    wanted: dict[nn.Parameter, None] = {}
    buffers: dict[torch.Tensor, None] = {}
    for module in modules:
        for name, param in module.named_parameters(recurse=False):
            if param in ignored:
                continue
            if param.ndim == 0:
                raise ValueError(
                    "fully_shard doesn't support scalar parameters. "
                    f"Change {name} to a 1D tensor with numel equal to 1."
                )
            wanted[param] = None
        buffers.update(dict.fromkeys(module.buffers(recurse=False)))
    places: dict[nn.Parameter, list[Place]] = {}
    names: dict[nn.Parameter, str] = {}
    for qualified, place, param in _registrations(roots):
        if param in wanted:
            names.setdefault(param, qualified)
            places.setdefault(param, []).append(place)
    params = tuple(wanted)
    for param in params:
        if hasattr(param, MANAGED_ATTRIBUTE):
            raise ValueError(
                f"fully_shard: '{names[param]}' is already sharded by a call on a module above; "
                "call it bottom-up, on the children first."
            )
    return Managed(
        modules,
        tuple(names[p] for p in params),
        params,
        tuple(tuple(places[p]) for p in params),
        tuple(buffers),
    )


def _modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Children first; not into modules that have a state of their own or that DDP replicates."""
    found: list[nn.Module] = []
    seen: set[nn.Module] = set()
    top = set(roots)

    def visit(module: nn.Module) -> None:
        if "replicate" in (get_registry(module) or {}):
            return
        if module not in top and state_of(module) is not None:
            return
        seen.add(module)
        for child in module.children():
            if child not in seen:
                visit(child)
        found.append(module)

    for root in roots:
        visit(root)
    return found


def _only_ignored(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    """Whether nothing below ``module`` is left to manage: no buffer and no parameter but ignored ones."""
    if next(module.buffers(), None) is not None:
        return False
    return all(param in ignored for param in module.parameters())


def _registrations(roots: Sequence[nn.Module]) -> Iterator[tuple[str, Place, nn.Parameter]]:
    """Every name under which a parameter is registered, duplicates included."""
    many = len(roots) > 1
    for index, root in enumerate(roots):
        prefix = f"{index}." if many else ""
        for module_name, module in root.named_modules(remove_duplicate=False):
            dot = f"{module_name}." if module_name else ""
            for name, param in parameters_of(module).items():
                if param is not None:
                    yield f"{prefix}{dot}{name}", Place(module, name), param


def moved_buffers(managed: Managed, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each buffer that lies elsewhere, with its copy on ``device``; raise on DTensors that cannot move.

    What is on the meta device waits for its initialisation.
    """
    for tensor in (*managed.params, *managed.buffers):
        if isinstance(tensor, DTensor) and tensor.device != device and tensor.device.type != "meta":
            kind = tensor.device_mesh.device_type
            if kind != device.type:
                raise ValueError(
                    "Requires DTensor to have mesh of the same type as the FSDP mesh "
                    f"but got {kind} for DTensor and {device.type} for FSDP"
                )
            raise AssertionError(f"Expects DTensor to be moved to {kind} but got {tensor.device}")
    with torch.no_grad():
        return [
            (buffer, buffer.to(device))
            for buffer in managed.buffers
            if buffer.device != device and buffer.device.type != "meta"
        ]


def replace_buffers(moved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let each buffer be its copy; its object stays."""
    for buffer, copy in moved:
        if is_traceable_wrapper_subclass(buffer):
            torch.utils.swap_tensors(buffer, copy)
        else:
            buffer.data = copy
