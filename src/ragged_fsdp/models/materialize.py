"""Initial values for a sharded model, equal at every world size and for every way of sharding.

A model is built on the meta device, sharded there, and only then given memory. Its values come from an
unsharded *twin* on the meta device, of which one module at a time is held in full: it is initialised
from a seed made of the run's seed and the module's name, each rank keeps its own part, and the full
module is dropped. Peak memory is the shard plus the largest single module.
"""

import hashlib
from collections.abc import Callable

import torch
import torch.distributed.tensor as dtensor
from torch import Tensor, nn

from ragged_fsdp.weights.names import plain_name
from ragged_fsdp.weights.targets import retie, tied_names

__all__ = ["InitModule", "copy_full", "materialize", "seed_for"]

InitModule = Callable[[nn.Module, torch.Generator], None]
"""Fills the parameters and buffers that a module holds directly."""


def seed_for(seed: int, name: str) -> int:
    """A seed for ``name``, the same on every rank and in every run."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def copy_full(target: Tensor, full: Tensor) -> None:
    """Give ``target``, sharded in any way or not at all, its part of the ``full`` tensor."""
    with torch.no_grad():
        if isinstance(target, dtensor.DTensor):
            part = dtensor.distribute_tensor(
                full.to(target.dtype), target.device_mesh, target.placements, src_data_rank=None
            )
            target.to_local().copy_(part.to_local())
        else:
            target.copy_(full)


def materialize(
    model: nn.Module,
    twin: nn.Module,
    init_module: InitModule,
    *,
    seed: int,
    device: torch.device,
    buffers_only: bool = False,
) -> None:
    """Allocate ``model`` on ``device`` and give it the initial values that ``twin`` would have.

    ``buffers_only`` leaves modules without buffers empty: their weights will be loaded from a file.
    """
    tied = tied_names(model)
    model.to_empty(device=device)
    retie(model, tied)
    held = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    targets = {plain_name(name): tensor for name, tensor in held}
    # Tied tensors are initialised by the first module that holds them, as an unsharded model would be.
    wanted = {name for name, _ in [*twin.named_parameters(), *twin.named_buffers()]}
    for module_name, module in twin.named_modules():
        prefix = f"{module_name}." if module_name else ""
        if not any(prefix + name in wanted for name in _own_tensors(module)):
            continue
        if buffers_only and not any(True for _ in module.buffers(recurse=False)):
            continue
        module.to_empty(device=device, recurse=False)
        generator = torch.Generator(device=device).manual_seed(seed_for(seed, module_name))
        init_module(module, generator)
        for name, full in _own_tensors(module).items():
            if prefix + name in wanted:
                copy_full(targets[prefix + name], full.detach())
        module.to_empty(device="meta", recurse=False)


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return dict(tensors)
