"""From what was chosen for each parameter to groups: plan, cut; register once all ranks agree."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from ragged_fsdp.collectives import explain_failure
from ragged_fsdp.fsdp.construct.call import Managed, Options
from ragged_fsdp.fsdp.construct.choices import Choice, Choices
from ragged_fsdp.fsdp.construct.network import NetworkPath, network_path, pick
from ragged_fsdp.fsdp.gather.packed import Chunks, Extensions
from ragged_fsdp.fsdp.gather.transport import Parking, parking_mesh
from ragged_fsdp.fsdp.parts.members import MainShard, ManagedParam, RowPieces, pins_memory
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.parts.plan import (
    ChunkPlan,
    GroupPlan,
    GroupTensors,
    chunk_placement,
    chunk_plan,
    gathered_dtype,
    inner_of,
    make_plan,
    outer_shapes,
    ragged_placement,
    shrink_to,
    split_by_blocks,
    split_frozen,
)
from ragged_fsdp.fsdp.runtime.group import ParamGroup
from ragged_fsdp.topology import find_levels

__all__ = ["Draft", "GroupBuilder"]

logger = logging.getLogger("ragged_fsdp")


@dataclass
class Draft:
    """A group that is planned and cut, while nothing of it is registered."""

    choices: list[Choice]
    """One for each of its parameters; mesh and transport are the same in all."""
    plan: GroupPlan
    main: MainShard | RowPieces

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh that all of its parameters are sharded over."""
        return self.choices[0].mesh


