"""``fully_shard`` and the other public names: FSDP2's, with the same meaning.

It validates, groups, plans, cuts, compares with the other ranks and attaches, with the help of
:mod:`ragged_fsdp.fsdp.construct`. Nothing is changed before all of that has succeeded on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ragged_fsdp.dbuffer.checks import device_of
from ragged_fsdp.fsdp.construct.builder import GroupBuilder
from ragged_fsdp.fsdp.construct.call import (
    Agreement,
    Gather,
    Managed,
    Options,
    Reduction,
    collect,
    moved_buffers,
    replace_buffers,
)
from ragged_fsdp.fsdp.parts.left_out import unmanaged, warn_half_precision
from ragged_fsdp.fsdp.parts.mesh import DataParallelMeshDims, parallel_mesh
from ragged_fsdp.fsdp.runtime.group import ParamGroup
from ragged_fsdp.fsdp.runtime.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    register_stage,
    share_comm_ctx,
    swap_class,
)
from ragged_fsdp.fsdp.runtime.roots import outside
from ragged_fsdp.fsdp.runtime.state import ModuleState, state_of, states_below
from ragged_fsdp.policy import BlockCodes, Granularity
from ragged_fsdp.torch_internals import REGISTRY_KEY, get_root_modules

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "adopt_parameters",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

if TYPE_CHECKING:

    class ShardedModule(FSDPModule, nn.Module):
        """What ``fully_shard`` returns: the module it was given, which has FSDPModule's methods now."""


