"""Cutting the parameters of a sharded module again, between steps, after what lies under them has changed.

Expert parallelism moves experts between ranks: the *inner* tensors, which data parallelism cuts, have other
sizes then, and their group needs another plan. The objects of the sharded parameters stay, with other local
tensors, so that optimizers keep what they hold; whoever holds tensors laid out like them must move those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.fsdp.construct.builder import GroupBuilder
from ragged_fsdp.fsdp.construct.call import Agreement, collect
from ragged_fsdp.fsdp.parts.members import PRODUCT_ATTRIBUTE, ManagedParam
from ragged_fsdp.fsdp.runtime.group import ParamGroup, Residence
from ragged_fsdp.fsdp.runtime.state import ModuleState, state_of
from ragged_fsdp.policy import Elements, Granularity, Tiles
from ragged_fsdp.torch_internals import local_of, set_local, spec_of

__all__ = ["check_cut", "cut_again"]


@torch.no_grad()
def cut_again(module: nn.Module, placements: Mapping[str, Sequence[Placement]]) -> None:
    """Let the named parameters of a sharded ``module`` lie under other inner placements, and plan it anew.

    Every rank of the module's meshes calls it, between steps: no gradients, nothing gathered. Values stay the
    same bit for bit.

    Args:
        module: one that was passed to ``fully_shard`` alone.
        placements: by name below ``module``, over the mesh that a parameter had before ``fully_shard``.
    """
    state = check_cut(module, placements)
    (options, mesh), groups = state.call, state.groups
    old = {param.name: param for group in groups for param in group.params}
    before = {name: param.sharded for name, param in old.items()}
    inners = {name: _inner(param, mesh.mesh.ndim, placements.get(name)) for name, param in old.items()}
    policy = _same_blocks(groups)
    with Agreement(mesh, state.device) as agreement:
        try:
            for name, param in old.items():
                fresh = nn.Parameter(inners[name], requires_grad=before[name].requires_grad)
                if param.product is not None:  # what computes with its codes
                    setattr(fresh, PRODUCT_ATTRIBUTE, param.product)
                for place in param.places:
                    setattr(place.module, place.attribute, fresh)
            managed = collect([module], options.ignored)
            builder = GroupBuilder(replace(options, orig_param_policy=policy), managed, mesh, state.device)
            drafts = builder.draft()
            agreement.reach(builder.statements(drafts), next(iter(old), ""))
        except BaseException:
            for param in old.values():
                param.register(param.sharded)
            raise
    made = builder.build((module,), drafts, builder.pick(drafts))
    for group, previous in zip(made, groups):
        group.settings = previous.settings
    for param in (param for group in made for param in group.params):
        _keep_object(param, before[param.name])
    for group in groups:
        group.retire()
    state.groups = made
    _adopt(state)


def check_cut(module: nn.Module, names: Iterable[str]) -> ModuleState:
    """Raise where :func:`cut_again` would before any change, so that several modules can be checked first."""
    state = state_of(module)
    if state is None or state.modules != (module,):
        raise ValueError(f"cut_again: expected a module after fully_shard, got {type(module).__name__}.")
    old = {param.name: param for group in state.groups for param in group.params}
    for name in names:
        if name not in old:
            raise ValueError(f"cut_again: no parameter {name!r}; there are {', '.join(old)}.")
        if old[name].inner_spec is None:
            raise ValueError(f"cut_again: {name} was no DTensor before fully_shard.")
    for param in old.values():
        if param.sharded.grad is not None:
            raise RuntimeError(f"cut_again: {param.fqn} has a gradient; call it after zero_grad().")
    for group in state.groups:
        group.to_sharded()
        if group.residence is not Residence.SHARDED:
            raise RuntimeError(f"cut_again: {group.label} is in use; call it between steps.")
    if state.call[1].spmd_mesh is not None:
        raise NotImplementedError("cut_again: not with dp_mesh_dims.")
    return state


def _inner(param: ManagedParam, data_dims: int, changed: Sequence[Placement] | None) -> torch.Tensor:
    """What data parallelism is to cut: gathered over its ranks, under its new inner placements."""
    sharded: Any = param.sharded.detach()
    spec = param.inner_spec
    inner = () if spec is None else tuple(changed or spec.placements)
    moved = sharded.redistribute(placements=(*(Replicate(),) * data_dims, *inner))
    local = local_of(moved).clone()  # a view of what was gathered would keep all of it
    if spec is None:
        return local
    return DTensor.from_local(
        local, spec.mesh, inner, run_check=False, shape=sharded.shape, stride=sharded.stride()
    )


def _same_blocks(groups: Sequence[ParamGroup]) -> Any:
    """A policy that asks for the blocks that parameters were planned with: the user's may know objects."""
    blocks: dict[str, Granularity] = {}
    for group in groups:
        plan = group.plan
        for name, spec, item in zip(plan.names, plan.layout.specs, plan.item_bytes):
            elements = Elements(spec.block_numel * plan.cell_bytes // item)
            blocks[name] = elements if spec.tile is None else Tiles(*spec.tile)
    return lambda name, param: blocks[name]


def _keep_object(param: ManagedParam, sharded: nn.Parameter) -> None:
    """Let ``sharded``, which optimizers hold, be the sharded parameter; its local tensor is the new one."""
    made: Any = param.sharded
    sharded.data = made.data
    set_local(sharded, local_of(made), spec_of(made))  # type: ignore[arg-type]
    param.sharded = sharded
    param.register(sharded)


def _adopt(state: ModuleState) -> None:
    """Let the schedule of a model that has run know the new groups."""
    root = next((turn for turn in state.schedule.turns if turn.is_root), None)
    if isinstance(root, ModuleState):
        state.schedule.adopt(root, state.schedule.turns, root.modules[0], root.device)
