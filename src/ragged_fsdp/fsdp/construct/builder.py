"""From managed parameters and options to groups: choose, check, plan, cut; register once all ranks agree."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from ragged_fsdp.collectives import explain_failure
from ragged_fsdp.dbuffer.checks import coordinate_of
from ragged_fsdp.fsdp.construct.call import Managed, Options
from ragged_fsdp.fsdp.construct.network import Route, pick, route
from ragged_fsdp.fsdp.gather.codes import Codes
from ragged_fsdp.fsdp.gather.packed import Chunks, Extensions, is_extended
from ragged_fsdp.fsdp.gather.tiled import Tiled
from ragged_fsdp.fsdp.gather.transport import InPlace, Parking, parking_mesh
from ragged_fsdp.fsdp.parts.members import PRODUCT_ATTRIBUTE, MainShard, ManagedParam, RowPieces, pins_memory
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
from ragged_fsdp.placement import block_numel, legal_granularity
from ragged_fsdp.policy import BlockCodes, Elements, Granularity, Rows, Tiles, Whole
from ragged_fsdp.topology import find_levels

__all__ = ["Draft", "GroupBuilder"]

logger = logging.getLogger("ragged_fsdp")


@dataclass
class _Choice:
    """What the user's functions say about one parameter."""

    param: ManagedParam
    mesh: ParallelMesh
    block: int
    shard_dim: int | None
    """The dim of an explicit ``Shard``; None leaves the cut to the planner."""
    codes: BlockCodes | None = None
    """What travels instead of values."""
    split_off: bool = False
    """Whether frozen and trainable parameters of its group were given buffers of their own."""
    tile: tuple[int, int] | None = None
    """Rows and columns of the tiles in whose order the elements lie; None is row-major."""

    @cached_property
    def transport(self) -> type[Any]:
        """How the parameter, as it came, travels; those of a group all travel alike."""
        if is_extended(self.param.sharded):
            return Extensions
        if self.codes is not None:
            return Codes if self.codes.decoded else self.param.product.transport
        if self.tile is not None:
            return Tiled
        return InPlace if self.shard_dim is None else Chunks


@dataclass
class Draft:
    """A group that is planned and cut, while nothing of it is registered."""

    choices: list[_Choice]
    """One for each of its parameters; mesh and transport are the same in all."""
    plan: GroupPlan
    main: MainShard | RowPieces

    @property
    def mesh(self) -> ParallelMesh:
        """That of its parameters."""
        return self.choices[0].mesh


