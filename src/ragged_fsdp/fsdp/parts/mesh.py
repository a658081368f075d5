"""Which mesh dims shard and which replicate, and where a parameter's ragged placement goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.torch_internals import concatenate_meshes, flatten_mesh, root_mesh

__all__ = ["DataParallelMeshDims", "ParallelMesh", "parallel_mesh"]


@dataclass
class _DataParallelMeshDims:
    """Names of the mesh dims that FSDP shards over and replicates over; several of a kind act as one.

    Stands in for torch's class in releases that have none.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The sharding dims, as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The replicating dims, as a tuple."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


if TYPE_CHECKING:
    DataParallelMeshDims = _DataParallelMeshDims
else:
    DataParallelMeshDims = getattr(torch_fsdp, "DataParallelMeshDims", _DataParallelMeshDims)


@dataclass(eq=False)
class ParallelMesh:
    """The data-parallel mesh of a group, with the dims (shard,) or (replicate, shard)."""

    mesh: DeviceMesh
    dims: Any = None
    """``DataParallelMeshDims`` if ``spmd_mesh`` holds the data-parallel dims beside others."""
    spmd_mesh: DeviceMesh | None = None
    shards: bool = True
    """Whether the sharding dim is the user's; beside pure replication it has one rank and no placement."""
    shard_group: dist.ProcessGroup = field(init=False)
    replicate_group: dist.ProcessGroup | None = field(init=False)

    def __post_init__(self) -> None:
        self.shard_group = self.mesh.get_group(self.mesh.ndim - 1)
        self.replicate_group = self.mesh.get_group(0) if self.mesh.ndim == 2 else None
        self.shard_size = self.shard_group.size()
        self.shard_rank = self.shard_group.rank()
        self.replicate_size = self.replicate_group.size() if self.replicate_group else 1
        self._shard_at: tuple[int, ...] = ()
        """Dims of ``spmd_mesh`` that shard, and those that replicate."""
        self._replicate_at: tuple[int, ...] = ()
        if self.spmd_mesh is not None:
            at = {name: dim for dim, name in enumerate(self.spmd_mesh.mesh_dim_names or ())}
            self._shard_at = tuple(at[name] for name in self.dims.shard_names)
            self._replicate_at = tuple(at[name] for name in self.dims.replicate_names)

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The sharding dim alone, as all-gather extensions receive it."""
        return self.mesh if self.mesh.ndim == 1 else self.mesh[(self.mesh.mesh_dim_names or ())[-1]]

    def check_order(self, wish: str, instead: str) -> None:
        """Raise if the shard group counts its ranks in another order than the world.

        Groups of some of its ranks count in ascending order: they would not be where the ranks think.
        """
        ranks = dist.get_process_group_ranks(self.shard_group)
        if ranks != sorted(ranks):
            raise ValueError(
                f"fully_shard: {wish} needs a process group that counts its ranks in the order of the world, "
                f"got {ranks}; use {instead}."
            )

    def key(self) -> tuple[Any, Any]:
        """Parameters with equal keys can share a buffer."""
        return self.shard_group, self.replicate_group

    def placements_for(self, param: torch.Tensor, ragged: Any) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """The mesh and placements of a sharded parameter; ``ragged(later)`` makes its ragged placement.

        ``later`` are the placements that stand after it: they decide whether it must be strided.
        """
        lead = (Replicate(),) * (self.mesh.ndim - 1)
        if not isinstance(param, DTensor):
            return self.mesh, (*lead, ragged(()))
        if self.spmd_mesh is not None:
            return self._spmd_placements(param, ragged)
        inner = param.placements
        return _join_meshes([self.mesh, param.device_mesh]), (*lead, ragged(inner), *inner)

    def _spmd_placements(self, param: DTensor, ragged: Any) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """The parameter already lives on the full mesh: its Replicate on the shard dims becomes ragged."""
        mesh, placements = param.device_mesh, list(param.placements)
        shard_at = self._shard_at
        if not shard_at:
            return mesh, tuple(placements)
        later = tuple(p for dim, p in enumerate(placements) if dim > shard_at[-1])
        own = ragged(later)
        if len(shard_at) == 1:
            placements[shard_at[0]] = own
            return mesh, tuple(placements)
        # several shard dims act as one: the parameter moves to a mesh where they are flattened
        names: tuple[str, ...] = mesh.mesh_dim_names or ()
        skip = {*self._replicate_at, *shard_at[1:]}
        meshes: list[DeviceMesh] = []
        kept: list[Placement] = []
        for dim, placement in enumerate(placements):
            if dim == shard_at[0]:
                meshes.append(self.mesh)
                kept += [Replicate()] * (self.mesh.ndim - 1) + [own]
            elif dim not in skip:
                meshes.append(mesh[names[dim]])
                kept.append(placement)
        return _join_meshes(meshes), tuple(kept)

    def check_spmd(self, param: torch.Tensor, name: str) -> None:
        """With named dims every parameter is a DTensor on the full mesh, replicated on those dims."""
        if self.spmd_mesh is None:
            return
        if not isinstance(param, DTensor):
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh "
                f"(e.g. via distribute_module). Got plain tensor for parameter '{name}'."
            )
        if param.device_mesh is not self.spmd_mesh:
            raise ValueError(
                "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different "
                f"mesh objects for parameter '{name}': {param.device_mesh} and {self.spmd_mesh}."
            )
        names: tuple[str, ...] = self.spmd_mesh.mesh_dim_names or ()
        for index in (*self._shard_at, *self._replicate_at):
            if not isinstance(param.placements[index], Replicate):
                kind = "shard" if index in self._shard_at else "replicate"
                raise ValueError(
                    f"Expected Replicate() on DP {kind} dim '{names[index]}' (index {index}) but got "
                    f"{param.placements[index]} for parameter '{name}'"
                )

    def gradient_placements(self, grad: DTensor, wanted: Sequence[Placement]) -> tuple[Placement, ...]:
        """What a DTensor gradient must be before the reduction: data-parallel dims keep their Partial."""
        own = (*self._shard_at, *self._replicate_at)
        return tuple(grad.placements[d] if d in own else p for d, p in enumerate(wanted))


def parallel_mesh(mesh: DeviceMesh | None, dims: Any) -> ParallelMesh:
    """From what the user passed to the mesh of a group; None is all ranks."""
    mesh = _all_ranks() if mesh is None else mesh
    _check(mesh, dims)
    if dims is None:
        return ParallelMesh(mesh)
    shard, replicate = (_submesh(mesh, names) for names in (dims.shard_names, dims.replicate_names))
    if shard is None:
        assert replicate is not None
        return ParallelMesh(_with_trivial_shard(replicate), dims, mesh, shards=False)
    return ParallelMesh(shard if replicate is None else _join_meshes([replicate, shard]), dims, mesh)


def _check(mesh: DeviceMesh, dims: Any) -> None:
    """Raise unless ``mesh`` (and ``dims`` of it) can hold data parallelism."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard: mesh must be a DeviceMesh or None, got {mesh!r}.")
    if not isinstance(dims, (DataParallelMeshDims, type(None))):
        raise TypeError(f"fully_shard: dp_mesh_dims must be a DataParallelMeshDims or None, got {dims!r}.")
    if dims is None:
        if mesh.ndim not in (1, 2):
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
        return
    if dims.shard is None and dims.replicate is None:
        raise ValueError("At least one of shard or replicate must be set in dp_mesh_dims")
    if mesh.mesh_dim_names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in mesh.mesh_dim_names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {mesh.mesh_dim_names}")


