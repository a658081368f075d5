"""What every rank of a mesh holds under a spec, as boxes of the global tensor; routes between specs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any

from torch.distributed.tensor.placement_types import Placement, Shard

from ragged_fsdp.dtensor.geometry import compute_layout, ragged_mesh_dim
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.routes import HopKind, Region, Route, chunk_of_chunks, plan_route
from ragged_fsdp.torch_internals import DTensorSpec, StridedShard, cut_order_of

__all__ = ["Division", "division_of", "is_cut", "route_between", "sends_nothing"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Division:
    """How a tensor is divided over a mesh: a spec without mesh and dtype, hence the same on every rank.

    ``cut_order`` has, for each tensor dim that ``Shard`` placements cut, their mesh dims in the order in
    which they are applied.
    """

    shape: Shape
    mesh_shape: Shape
    placements: tuple[Placement, ...]
    cut_order: tuple[tuple[int, tuple[int, ...]], ...]

    def with_placement(self, mesh_dim: int, placement: Placement) -> Division:
        """The same cuts with another placement, which cuts nothing, along ``mesh_dim``."""
        placements = (*self.placements[:mesh_dim], placement, *self.placements[mesh_dim + 1 :])
        return replace(self, placements=placements)

    def box_at(self, coordinate: Shape) -> tuple[Shape, Shape]:
        """Offsets and sizes of what the Shard placements leave on the rank at ``coordinate``."""
        cuts = ((dim, d) for dim, mesh_dims in self.cut_order for d in mesh_dims)
        return chunk_of_chunks(self.shape, ((dim, self.mesh_shape[d], coordinate[d]) for dim, d in cuts))

    def local_shape(self, coordinate: Shape) -> Shape:
        """The shape of the local tensor of the rank at ``coordinate``."""
        if ragged_mesh_dim(self.placements) is None:
            return self.box_at(coordinate)[1]
        return compute_layout(self.shape, self.mesh_shape, coordinate, self.placements).local_shape

    def regions(self) -> Callable[[Shape], Region]:
        """A function from the coordinate of a rank to its region."""
        ragged_dim = ragged_mesh_dim(self.placements)
        if ragged_dim is None:
            return cache(self._box_region)

        @cache
        def layout_of(coordinate: Shape) -> Any:
            return compute_layout(self.shape, self.mesh_shape, coordinate, self.placements)

        @cache
        def region(coordinate: Shape) -> Region:
            # all ranks of the ragged mesh dim share one layout: it is as long as the mesh dim
            first = (*coordinate[:ragged_dim], 0, *coordinate[ragged_dim + 1 :])
            return tuple(layout_of(first).boxes_of(coordinate[ragged_dim]))

        return region

    def _box_region(self, coordinate: Shape) -> Region:
        box = self.box_at(coordinate)
        return (box,) if math.prod(box[1]) else ()


def division_of(spec: DTensorSpec) -> Division | None:
    """The division of a spec; None where a rank's part is not one box (a strided shard by itself)."""
    meta: Any = spec.tensor_meta
    shape = tuple(int(size) for size in meta.shape)
    mesh_shape = spec.mesh.shape
    order: Any = spec.shard_order
    strided = any(isinstance(p, StridedShard) for p in spec.placements)
    if strided:
        order = cut_order_of(spec.placements, spec.mesh)
    if order is None:
        return None
    cut_order = tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in order)
    for dim, mesh_dims in cut_order if strided else ():
        if shape[dim] % math.prod(mesh_shape[mesh_dim] for mesh_dim in mesh_dims):
            return None  # the chunks of an uneven strided shard are not those of its order
    return Division(shape, mesh_shape, spec.placements, cut_order)


def is_cut(placement: Placement) -> bool:
    """Whether ranks along the mesh dim hold different elements."""
    return isinstance(placement, (RaggedShard, Shard, StridedShard))


@lru_cache(maxsize=8192)
def route_between(coordinate: Shape, current: Division, target: Division) -> Route:
    """The route of the rank at ``coordinate``. Pending sums whose mesh dim the target does not cut stay."""
    kinds = _hop_kinds(current, target)
    return plan_route(coordinate, current.mesh_shape, kinds, current.regions(), target.regions())


def sends_nothing(current: Division, target: Division) -> bool:
    """Whether no rank of the mesh sends anything; all ranks answer alike.

    A hop that moves nothing is the same for all ranks along its mesh dim, so one of them is asked.
    """
    kinds = _hop_kinds(current, target)
    if len(kinds) != 1:
        return not kinds
    hop_dim = kinds[0][0]
    lines = product(*(range(1 if d == hop_dim else ranks) for d, ranks in enumerate(current.mesh_shape)))
    return not any(route_between(coordinate, current, target).hops for coordinate in lines)


def _hop_kinds(current: Division, target: Division) -> list[tuple[int, HopKind]]:
    kinds = []
    for mesh_dim, (before, after) in enumerate(zip(current.placements, target.placements)):
        if current.mesh_shape[mesh_dim] == 1 or not (is_cut(before) or is_cut(after)):
            continue
        if is_cut(before) and not _stays(mesh_dim, current, target):
            kinds.append((mesh_dim, HopKind.SCATTER if is_cut(after) else HopKind.GATHER))
        elif before.is_partial():
            kinds.append((mesh_dim, HopKind.REDUCE))
    return kinds


def _stays(mesh_dim: int, current: Division, target: Division) -> bool:
    """Whether each rank's elements are all wanted at its own place along ``mesh_dim``."""
    before, after = current.placements[mesh_dim], target.placements[mesh_dim]
    if before != after or not isinstance(before, Shard):
        return False
    earlier = [
        mesh_dims[: mesh_dims.index(mesh_dim)]
        for division in (current, target)
        for dim, mesh_dims in division.cut_order
        if dim == before.dim
    ]
    return earlier[0] == earlier[1] and all(_stays(other, current, target) for other in earlier[0])