@dataclass
class GroupBuilder:
    """Makes the groups of one ``fully_shard`` call."""

    options: Options
    managed: Managed
    mesh: ParallelMesh
    device: torch.device
    _meshes: dict[int, tuple[Any, ParallelMesh]] = field(default_factory=dict)

    def draft(self) -> list[Draft]:
        """Check everything, then plan and cut a group per mesh and kind; the module is not changed yet."""
        self._check_mesh(self.mesh)
        alike: dict[Any, list[_Choice]] = {}
        for param in self.managed.params:
            choice = self._checked_choice(param)
            # codes are decoded, and tiles untiled, into a buffer of one dtype
            dtype = param.dtype if choice.codes or choice.tile else None
            alike.setdefault((choice.mesh.key(), choice.transport, dtype), []).append(choice)
        return [self._draft(part) for choices in alike.values() for part in self._split(choices)]

    def build(
        self, modules: tuple[nn.Module, ...], drafts: Sequence[Draft], picked: Sequence[tuple[str, str]]
    ) -> list[ParamGroup]:
        """Register the shards and make the groups, with what was picked for each."""
        pgs = [draft.mesh.shard_group for draft in drafts]
        routes = [route(*names, pg, self.device, self.options) for names, pg in zip(picked, pgs)]
        groups = [self._make_group(modules, draft, route) for draft, route in zip(drafts, routes)]
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

    # -- checks ----------------------------------------------------------------------------------

    def _checked_choice(self, managed: ManagedParam) -> _Choice:
        """What the user's functions say about a parameter; raise if it cannot be sharded so."""
        name, param = managed.name, managed.sharded
        if not param.is_contiguous():
            raise NotImplementedError(
                f"FSDP does not support non-contiguous parameters yet: {name} "
                f"{param.shape=} {param.stride()=}"
            )
        try:
            choice = self._choose(managed)
        except Exception as error:  # the user's functions may raise anything
            if name not in str(error):
                error.add_note(f"fully_shard: the parameter is '{name}'.")
            raise
        if is_extended(param) or choice.shard_dim is not None:
            self._check_packed(choice)
        return choice

    def _check_mesh(self, mesh: ParallelMesh) -> None:
        """Raise if groups over ``mesh``, the call's or that of a parameter, cannot do what was asked for."""
        coordinate_of(mesh.mesh)  # raises where collectives would count its ranks in another order
        size, shards = self.options.reshard_to, mesh.shard_size
        if size is None:
            return
        if mesh.spmd_mesh is not None:
            raise NotImplementedError(
                "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
            )
        if size < 1 or shards % size:
            raise ValueError(
                f"If passing reshard_after_forward as an int, it should be a factor of {shards}, not {size}"
            )
        mesh.check_order("reshard_after_forward as an int", "a bool")

    def _check_packed(self, choice: _Choice) -> None:
        """Raise on what parameters that are cut by themselves cannot do."""
        name, param = choice.param.name, choice.param.sharded
        size = self.options.reshard_to
        if size not in (None, 1, choice.mesh.shard_size):
            raise NotImplementedError(
                f"{name}: a parameter with an explicit Shard or with all-gather extensions needs a bool "
                f"reshard_after_forward, got {size}."
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

    def _choose(self, managed: ManagedParam) -> _Choice:
        name, param = managed.name, managed.sharded
        mesh, placement, explicit = self._placement_choice(param)
        mesh.check_spmd(param, name)
        shapes = outer_shapes(param)
        if managed.packing is not None:  # bytes of codes and scales: cut anywhere, gathered as they are
            return _Choice(managed, mesh, 1, None)
        granularity = self._granularity(name, param, shapes)
        if isinstance(granularity, Tiles) and not mesh.shards:
            granularity = None  # every rank has all of it, in rows
        block: int | None = None
        if granularity is not None:
            try:
                blocks = [block_numel(shape, granularity) for shape in shapes if math.prod(shape)]
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            block = max(blocks, default=1)
        codes = self._codes(name, param, shapes, granularity)
        if isinstance(granularity, Tiles):
            if placement is not None and explicit:
                raise ValueError(
                    f"{name}: {granularity} and shard_placement_fn {placement} exclude each other."
                )
            tile = (granularity.rows, granularity.columns)
            return _Choice(managed, mesh, block or 1, None, codes, tile=tile)
        if codes is not None:
            block = math.lcm(block or 1, block_numel(shapes[0], codes.granularity))
        if placement is None:
            return _Choice(managed, mesh, _beside_outer_shards(param, shapes, block or 1), None, codes)
        dim = self._placement_dim(param, placement, mesh, shapes[0])
        if block is None and mesh.shards and (explicit or dim):
            return _Choice(managed, mesh, 1, dim)
        row = max(1, math.prod(shapes[0][1:])) if dim == 0 else 1  # no other dim is cut into whole rows
        return _Choice(managed, mesh, math.lcm(block or 1, row), None, codes)

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
        made = ParallelMesh(info.mesh)
        self._check_mesh(made)
        if made.key() == self.mesh.key():
            return self.mesh
        for other, mesh in self._meshes.values():
            if mesh.key() == made.key():
                raise ValueError(
                    "Params sharing the same process group must use the same FSDPMeshInfo object, but got "
                    f"different objects: {other} vs {info}"
                )
        return made

    def _granularity(
        self, name: str, param: nn.Parameter, shapes: Sequence[tuple[int, ...]]
    ) -> Granularity | None:
        """What the policy asks for."""
        policy = self.options.orig_param_policy
        granularity = policy(name, param) if policy is not None else None
        if granularity is not None and not isinstance(granularity, (Elements, Rows, Whole, Tiles)):
            raise TypeError(
                f"{name}: orig_param_policy must return Elements, Rows, Tiles, Whole or None, "
                f"got {granularity!r}."
            )
        if isinstance(granularity, Tiles):
            if is_extended(param):
                kind = type(param.data).__name__
                raise NotImplementedError(
                    f"{name}: a {kind} gathers itself by rows; it has no {granularity}."
                )
            if len(set(shapes)) > 1:
                raise NotImplementedError(
                    f"{name}: {granularity} need parts of one shape, but it is cut into {shapes}; cut it "
                    "evenly (as many experts on every rank), or answer Rows."
                )
        return granularity

    def _codes(
        self,
        name: str,
        param: nn.Parameter,
        shapes: Sequence[tuple[int, ...]],
        granularity: Granularity | None,
    ) -> BlockCodes | None:
        """The codes that the gather policy asks for; None where a parameter travels as it is."""
        policy = self.options.gather_policy
        codes = policy(name, param) if policy is not None else None
        if codes is None:
            return None
        if not isinstance(codes, BlockCodes):
            raise TypeError(f"{name}: gather_policy must return BlockCodes or None, got {codes!r}.")
        if is_extended(param) or not param.dtype.is_floating_point or param.dtype.itemsize == 1:
            raise ValueError(f"{name}: no codes are made of a {type(param.data).__name__} of {param.dtype}.")
        if len({shape[-2:] for shape in shapes}) > 1:  # of stacked matrices ranks may have any number
            raise NotImplementedError(
                f"{name}: codes need matrices of one shape, but it is cut into {shapes}; cut it evenly, or "
                "return None from gather_policy."
            )
        if not codes.decoded and not hasattr(param, PRODUCT_ATTRIBUTE):
            raise ValueError(
                f"{name}: codes that are not decoded need an FP8 product that computes with them; call "
                "ragged_fsdp.fp8.fp8_training on the model before fully_shard."
            )
        if isinstance(granularity, Tiles):  # which leave smaller tiles at the edges
            if codes.block_shape != (granularity.rows, granularity.columns):
                raise ValueError(f"{name}: {codes} of a parameter in {granularity}; use tiles of one size.")
            return codes
        try:
            codes.check(shapes[0])
        except ValueError as error:
            hint = (
                ""
                if codes.decoded
                else " Or store it in tiles: orig_param_policy=ragged_fsdp.fp8.orig_param_policy."
            )
            raise ValueError(f"{name}: {error}{hint}") from None
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

    # -- groups ----------------------------------------------------------------------------------

    def _split(self, choices: list[_Choice]) -> list[list[_Choice]]:
        """Those in each buffer: all in one, unless trainable ones would pile up on a few ranks, or
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

    def _tensors(self, choices: Sequence[_Choice]) -> GroupTensors:
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
    def _draft(self, choices: list[_Choice]) -> Draft:
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

    def _cut(self, params: Sequence[ManagedParam], plan: GroupPlan, alike: _Choice) -> MainShard | RowPieces:
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

    def _make_group(self, modules: tuple[nn.Module, ...], draft: Draft, route: Route) -> ParamGroup:
        options, first = self.options, draft.choices[0]
        reduce, gather_comm = route
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


def _attach(choice: _Choice, plan: GroupPlan, index: int, piece: torch.Tensor) -> None:
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


def _beside_outer_shards(param: torch.Tensor, shapes: Sequence[tuple[int, ...]], block: int) -> int:
    """The block raised so that no cut falls into a dim that tensor parallelism cut: rows for ``Shard(1)``.

    Uneven tensor parallelism leaves rows of different lengths, which no common cut respects; such a parameter
    is strided. The same holds for ``Shard(0)``, where every cut falls into the dim.
    """
    if not isinstance(param, DTensor) or len(set(shapes)) > 1:
        return block
    cuts = [outer for outer in param.placements if isinstance(outer, Shard) and outer.dim % param.ndim]
    return min(legal_granularity(shapes[0], Elements(block), cuts), max(1, math.prod(shapes[0])))
