"""How a parameter is spread over ranks, as the plan of an exchange group needs it.

Which mesh dims take part. A mesh dim that shards the batch dims of an expert tensor beside another
sharded mesh dim (expert parallelism) leaves whole matrices on its ranks: it is *local*, and the ranks
of each of its coordinates plan and exchange among themselves. All other dims are *exchanged* over:
``RaggedShard`` and ``Shard`` cut matrices, ``Replicate`` makes replicas that share the work.

=====================================  ==========================================================
parameter                              exchange group
=====================================  ==========================================================
plain tensor                           none: this process does all of it
DTensor, 1-D mesh                      the mesh
(Replicate, Shard/Ragged): HSDP        both dims, flattened
(Strided ragged/Shard, Shard(0)): EP   the first dim, one group per expert-parallel coordinate
(Ragged/Shard, Shard(-1)): TP          both dims, flattened
Partial                                raises
=====================================  ==========================================================
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ragged_fsdp.dtensor.geometry import RaggedLayout, compute_layout, ragged_mesh_dim, shard_box
from ragged_fsdp.optim.matrices import Flattened, MatrixRule, matrix_shape
from ragged_fsdp.optim.muon_plan import Holding, ParameterLayout
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.routes import Box
from ragged_fsdp.torch_internals import StridedShard

__all__ = ["Spread", "exchange_group", "parameter_layout", "spread_of"]

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Spread:
    """The exchange group of a parameter: the mesh dims exchanged over and its global ranks, rising.

    Without mesh dims the parameter is local, and ``ranks`` is (0,) in every process. ``coordinate`` is this
    rank's place in the mesh.
    """

    ranks: tuple[int, ...]
    mesh: DeviceMesh | None
    mesh_dims: tuple[int, ...]
    coordinate: tuple[int, ...] = ()

    @property
    def index(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(dist.get_rank()) if self.mesh_dims else 0


_LOCAL_RANKS = (0,)
# Per default group, so that groups of a destroyed world are not used in the next one.
_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()


def spread_of(parameter: Tensor, rule: MatrixRule) -> Spread:
    """Which ranks exchange the matrices of a parameter."""
    if not isinstance(parameter, DTensor):
        return Spread(_LOCAL_RANKS, None, ())
    mesh, placements = parameter.device_mesh, parameter.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in the mesh {mesh} of the parameter.")
    dims = _exchange_dims(mesh, placements, parameter.ndim, rule)
    if not dims:
        return Spread(_LOCAL_RANKS, mesh, (), tuple(coordinate))
    index = tuple(slice(None) if d in dims else coordinate[d] for d in range(mesh.ndim))
    return Spread(tuple(sorted(mesh.mesh[index].flatten().tolist())), mesh, dims, tuple(coordinate))


def exchange_group(spread: Spread) -> dist.ProcessGroup | None:
    """The process group of a spread: the mesh's own where there is one, else made once and kept."""
    if spread.mesh is None or not spread.mesh_dims:
        return None
    if len(spread.mesh_dims) == 1:
        group = spread.mesh.get_group(spread.mesh_dims[0])
        if tuple(dist.get_process_group_ranks(group)) == spread.ranks:
            return group
    if spread.ranks == tuple(range(dist.get_world_size())):
        return dist.group.WORLD
    world = dist.group.WORLD
    assert world is not None  # there is a mesh
    made = _GROUPS.setdefault(world, {})
    if spread.ranks not in made:
        # Only members come here, so only members may have to take part in making the group.
        made[spread.ranks] = dist.new_group(list(spread.ranks), use_local_synchronization=True)
    return made[spread.ranks]


def parameter_layout(
    name: str, parameter: Tensor, rule: MatrixRule, spread: Spread, family: int
) -> ParameterLayout:
    """The layout of one parameter in its exchange group, checked against the local tensor."""
    if spread.mesh is None:
        size = matrix_shape(parameter.shape, rule)
        whole = Holding((0, 0, 0), size, 0, math.prod(size))
        return ParameterLayout(name, tuple(parameter.shape), rule, (whole,), (0,), family)
    assert isinstance(parameter, DTensor)  # a spread with a mesh comes from one
    placements = tuple(parameter.placements)
    try:
        shape, holdings, replicas = _shards(tuple(parameter.shape), placements, rule, spread)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    mine, found = holdings[spread.index].numel, parameter.to_local().numel()
    if mine != found:
        raise ValueError(
            f"{name}: placements {placements} imply {mine} local elements, the tensor has {found}."
        )
    return ParameterLayout(name, shape, rule, holdings, replicas, family)


