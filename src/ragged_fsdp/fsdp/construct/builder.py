"""From managed parameters and options to groups: validate, split by mesh, plan, cut, register."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from ragged_fsdp.fsdp.construct.managed import Managed
from ragged_fsdp.fsdp.construct.options import Options
from ragged_fsdp.fsdp.gather.codes import Codes
from ragged_fsdp.fsdp.gather.packed import Chunks, Extensions, is_extended
from ragged_fsdp.fsdp.gather.transport import InPlace, Parking, parking_mesh
from ragged_fsdp.fsdp.parts.main_shard import MainShard, RowPieces, pins_memory
from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.parts.param import ManagedParam
from ragged_fsdp.fsdp.parts.plan import (
    ChunkPlan,
    GroupPlan,
    GroupTensors,
    chunk_placement,
    chunk_plan,
    inner_of,
    make_plan,
    outer_shapes,
    ragged_placement,
    shrink_to,
    split_by_blocks,
)
from ragged_fsdp.fsdp.reduce.exchange import Exchange
from ragged_fsdp.fsdp.reduce.transport import GradTransport, ReduceScatter
from ragged_fsdp.fsdp.runtime.group import ParamGroup
from ragged_fsdp.placement import block_numel
from ragged_fsdp.policy import BlockCodes, Elements, Rows, Whole

__all__ = ["GroupBuilder"]

logger = logging.getLogger("ragged_fsdp")
Planned = tuple[list[int], ParallelMesh, GroupPlan]  # the parameters of a group, by index
Cut = tuple[list[ManagedParam], MainShard | RowPieces]  # what a group is made of
_REDUCTIONS: dict[str, Callable[[Members], GradTransport]] = {
    "reduce_scatter": ReduceScatter,
    "all_to_all": Exchange,
}


@dataclass
class _Choice:
    """What the user's functions say about one parameter."""

    mesh: ParallelMesh
    block: int
    shard_dim: int | None
    """The dim of an explicit ``Shard``; None leaves the cut to the planner."""
    codes: BlockCodes | None = None
    """What travels instead of values."""


