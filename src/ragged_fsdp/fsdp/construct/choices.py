"""What a call's options say about each of its parameters, checked: how it may be cut and how it travels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ragged_fsdp.dbuffer.checks import coordinate_of
from ragged_fsdp.fsdp.construct.call import Options
from ragged_fsdp.fsdp.gather.codes import Codes
from ragged_fsdp.fsdp.gather.packed import Chunks, Extensions, is_extended
from ragged_fsdp.fsdp.gather.tiled import Tiled
from ragged_fsdp.fsdp.gather.transport import InPlace
from ragged_fsdp.fsdp.parts.members import PRODUCT_ATTRIBUTE, ManagedParam
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.parts.plan import outer_shapes
from ragged_fsdp.placement import block_numel, legal_granularity
from ragged_fsdp.policy import BlockCodes, Elements, Granularity, Rows, Tiles, Whole

__all__ = ["Choice", "Choices"]


@dataclass
class Choice:
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
class Choices:
    """Asks the functions of one call about its parameters."""

    options: Options
    mesh: ParallelMesh
    _meshes: dict[int, tuple[Any, ParallelMesh]] = field(default_factory=dict)

    def of(self, managed: ManagedParam) -> Choice:
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

    def check_mesh(self, mesh: ParallelMesh) -> None:
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

    def _check_packed(self, choice: Choice) -> None:
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

    def _choose(self, managed: ManagedParam) -> Choice:
        name, param = managed.name, managed.sharded
        mesh, placement, explicit = self._placement_choice(param)
        mesh.check_spmd(param, name)
        shapes = outer_shapes(param)
        if managed.packing is not None:  # bytes of codes and scales: cut anywhere, gathered as they are
            return Choice(managed, mesh, 1, None)
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
            return Choice(managed, mesh, block or 1, None, codes, tile=tile)
        if codes is not None:
            block = math.lcm(block or 1, block_numel(shapes[0], codes.granularity))
        if placement is None:
            return Choice(managed, mesh, _beside_outer_shards(param, shapes, block or 1), None, codes)
        dim = self._placement_dim(param, placement, mesh, shapes[0])
        if block is None and mesh.shards and (explicit or dim):
            return Choice(managed, mesh, 1, dim)
        row = max(1, math.prod(shapes[0][1:])) if dim == 0 else 1  # no other dim is cut into whole rows
        return Choice(managed, mesh, math.lcm(block or 1, row), None, codes)

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
        self.check_mesh(made)
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


def _beside_outer_shards(param: torch.Tensor, shapes: Sequence[tuple[int, ...]], block: int) -> int:
    """The block raised so that no cut falls into a dim that tensor parallelism cut: rows for ``Shard(1)``.

    Uneven tensor parallelism leaves rows of different lengths, which no common cut respects; such a parameter
    is strided. The same holds for ``Shard(0)``, where every cut falls into the dim.
    """
    if not isinstance(param, DTensor) or len(set(shapes)) > 1:
        return block
    cuts = [outer for outer in param.placements if isinstance(outer, Shard) and outer.dim % param.ndim]
    return min(legal_granularity(shapes[0], Elements(block), cuts), max(1, math.prod(shapes[0])))