def _submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else flatten_mesh(mesh[tuple(names)], "_".join(names))


def _with_trivial_shard(mesh: DeviceMesh) -> DeviceMesh:
    """Pure replication is sharding over one rank: the runtime then has a single form of mesh."""
    names = (*(mesh.mesh_dim_names or ("replicate",)), "trivial_shard")
    return DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(-1), mesh_dim_names=names)


def _join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh whose dims are those of ``meshes`` one after the other; all come from one root mesh."""
    if len(meshes) == 1:
        return meshes[0]
    if concatenate_meshes is not None:
        return concatenate_meshes(list(meshes))
    roots = {root_mesh(mesh) for mesh in meshes}
    if len(roots) != 1 or any(mesh.mesh_dim_names is None for mesh in meshes):
        raise AssertionError(
            f"FSDP requires the DP and model parallel TP/EP mesh to have the same parent mesh: {meshes}"
        )
    return roots.pop()[tuple(name for mesh in meshes for name in mesh.mesh_dim_names or ())]


def _all_ranks() -> DeviceMesh:
    """A mesh of all ranks, on the accelerator if there is one."""
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            raise ValueError(
                "fully_shard: there is no process group, and no RANK and WORLD_SIZE in the environment to "
                "make one from; start the script with `torchrun --nproc-per-node N script.py`."
            )
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator()
    device_type = accelerator.type if accelerator is not None and torch.accelerator.is_available() else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))