@lru_cache(maxsize=1024)
def _shards(
    shape: tuple[int, ...], placements: tuple[Placement, ...], rule: MatrixRule, spread: Spread
) -> tuple[tuple[int, ...], tuple[Holding, ...], tuple[int, ...]]:
    """The shape that the ranks of a spread share, what each of them holds of it, and in which replica.

    Layers repeat, and there are as many holdings as ranks: hence the cache.
    """
    mesh = spread.mesh
    assert mesh is not None
    mesh_shape = mesh.shape
    local = [Replicate() if d in spread.mesh_dims else p for d, p in enumerate(placements)]
    inner = shard_box(shape, mesh_shape, spread.coordinate, local)
    coordinates = _coordinates(spread, mesh_shape)
    holdings = _holdings(shape, mesh_shape, coordinates, placements, rule, inner)
    replicas = []
    for coordinate in coordinates:
        replica = 0
        for d in spread.mesh_dims:
            if isinstance(placements[d], Replicate):
                replica = replica * mesh_shape[d] + coordinate[d]
        replicas.append(replica)
    return inner[1], tuple(holdings), tuple(replicas)


def _exchange_dims(
    mesh: DeviceMesh, placements: Sequence[Placement], ndim: int, rule: MatrixRule
) -> tuple[int, ...]:
    dims = [d for d in range(mesh.ndim) if mesh.size(d) > 1]
    for d in dims:
        if not isinstance(placements[d], (Shard, StridedShard, RaggedShard, Replicate)):
            raise ValueError(
                f"placement {placements[d]!r} has no whole elements; reduce it before the optimizer."
            )
    sharded = [p for p in placements if not isinstance(p, Replicate)]
    if len(sharded) < 2 or isinstance(rule, Flattened):
        return tuple(dims)

    def whole_matrices(placement: Placement) -> bool:
        plain = isinstance(placement, Shard) and not isinstance(placement, StridedShard)
        return plain and placement.dim % ndim < ndim - 2

    return tuple(d for d in dims if not whole_matrices(placements[d]))


def _coordinates(spread: Spread, mesh_shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The places in the mesh of the ranks of an exchange group, in the order of the ranks."""
    here, dims = spread.coordinate, spread.mesh_dims
    assert spread.mesh is not None
    ranges = [range(size) if d in dims else (here[d],) for d, size in enumerate(mesh_shape)]
    index = tuple(slice(None) if d in dims else here[d] for d in range(len(mesh_shape)))
    ranks = spread.mesh.mesh[index].flatten().tolist()
    return [coordinate for _, coordinate in sorted(zip(ranks, itertools.product(*ranges)))]


def _holdings(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinates: list[tuple[int, ...]],
    placements: tuple[Placement, ...],
    rule: MatrixRule,
    inner: Box,
) -> list[Holding]:
    """What the ranks at these coordinates hold, relative to the ``inner`` box that they share."""

    def matrix_box(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[Triple, Triple]:
        relative = [offset - base for offset, base in zip(offsets, inner[0])]
        return _matrix_box(inner[1], relative, sizes, rule)

    ragged_dim = ragged_mesh_dim(placements)
    if ragged_dim is None:
        boxes = [shard_box(shape, mesh_shape, c, placements) for c in coordinates]
        return [Holding(*matrix_box(*box), 0, math.prod(box[1])) for box in boxes]
    cut: dict[tuple[int, ...], tuple[RaggedLayout, tuple[Triple, Triple]]] = {}
    holdings = []
    for coordinate in coordinates:
        # Ranks that differ only along the ragged dim and in replicas cut the same box.
        outer = tuple(c if isinstance(p, Shard) else 0 for c, p in zip(coordinate, placements))
        if outer not in cut:
            layout = compute_layout(shape, mesh_shape, outer, placements)
            cut[outer] = layout, matrix_box(layout.inner_offset, layout.inner_shape)
        layout, box = cut[outer]
        start, count = (values[coordinate[ragged_dim]] for values in (layout.starts, layout.counts))
        holdings.append(Holding(*box, start, start + count))
    return holdings


def _matrix_box(
    shape: tuple[int, ...], offsets: Sequence[int], sizes: Sequence[int], rule: MatrixRule
) -> tuple[Triple, Triple]:
    """A box of the parameter as a box of (batches, rows, columns); other cuts have no such form."""
    first, last = (1, len(shape)) if isinstance(rule, Flattened) else (1, len(shape) - 2)
    if any(offsets[d] or sizes[d] != shape[d] for d in range(first, last)):
        raise ValueError(
            f"a shard cuts one of the dims {tuple(range(first, last))} of shape {shape}; only the first dim "
            "and the rows and columns of the matrices may be cut."
        )
    if isinstance(rule, Flattened):
        rest = math.prod(shape[1:])
        return (0, offsets[0], 0), (1, sizes[0], rest)
    if len(shape) == 2:
        return (0, offsets[0], offsets[1]), (1, sizes[0], sizes[1])
    middle = math.prod(shape[1:-2])
    return (offsets[0] * middle, *offsets[-2:]), (sizes[0] * middle, *sizes[-2:])  # type: ignore[return-value]