@dataclass
class GroupBuilder:
    """Makes the groups of one ``fully_shard`` call."""

    options: Options
    mesh: ParallelMesh
    device: torch.device
    _meshes: dict[int, tuple[Any, ParallelMesh]] = field(default_factory=dict)
    _choices: list[_Choice] = field(default_factory=list)

    def check(self, managed: Managed) -> None:
        """Raise on arguments and parameters that cannot be sharded; nothing is changed yet."""
        self._check_reshard()
        for name, param in zip(managed.names, managed.params):
            if not param.is_contiguous():
                raise NotImplementedError(
                    f"FSDP does not support non-contiguous parameters yet: {name} "
                    f"{param.shape=} {param.stride()=}"
                )
            try:
                choice = self._choose(name, param)
            except Exception as error:  # the user's functions may raise anything
                if name not in str(error):
                    error.add_note(f"fully_shard: the parameter is '{name}'.")
                raise
            if is_extended(param) or choice.shard_dim is not None:
                self._check_packed(name, param, choice)
            self._choices.append(choice)

    def _check_reshard(self) -> None:
        value, shards = self.options.reshard_after_forward, self.mesh.shard_size
        budget = self.options.gathered_budget_bytes
        if (value == "auto") != (budget is not None):
            raise ValueError(
                'fully_shard: reshard_after_forward="auto" and gathered_budget_bytes go together, '
                f"got {value!r} and {budget!r}."
            )
        if value == "auto":
            if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
                raise ValueError(f"fully_shard: gathered_budget_bytes must be an int >= 0, got {budget!r}.")
            return
        if value is None or isinstance(value, bool):
            return
        if not isinstance(value, int):
            raise ValueError(
                "reshard_after_forward should be a bool or an int representing the "
                f"group size to reshard to, not {value}"
            )
        if self.mesh.spmd_mesh is not None:
            raise NotImplementedError(
                "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
            )
        if value < 1 or value > shards or shards % value:
            raise ValueError(
                f"If passing reshard_after_forward as an int, it should be a factor of {shards}, not {value}"
            )

    def _check_packed(self, name: str, param: nn.Parameter, choice: _Choice) -> None:
        """Raise on what parameters that are cut by themselves cannot do."""
        value = self.options.reshard_after_forward
        if isinstance(value, int) and not isinstance(value, bool) and value not in (1, self.mesh.shard_size):
            raise NotImplementedError(
                f"{name}: a parameter with an explicit Shard or with all-gather extensions needs a bool "
                f"reshard_after_forward, got {value}."
            )
        sizes = {shape[choice.shard_dim or 0] for shape in outer_shapes(param)}
        if choice.shard_dim is not None and len(sizes) > 1:
            raise NotImplementedError(
                f"{name}: Shard({choice.shard_dim}) of a dim that is already cut unevenly, into "
                f"{sorted(sizes)}, is no DTensor placement; return None from shard_placement_fn."
            )
        if is_extended(param) and choice.shard_dim:
            raise NotImplementedError(
                f"{name}: all-gather extensions index rows; got Shard({choice.shard_dim}), expected Shard(0)."
            )

    # -- the user's functions --------------------------------------------------------------------

    def _choose(self, name: str, param: nn.Parameter) -> _Choice:
        mesh, placement, explicit = self._placement_choice(param)
        mesh.check_spmd(param, name)
        shapes = outer_shapes(param)
        block = self._policy_block(name, param, shapes)
        codes = self._codes(name, param, shapes)
        if codes is not None:
            block = math.lcm(block or 1, block_numel(shapes[0], codes.granularity))
        if placement is None:
            return _Choice(mesh, _beside_outer_shards(param, shapes, block or 1), None, codes)
        dim = self._placement_dim(param, placement, mesh, shapes[0])
        if block is None and mesh.shards and (explicit or dim):
            return _Choice(mesh, 1, dim)
        return _Choice(mesh, math.lcm(block or 1, self._row_numel(shapes[0], dim)), None, codes)

    def _placement_choice(self, param: nn.Parameter) -> tuple[ParallelMesh, Shard | None, bool]:
        """The mesh, the placement, and whether the placement was the point of the answer.

        A ``ShardPlacementResult`` names a mesh and cannot leave the placement out: its ``Shard(0)`` is
        FSDP2's default and no wish.
        """
        result = self.options.shard_placement_fn(param) if self.options.shard_placement_fn else None
        if result is None or isinstance(result, Shard):
            return self.mesh, result, True
        if not (hasattr(result, "placement") and hasattr(result, "mesh_info")):
            raise ValueError(f"Invalid shard_placement_fn result: {result}")
        info = result.mesh_info
        if id(info) not in self._meshes:
            # held with its key: the id of an object that was freed could come back
            self._meshes[id(info)] = (info, self._known_mesh(info))
        return self._meshes[id(info)][1], result.placement, False

    def _known_mesh(self, info: Any) -> ParallelMesh:
        made = ParallelMesh(info.mesh, info.mesh)
        if made.key() == self.mesh.key():
            return self.mesh
        for other, mesh in self._meshes.values():
            if mesh.key() == made.key():
                raise ValueError(
                    "Params sharing the same process group must use the same FSDPMeshInfo object, but got "
                    f"different objects: {other} vs {info}"
                )
        return made

    def _policy_block(self, name: str, param: nn.Parameter, shapes: Sequence[tuple[int, ...]]) -> int | None:
        """Elements of the blocks the policy asks for; None where it asks for nothing."""
        policy = self.options.orig_param_policy
        granularity = policy(name, param) if policy is not None else None
        if granularity is None:
            return None
        if not isinstance(granularity, (Elements, Rows, Whole)):
            raise TypeError(
                f"{name}: orig_param_policy must return Elements, Rows, Whole or None, got {granularity!r}."
            )
        try:
            blocks = [block_numel(shape, granularity) for shape in shapes if math.prod(shape)]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return max(blocks, default=1)

    def _codes(self, name: str, param: nn.Parameter, shapes: Sequence[tuple[int, ...]]) -> BlockCodes | None:
        """The codes that the gather policy asks for; None where a parameter travels as it is."""
        policy = self.options.gather_policy
        codes = policy(name, param) if policy is not None else None
        if codes is None:
            return None
        if not isinstance(codes, BlockCodes):
            raise TypeError(f"{name}: gather_policy must return BlockCodes or None, got {codes!r}.")
        if is_extended(param) or not param.dtype.is_floating_point or param.dtype.itemsize == 1:
            raise ValueError(f"{name}: no codes are made of a {type(param.data).__name__} of {param.dtype}.")
        if len(set(shapes)) > 1:
            raise NotImplementedError(f"{name}: codes of a dim that is cut unevenly, into {shapes}.")
        try:
            codes.check(shapes[0])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return codes

    @staticmethod
    def _placement_dim(
        param: nn.Parameter, placement: Shard, mesh: ParallelMesh, inner: tuple[int, ...]
    ) -> int:
        """The dim of a ``Shard``, checked as FSDP2 does."""
        dim = placement.dim + len(inner) if placement.dim < 0 else placement.dim
        if dim >= len(inner):
            raise AssertionError(f"Shard dim {dim} is invalid for {len(inner)}D tensor: {param.shape}")
        if dim > 0 and inner[dim] % mesh.shard_size:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {dim}: "
                f"{torch.Size(inner)} (world size: {mesh.shard_size})"
            )
        return dim

    @staticmethod
    def _row_numel(inner: tuple[int, ...], dim: int) -> int:
        """Elements that the nearest ragged layout keeps together: rows for dim 0; other dims have no such."""
        return max(1, math.prod(inner[1:])) if dim == 0 else 1

    # -- groups ----------------------------------------------------------------------------------

    def plan(self, managed: Managed) -> list[Planned]:
        """Plan a group per mesh and kind; nothing is changed yet."""
        by_mesh: dict[Any, list[int]] = {}
        for index, choice in enumerate(self._choices):
            param = managed.params[index]
            dtype = param.dtype if choice.codes else None  # codes are decoded into a buffer of one dtype
            key = (choice.mesh.key(), _transport_of(choice, param), dtype)
            by_mesh.setdefault(key, []).append(index)
        planned: list[Planned] = []
        for members in by_mesh.values():
            mesh = self._choices[members[0]].mesh
            for part in self._split(managed, members, mesh):
                planned.append((part, mesh, self._plan(managed, part, mesh)))
        return planned

    @torch.no_grad()
    def cut(self, managed: Managed, planned: Sequence[Planned]) -> list[Cut]:
        """Copy this rank's pieces of every group; they are registered by :meth:`build` only."""
        return [self._cut_group(managed, *entry) for entry in planned]

    def build(
        self,
        modules: tuple[nn.Module, ...],
        managed: Managed,
        planned: Sequence[Planned],
        cuts: Sequence[Cut],
    ) -> list[ParamGroup]:
        """Register the shards and make the groups."""
        kinds = [self._transport(managed, members) for members, _, _ in planned]
        groups = [self._make_group(modules, k, *entry, *cut) for k, entry, cut in zip(kinds, planned, cuts)]
        if len(groups) > 1:
            for number, group in enumerate(groups, 1):
                group.label_suffix = f" ({number} of {len(groups)})"
        return groups

    def statements(self, managed: Managed, planned: Sequence[Planned]) -> list[tuple[ParallelMesh, str]]:
        """What the ranks of each mesh must agree on; of the call's own mesh also if it has no group.

        Where parameters may have another mesh, the call's own comes again at the end, with an empty text.
        """
        may_leave = self.options.shard_placement_fn is not None
        own = [self.options.description, f"shard_placement_fn={'given' if may_leave else None}"]
        texts: dict[Any, tuple[ParallelMesh, list[str]]] = {self.mesh.key(): (self.mesh, own)}
        for part, mesh, plan in planned:
            lines = texts.setdefault(mesh.key(), (mesh, []))[1]
            lines.append(plan.description)
            lines += [
                f"{managed.names[i]} {choice.codes}" for i in part if (choice := self._choices[i]).codes
            ]
        statements = [(mesh, "\n".join(lines)) for mesh, lines in texts.values()]
        return [*statements, (self.mesh, "")] if may_leave else statements

    def _split(self, managed: Managed, members: Sequence[int], mesh: ParallelMesh) -> list[list[int]]:
        """The members of each buffer: one buffer for all unless ``max_buffers`` allows more and they pay."""
        kind = self._transport(managed, members)
        if self.options.max_buffers == 1 or kind in (Chunks, Extensions):
            return [list(members)]
        tensors = self._tensors(managed, members)
        parts = split_by_blocks(tensors, mesh.shard_size, max_buffers=self.options.max_buffers)
        return [[members[position] for position in part] for part in parts]

    def _tensors(self, managed: Managed, members: Sequence[int]) -> GroupTensors:
        return GroupTensors(
            [managed.names[i] for i in members],
            [outer_shapes(managed.params[i])[0] for i in members],
            [self._choices[i].block for i in members],
            [managed.params[i].dtype for i in members],
            self.options.mp_policy.param_dtype,
        )

    def _transport(self, managed: Managed, members: Sequence[int]) -> type[Any]:
        """How the parameters of a group travel: they were put together because it is the same for all."""
        return _transport_of(self._choices[members[0]], managed.params[members[0]])

    def _plan(self, managed: Managed, members: Sequence[int], mesh: ParallelMesh) -> GroupPlan:
        inners = [inner_of(managed.params[i]) for i in members]
        if self._transport(managed, members) in (Chunks, Extensions):
            return chunk_plan(
                [managed.names[i] for i in members],
                [inner.shape for inner in inners],
                [inner.dtype for inner in inners],
                [self._choices[i].shard_dim or 0 for i in members],
                mesh.shard_size,
            )
        plan = make_plan(self._tensors(managed, members), mesh.shard_size)
        return shrink_to(plan, [inner.shape for inner in inners])

    def _cut_group(
        self, managed: Managed, members: Sequence[int], mesh: ParallelMesh, plan: GroupPlan
    ) -> Cut:
        params = [ManagedParam(managed.names[i], managed.params[i], managed.places[i]) for i in members]
        main = self._cut(params, mesh, plan, self._transport(managed, members))
        for index, (param, member) in enumerate(zip(params, members)):
            self._attach(param, index, self._choices[member].shard_dim, main.pieces[index], mesh, plan)
        return params, main

    def _make_group(
        self,
        modules: tuple[nn.Module, ...],
        kind: type[Any],
        members: Sequence[int],
        mesh: ParallelMesh,
        plan: GroupPlan,
        params: list[ManagedParam],
        main: MainShard | RowPieces,
    ) -> ParamGroup:
        for param in params:
            param.register(param.sharded)
        options = self.options
        codes = [codes for i in members if (codes := self._choices[i].codes)]
        gather: Any = partial(Codes, codes=codes) if kind is Codes else kind
        policies = options.mp_policy, options.offload_policy
        reduce = _REDUCTIONS[options.reduction]
        parts = params, modules, mesh, plan, main, self.device, *policies
        group = ParamGroup(*parts, gather=gather, reduce=reduce)
        self._set_reshard(group)
        if kind is Chunks:
            logger.info(
                "fully_shard: %d parameters (%s, ...) are cut as shard_placement_fn says; their gather "
                "copies. For the zero-copy layout return None.",
                len(params),
                params[0].name,
            )
        return group

    @staticmethod
    def _attach(
        param: ManagedParam,
        index: int,
        shard_dim: int | None,
        piece: torch.Tensor,
        mesh: ParallelMesh,
        plan: GroupPlan,
    ) -> None:
        """Make the sharded form of a parameter."""
        original = param.sharded
        if shard_dim is not None:
            assert isinstance(plan, ChunkPlan)
            target, placements = mesh.placements_for(
                original, param.name, chunk_placement(original, shard_dim)
            )
            rows = plan.local_rows(index, mesh.shard_rank)[1]
            param.attach_chunk(piece, target, placements, shard_dim, rows)
            return
        target, placements = mesh.placements_for(
            original, param.name, ragged_placement(plan, index, original)
        )
        attach = param.attach_shard if mesh.shards else param.attach_replicated
        attach(piece, target, placements)

    def _cut(
        self, params: Sequence[ManagedParam], mesh: ParallelMesh, plan: GroupPlan, kind: type[Any]
    ) -> MainShard | RowPieces:
        """Copy this rank's pieces of the original parameters into a new main shard."""
        on_meta = any(param.sharded.is_meta for param in params)
        offload = isinstance(self.options.offload_policy, CPUOffloadPolicy)
        device = torch.device("cpu") if offload else self.device
        if kind is Extensions:
            assert isinstance(plan, ChunkPlan)
            return RowPieces(plan, mesh.shard_rank, [inner_of(param.sharded) for param in params], device)
        main = MainShard(
            plan,
            mesh,
            [param.dtype for param in params],
            torch.device("meta") if on_meta else device,
            pin_memory=not on_meta and pins_memory(self.options.offload_policy, self.device),
        )
        if on_meta:
            return main
        for index, param in enumerate(params):
            main.pieces[index].copy_(
                plan.local_part(index, mesh.shard_rank, inner_of(param.sharded).detach())
            )
        return main

    def _set_reshard(self, group: ParamGroup) -> None:
        value = self.options.reshard_after_forward
        if value in (None, "auto") or isinstance(value, bool):
            group.settings.reshard_after_forward = value is not False
        elif value == 1:
            logger.warning(
                "reshard_after_forward=1 (int) means resharding parameters to world size 1, "
                "instead of reshard_after_forward=True (bool)"
            )
            group.settings.reshard_after_forward = False
        elif isinstance(value, int) and value != group.mesh.shard_size:
            group.transport.parking = Parking(parking_mesh(group.mesh.mesh, value))


def _transport_of(choice: _Choice, param: nn.Parameter) -> type[Any]:
    """The transport of one parameter; those of a group are all the same."""
    if is_extended(param):
        return Extensions
    if choice.codes is not None:
        return Codes
    return InPlace if choice.shard_dim is None else Chunks


def _beside_outer_shards(param: torch.Tensor, shapes: Sequence[tuple[int, ...]], block: int) -> int:
    """The block raised so that no cut falls into a dim that tensor parallelism cut: rows for ``Shard(1)``.

    Uneven tensor parallelism leaves rows of different lengths, which no common cut respects; such a parameter
    is strided. The same holds for ``Shard(0)``, where every cut falls into the dim.
    """
    if not isinstance(param, DTensor) or len(set(shapes)) > 1:
        return block
    for outer in param.placements:
        if isinstance(outer, Shard) and outer.dim % param.ndim:
            block = math.lcm(block, max(1, math.prod(shapes[0][outer.dim % param.ndim :])))
    return min(block, max(1, math.prod(shapes[0])))