@dataclass
class GroupBuilder:
    """Makes the groups of one ``fully_shard`` call."""

    options: Options
    managed: Managed
    mesh: ParallelMesh
    device: torch.device

    def draft(self) -> list[Draft]:
        """Check everything, then plan and cut a group per mesh and kind; the module is not changed yet."""
        asked = Choices(self.options, self.mesh)
        asked.check_mesh(self.mesh)
        alike: dict[Any, list[Choice]] = {}
        for param in self.managed.params:
            choice = asked.of(param)
            # codes are decoded, and tiles untiled, into a buffer of one dtype
            dtype = param.dtype if choice.codes or choice.tile else None
            alike.setdefault((choice.mesh.key(), choice.transport, dtype), []).append(choice)
        return [self._draft(part) for choices in alike.values() for part in self._split(choices)]

    def build(
        self, modules: tuple[nn.Module, ...], drafts: Sequence[Draft], picked: Sequence[tuple[str, str]]
    ) -> list[ParamGroup]:
        """Register the shards and make the groups, with what was picked for each."""
        pgs = [draft.mesh.shard_group for draft in drafts]
        paths = [network_path(*names, pg, self.device, self.options) for names, pg in zip(picked, pgs)]
        groups = [self._make_group(modules, draft, path) for draft, path in zip(drafts, paths)]
        if len(groups) > 1:
            for number, group in enumerate(groups, 1):
                group.label_suffix = f" ({number} of {len(groups)})"
                group.name_after("")
                group.gather_beside(groups)
        return groups

    def statements(self, drafts: Sequence[Draft]) -> list[tuple[ParallelMesh, str]]:
        """What the ranks of each mesh must agree on; of the call's own mesh also if it has no group.

        Where parameters may have another mesh, the call's own comes again at the end, with an empty text.
        """
        may_leave = self.options.shard_placement_fn is not None
        own = [self.options.description, f"shard_placement_fn={'given' if may_leave else None}"]
        texts: dict[Any, tuple[ParallelMesh, list[str]]] = {self.mesh.key(): (self.mesh, own)}
        for draft in drafts:
            lines = texts.setdefault(draft.mesh.key(), (draft.mesh, []))[1]
            lines.append(draft.plan.description)
            lines += [f"{choice.param.name} {choice.codes}" for choice in draft.choices if choice.codes]
            lines += [f"{choice.param.name} frozen" for choice in draft.choices if not choice.param.trains]
            packed = [(c.param.name, c.param.packing) for c in draft.choices if c.param.packing is not None]
            lines += [f"{name} {packing.description}" for name, packing in packed]
        statements = [(mesh, "\n".join(lines)) for mesh, lines in texts.values()]
        return [*statements, (self.mesh, "")] if may_leave else statements

    # -- groups ----------------------------------------------------------------------------------

    def _split(self, choices: list[Choice]) -> list[list[Choice]]:
        """Which parameters share a buffer: all, unless trainable ones would pile up on a few ranks, or
        ``max_buffers`` allows more and they pay."""
        if choices[0].transport in (Chunks, Extensions):
            return [choices]
        ranks, most = choices[0].mesh.shard_size, self.options.max_buffers
        trains = [choice.param.trains for choice in choices]
        parts = [[choices[i] for i in part] for part in split_frozen(self._tensors(choices), ranks, trains)]
        if len(parts) > 1:
            for choice in choices:
                choice.split_off = True
        if most == 1:
            return parts
        cut = [(part, split_by_blocks(self._tensors(part), ranks, max_buffers=most)) for part in parts]
        return [[part[i] for i in indices] for part, buffers in cut for indices in buffers]

    def _tensors(self, choices: Sequence[Choice]) -> GroupTensors:
        params, first = [choice.param for choice in choices], choices[0]
        gathered = self.options.mp_policy.param_dtype
        return GroupTensors(
            [param.name for param in params],
            [max(outer_shapes(param.sharded), key=math.prod) for param in params],
            [choice.block for choice in choices],
            [param.dtype for param in params],
            gathered if first.codes is None or first.codes.decoded else torch.float8_e4m3fn,
            first.split_off,
            [choice.tile for choice in choices],
        )

    @torch.no_grad()
    def _draft(self, choices: list[Choice]) -> Draft:
        """Plan a group and copy this rank's pieces of it."""
        params, ranks = [choice.param for choice in choices], choices[0].mesh.shard_size
        shapes = [param.inner_shape for param in params]
        plan: GroupPlan
        if choices[0].transport in (Chunks, Extensions):
            names, dtypes = [param.name for param in params], [param.dtype for param in params]
            plan = chunk_plan(names, shapes, dtypes, [choice.shard_dim or 0 for choice in choices], ranks)
        else:
            plan = shrink_to(make_plan(self._tensors(choices), ranks), shapes)
        main = self._cut(params, plan, choices[0])
        for index, choice in enumerate(choices):
            _attach(choice, plan, index, main.pieces[index])
        return Draft(choices, plan, main)

    def _cut(self, params: Sequence[ManagedParam], plan: GroupPlan, alike: Choice) -> MainShard | RowPieces:
        """Copy this rank's pieces of the original parameters into a new main shard."""
        mesh, inners = alike.mesh, [inner_of(param.sharded) for param in params]
        on_meta = any(inner.is_meta for inner in inners)
        offload = isinstance(self.options.offload_policy, CPUOffloadPolicy)
        device = torch.device("cpu") if offload else self.device
        if alike.transport is Extensions:
            assert isinstance(plan, ChunkPlan)
            return RowPieces(plan, mesh.shard_rank, inners, device)
        main = MainShard(
            plan,
            mesh,
            [inner.dtype for inner in inners],
            torch.device("meta") if on_meta else device,
            pin_memory=not on_meta and pins_memory(self.options.offload_policy, self.device),
        )
        if not on_meta:
            for index, (piece, inner) in enumerate(zip(main.pieces, inners)):
                piece.copy_(plan.local_part(index, mesh.shard_rank, inner.detach()))
        return main

    def pick(self, drafts: Sequence[Draft]) -> list[tuple[str, str]]:
        """How the data of each group goes over the network: its reduction and its gather, by name.

        The ranks of each mesh take part, and may raise without those of another.
        """
        if not self.options.asks_the_network:
            return [(self.options.reduction, self.options.gather)] * len(drafts)
        found = []
        for pg in (draft.mesh.shard_group for draft in drafts):  # all, before any choice can raise
            with explain_failure("search for nodes", "", pg):
                found.append(find_levels(pg, self.device, self.options.node_size))
        picked = []
        for draft, levels in zip(drafts, found):
            draft.mesh.check_order("a search for nodes", "reduction='reduce_scatter' and gather='flat'")
            widens = self._widens(choice.param for choice in draft.choices)
            picked.append(pick(self.options, levels, widens=widens))
        return picked

    @property
    def gathers_first(self) -> bool:
        """Whether backward issues its next gather before a reduction: if gradients may be exchanged.

        From what the ranks of the call agree on, not from what was picked: groups of one module may have
        other meshes, whose ranks pick something else, and the order must be that of all.
        """
        return self.options.reduction in ("all_to_all", "two_level") or (
            self.options.reduction == "auto" and self._widens(self.managed.params)
        )

    def _widens(self, params: Iterable[ManagedParam]) -> bool:
        """Whether the gradients of parameters are added in a wider dtype."""
        policy = self.options.mp_policy
        made = {gathered_dtype(param.dtype, policy.param_dtype) for param in params}
        return any((policy.reduce_dtype or dtype).itemsize > dtype.itemsize for dtype in made)

    def _make_group(self, modules: tuple[nn.Module, ...], draft: Draft, path: NetworkPath) -> ParamGroup:
        options, first = self.options, draft.choices[0]
        reduce, gather_comm = path
        params = [choice.param for choice in draft.choices]
        for param in params:
            param.register(param.sharded)
        gather: Any = first.transport
        if first.codes is not None:
            gather = partial(gather, codes=[choice.codes for choice in draft.choices if choice.codes])
        group = ParamGroup(
            params,
            modules,
            first.mesh,
            draft.plan,
            draft.main,
            self.device,
            options.mp_policy,
            options.offload_policy,
            gather=gather,
            reduce=reduce,
        )
        if gather_comm is not None:
            group.planned_comm = group.settings.gather_comm = gather_comm
        self._set_reshard(group)
        if first.transport is Chunks:
            logger.info(
                "fully_shard: %d parameters (%s, ...) are cut as shard_placement_fn says; their gather "
                "copies. For the zero-copy layout return None.",
                len(group.params),
                group.params[0].name,
            )
        return group

    def _set_reshard(self, group: ParamGroup) -> None:
        size = self.options.reshard_to
        group.settings.reshard_after_forward = self.options.reshard_after_forward is not False and size != 1
        if size == 1:
            logger.warning(
                "reshard_after_forward=1 (int) means resharding parameters to world size 1, "
                "instead of reshard_after_forward=True (bool)"
            )
        elif size is not None and size != group.mesh.shard_size:
            mesh = parking_mesh(group.mesh.shard_group, size, group.device)
            group.parking = Parking(group.transport, mesh)  # type: ignore[arg-type]  # packed ones raised


def _attach(choice: Choice, plan: GroupPlan, index: int, piece: torch.Tensor) -> None:
    """Make the sharded form of a parameter from this rank's flat ``piece``."""
    param, mesh, shard_dim = choice.param, choice.mesh, choice.shard_dim
    original, inner = param.sharded, param.inner_shape
    chunk = chunk_placement(original, shard_dim) if shard_dim is not None else None
    rule = chunk or ragged_placement(plan, index, original)
    target, placements = mesh.placements_for(original, rule)
    if shard_dim is not None:
        assert isinstance(plan, ChunkPlan)
        rows = plan.local_rows(index, mesh.shard_rank)[1]
        shape = (*inner[:shard_dim], rows, *inner[shard_dim + 1 :])
    elif mesh.shards:
        row = inner[max((len(p.dims) for p in placements if hasattr(p, "local_units")), default=0) :]
        shape = (-1 if row.numel() else 0, *row)
    else:
        shape = tuple(inner)  # no mesh dim shards: every rank has all of it
    if choice.transport is not Extensions:  # whose classes need not know views, and whose pieces are rows
        piece = piece.view(shape)
    param.attach(piece, target, placements, shard_dim or 0)