class Arguments(TypedDict, total=False):
    """What ``fully_shard`` takes beside the module."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | Literal["auto"] | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    orig_param_policy: Callable[[str, nn.Parameter], Granularity | None] | None
    reduction: Reduction
    gathered_budget_bytes: int | None
    max_buffers: int
    gather_policy: Callable[[str, nn.Parameter], BlockCodes | None] | None
    gather: Gather
    ranks_per_node: int | None
    internode_dtype: torch.dtype | None
    conditional: bool


@overload
def fully_shard(module: nn.Module, **arguments: Unpack[Arguments]) -> ShardedModule: ...


@overload
def fully_shard(module: list[nn.Module], **arguments: Unpack[Arguments]) -> list[ShardedModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | Literal["auto"] | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    orig_param_policy: Callable[[str, nn.Parameter], Granularity | None] | None = None,
    reduction: Reduction = "reduce_scatter",
    gathered_budget_bytes: int | None = None,
    max_buffers: int = 1,
    gather_policy: Callable[[str, nn.Parameter], BlockCodes | None] | None = None,
    gather: Gather = "flat",
    ranks_per_node: int | None = None,
    internode_dtype: torch.dtype | None = None,
    conditional: bool = False,
) -> Any:
    """Shard the parameters of ``module`` over data-parallel ranks, in place, and return it.

    The parameters in ``module.parameters()`` that no earlier call on a submodule took become one group: one
    buffer, one all-gather before forward (and before backward if it was freed), one reduce-scatter after
    backward. Call it bottom-up: on the layers, then on the model.

    Args:
        module: the module, or a list of modules to treat as one group.
        mesh: 1-D to shard over all its ranks; 2-D with names to replicate over dim 0 and shard over dim 1.
            Default: all ranks.
        reshard_after_forward: True frees the gathered parameters after forward and gathers again in
            backward; False keeps them; an int keeps a larger shard, gathered over that many ranks; None is
            True, except for the root, which is needed again at once, and for the two modules with which
            backward starts. ``"auto"`` is None, but also keeps the layers that backward needs first, as many
            as fit in ``gathered_budget_bytes``.
        shard_placement_fn: per parameter, ``None``, ``Shard(dim)`` or a ``ShardPlacementResult`` with a mesh
            of its own. ``Shard(dim)`` gives FSDP2's equal chunks, with its copies, unless
            ``orig_param_policy`` names a granularity for the parameter.
        mp_policy: dtypes of computation, reduction and output.
        offload_policy: ``CPUOffloadPolicy`` keeps parameters, gradients and optimizer state on the host.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: names the data-parallel dims of ``mesh``, on which the parameters already are DTensors.
        orig_param_policy: ``policy(name, param)`` returns what of a parameter must stay on one rank:
            ``Elements(n)``, ``Rows(n)``, ``Tiles(rows, columns)``, ``Whole()``, or None for no constraint.
            Names are relative to ``module``.
        reduction: ``"reduce_scatter"`` adds gradients on the wire, in ``reduce_dtype``. ``"all_to_all"``
            sends them as autograd produced them and adds them on arrival in ``reduce_dtype``: for bf16
            gradients added in fp32 half the bytes, no cast and no buffer of the whole gradient. It is for
            ranks of one node or NVLink domain. ``"two_level"`` does so inside each node, and then with the
            nodes' sums between them. ``"auto"`` picks by the network and logs what.
        gathered_budget_bytes: with ``reshard_after_forward="auto"``: bytes of gathered parameters, below one
            root, that may stay between forward and backward; the two modules with which backward starts stay
            in any case. The largest value given counts.
        max_buffers: into how many buffers the group may be split by block size, if each further one saves
            more than a percent of padding; each has a gather and a reduction of its own.
        gather_policy: ``policy(name, param)`` returns ``BlockCodes``, in which the parameter is gathered and
            computed with, or None. Such parameters form a group of their own; main weights, gradients and
            checkpoints are as without it.
        gather: ``"flat"`` gathers with one collective over all ranks; ``"two_level"`` brings each slot to the
            other nodes once and shares it there; ``"auto"`` picks by the network and logs what.
        ranks_per_node: how many consecutive ranks share a fast link, for ``"two_level"`` and ``"auto"``.
            Default: the environment's ``RAGGED_FSDP_RANKS_PER_NODE``, else the ranks find out.
        internode_dtype: of the sums that ``"two_level"`` sends between nodes, ``torch.float32`` or
            ``torch.bfloat16``. Default: that of the gradients, but fp32 for fp16.
        conditional: whether a rank may leave ``module`` out of a forward while others run it, such as a tower
            for images. The ranks vote once per forward; those without a run reduce zeros.

    Raises:
        TypeError: an argument has the wrong type; the message names it.
        ValueError: the mesh, a parameter or a granularity cannot be used, or the ranks disagree; the message
            names the parameter, and nothing is changed.
        RuntimeError: another rank of the mesh failed; the message names it and has its error. (A mesh that
            cannot be used raises on the rank that passed it, and the others are not told.)
        AssertionError: the module was sharded before.

    Example::

        for layer in model.layers:
            fully_shard(layer, orig_param_policy=lambda name, p: Rows(32) if p.ndim == 2 else None)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())   # after sharding: parameters are DTensors now
    """
    if offload_policy is None:  # as libraries write it
        offload_policy = OffloadPolicy()
    given = locals()
    # an error here is this rank's alone: there is nobody to tell
    own_mesh = parallel_mesh(mesh, dp_mesh_dims)
    with Agreement(own_mesh, device_of(own_mesh.mesh)) as agreement:
        options = Options(**{field.name: given[field.name] for field in dataclasses.fields(Options)})
        modules = _checked_modules(module)
        managed = collect(modules, options.ignored)
        builder, groups = _make_groups(modules, managed, options, agreement)
        call = (options, own_mesh)
        state = ModuleState(modules, groups, agreement.device, call, gathers_first=builder.gathers_first)
        for one in modules:
            register_stage(one, state)
            swap_class(one)
        return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _checked_modules(given: Any) -> list[nn.Module]:
    """The modules of a call, without those below others in a list; raise on what cannot be sharded."""
    listed = [given] if isinstance(given, nn.Module) else given
    if not isinstance(listed, (list, tuple)) or not listed:
        raise TypeError(
            f"fully_shard: module must be a module or a non-empty list of modules, got {given!r}."
        )
    for module in listed:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard: module must be an nn.Module, got {module!r}.")
        container = isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if container and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {module}"
            )
    roots = get_root_modules(list(listed))
    for module in roots:
        # its own: wrappers such as that of checkpointing hand out the attributes of what they wrap
        if "fully_shard" in module.__dict__.get(REGISTRY_KEY, {}) or roots.count(module) > 1:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard "
                f"has already been applied to the following module:\n{module}"
            )
    return roots


def _make_groups(
    modules: Sequence[nn.Module], managed: Managed, options: Options, agreement: Agreement
) -> tuple[GroupBuilder, list[ParamGroup]]:
    """The groups of what one call manages, registered once all ranks agree."""
    moved = moved_buffers(managed, agreement.device)  # before the shards are cut, which may stay on the host
    builder = GroupBuilder(options, managed, agreement.mesh, agreement.device)
    drafts = builder.draft()
    agreement.reach(builder.statements(drafts), managed.params[0].name if managed.params else "")
    with Agreement(agreement.mesh, agreement.device) as again:  # ranks of one of several meshes may fail here
        picked = builder.pick(drafts)
        if options.asks_the_network:
            again.reach([(agreement.mesh, "")], "")
    replace_buffers(moved)
    warn_half_precision((param.name, param.sharded) for param in managed.params)
    groups = builder.build(tuple(modules), drafts, picked)
    for owned in managed.modules:  # what the compiler asks of modules whose parameters are swapped
        owned.__dict__.update(_is_fsdp_managed_module=True, _fsdp_use_orig_params=True)
    return builder, groups


def adopt_parameters(module: nn.Module) -> list[str]:
    """Shard parameters that were attached or replaced after ``fully_shard``; their names below ``module``.

    Each becomes part of the call on the nearest sharded module above it, with that call's arguments and what
    methods have set since for the parameters that it has (of a module without any, set it again), in a group
    of its own: one more gather and reduction. What is attached before ``fully_shard`` needs neither.
    As there, a rank keeps its part of the values that it has. All ranks call it, between steps, and then
    make the optimizer.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: nothing below ``module`` is sharded, or the ranks attached different parameters.
        RuntimeError: a forward or a backward is under way, or another rank failed.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"adopt_parameters: module must be an nn.Module, got {module!r}.")
    states = states_below(module)
    if not states:
        raise ValueError(f"adopt_parameters: no module below {type(module).__name__} is sharded.")
    names = {param: name for name, param in unmanaged(module, *outside(states))}
    adopted: list[str] = []
    for state in states:
        options, mesh = state.call
        with Agreement(mesh, state.device) as agreement:
            state.schedule.forget_root()
            known = {p for root in state.modules for p in root.parameters() if p not in names}
            managed = collect(state.modules, known)
            found = [names[param.sharded] for param in managed.params]
            _, groups = _make_groups(state.modules, managed, options, agreement)
        for group in groups:
            like = next((old for old in state.groups if old.mesh.key() == group.mesh.key()), group)
            planned = like.settings.gather_comm is like.planned_comm
            comm = group.planned_comm if planned else like.settings.gather_comm
            group.settings = dataclasses.replace(like.settings, gather_comm=comm)
            group.context = state.schedule.comm
        state.groups += groups
        adopted += found
    return adopted
