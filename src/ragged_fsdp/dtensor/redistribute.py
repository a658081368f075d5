"""``redistribute_local_tensor`` for specs with a ragged side: chooses the moves, in order.

The plan is a function of the two specs alone, hence the same on every rank of the mesh. Where several mesh
dims change, or a Shard comes or goes, the two specs become :class:`Division` s: what every rank holds, as
boxes of the global tensor, and a route of all-to-alls leads from one to the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import product
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_fsdp.dtensor import moves
from ragged_fsdp.dtensor.geometry import (
    check_placements,
    compute_layout,
    is_ragged,
    ragged_layout,
    ragged_mesh_dim,
    unragged,
    with_placements,
)
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.routes import HopKind, Region, Route, chunk_of_chunks, plan_route
from ragged_fsdp.torch_internals import (
    DTensorSpec,
    StridedShard,
    cut_order_of,
    partition_value,
    reduce_value,
    stock,
)

__all__ = ["Division", "is_cut", "redistribute_cost", "redistribute_local_tensor", "route_between"]

Shape = tuple[int, ...]

# Captured before patches.py replaces the names.
_stock_cost: Callable[..., float] = stock("redistribute_cost")
_stock_redistribute: Callable[..., torch.Tensor] = stock("redistribute_local_tensor")


def redistribute_local_tensor(
    local_tensor: torch.Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    **stock_options: Any,
) -> torch.Tensor:
    """What this rank holds under ``target_spec``, given what it holds under ``current_spec``."""
    from_ragged, to_ragged = is_ragged(current_spec), is_ragged(target_spec)
    if not (from_ragged or to_ragged):
        return _stock_redistribute(
            local_tensor, current_spec, target_spec, async_op=async_op, **stock_options
        )
    if current_spec.mesh != target_spec.mesh:
        raise NotImplementedError(
            f"a ragged tensor cannot move between meshes: {current_spec.mesh} to {target_spec.mesh}; "
            "use full_tensor() and distribute_tensor."
        )
    if current_spec.mesh.get_coordinate() is None:
        return local_tensor
    for spec in (current_spec, target_spec):  # a bad spec raises before any collective
        if is_ragged(spec):
            ragged_layout(spec)
        else:
            check_placements(tuple(spec.shape), tuple(spec.mesh.shape), spec.placements)
    moved = _move(local_tensor, current_spec, target_spec, async_op, stock_options)
    return moved if async_op else moves.wait(moved)


def redistribute_cost(current_spec: DTensorSpec, target_spec: DTensorSpec) -> float:
    """What a move costs, in stock's measure: 0 where nothing is sent, that of a gather otherwise."""
    if not (is_ragged(current_spec) or is_ragged(target_spec)):
        return _stock_cost(current_spec, target_spec)
    if current_spec.placements == target_spec.placements or _sends_nothing(current_spec, target_spec):
        return 0.0
    sharded = with_placements(current_spec, unragged(current_spec.placements, Shard(0)))
    gathered = with_placements(target_spec, unragged(target_spec.placements))
    return _stock_cost(sharded, gathered)


def _sends_nothing(current: DTensorSpec, target: DTensorSpec) -> bool:
    if any(before.is_partial() and before != after for before, after in _pairs(current, target)):
        return False
    source, destination = division_of(current), division_of(target)
    return source is not None and destination is not None and sends_nothing(source, destination)


def _move(
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    async_op: bool,
    stock_options: dict[str, Any],
) -> torch.Tensor:
    """One row of the transition table, or several."""
    ragged_dim = ragged_mesh_dim(current.placements)
    if ragged_dim is not None and target.placements[ragged_dim].is_partial():
        # zeros where others hold the values: nothing is sent, and stock does the rest
        middle = _replaced(current, ragged_dim, target.placements[ragged_dim])
        after: Any = target.placements[ragged_dim]
        local = moves.partial_from_ragged(local, after, ragged_layout(current))
        return redistribute_local_tensor(local, middle, target, async_op=async_op, **stock_options)
    if _along_one_dim(current, target):
        return _move_along_one_dim(local, current, target, async_op)
    source, destination = division_of(current), division_of(target)
    if source is None or destination is None:
        return _move_through_replicate(local, current, target, async_op, stock_options)
    return _exchange(local, current.mesh, source, destination, async_op)


def _along_one_dim(current: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether only the ragged mesh dim changes, in a way that has a collective of its own.

    Pending sums of other mesh dims may be reduced besides: they act on each element alone.
    """
    sources, targets = ragged_mesh_dim(current.placements), ragged_mesh_dim(target.placements)
    mesh_dim = targets if sources is None else sources
    if sources is not None and targets is not None and sources != targets:
        return False
    for other, (before, after) in enumerate(_pairs(current, target)):
        if other == mesh_dim:
            if any(is_cut(p) and not isinstance(p, RaggedShard) for p in (before, after)):
                return False
        elif before != after and not (type(before) is Partial and after.is_replicate()):
            return False
    return True


def _move_along_one_dim(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, async_op: bool
) -> torch.Tensor:
    leaving = ragged_mesh_dim(current.placements)
    mesh_dim = ragged_mesh_dim(target.placements) if leaving is None else leaving
    assert mesh_dim is not None
    before: Any = current.placements[mesh_dim]
    after: Any = target.placements[mesh_dim]
    group = (current.mesh, mesh_dim)
    if leaving is None:
        layout = ragged_layout(target)
        if before.is_partial():
            local = moves.ragged_from_partial(local, before, layout, group)
        else:
            local = moves.ragged_from_all(local, layout)
        return _settle_others(local, current, target, mesh_dim)  # on the pieces, which are smallest
    local = _settle_others(local, current, target, mesh_dim)
    if isinstance(after, RaggedShard):
        return moves.ragged_from_ragged(local, ragged_layout(current), ragged_layout(target), group)
    return moves.all_from_ragged(local, ragged_layout(current), group, async_op=async_op)


def _settle_others(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, ragged_dim: int
) -> torch.Tensor:
    """Reduce the pending sums of the other mesh dims, element by element."""
    for mesh_dim, (before, after) in enumerate(_pairs(current, target)):
        if mesh_dim != ragged_dim and before != after:
            local = moves.wait(reduce_value(before, moves.wait(local), current.mesh, mesh_dim))
    return local


def _exchange(
    local: torch.Tensor, mesh: Any, source: Division, target: Division, async_op: bool
) -> torch.Tensor:
    """Placements of several mesh dims change, or a Shard comes or goes: all-to-alls along them."""
    pending, made_pending = [], []
    for mesh_dim, (before, after) in enumerate(zip(source.placements, target.placements)):
        if before == after:
            continue
        if type(before) is Partial:
            pending.append((mesh_dim, before))
        elif before.is_partial():  # its reduction needs the tensor as it is
            local = moves.wait(reduce_value(before, local, mesh, mesh_dim))
            source = source.with_placement(mesh_dim, Replicate())
        if after.is_partial():
            made_pending.append((mesh_dim, after))
            target = target.with_placement(mesh_dim, Replicate())
    here = tuple(mesh.get_coordinate())
    route = route_between(here, source, target)
    moved = moves.exchange(local, route, mesh, pending, async_op).view(target.local_shape(here))
    for mesh_dim, partial in made_pending:
        moved = partition_value(partial, moves.wait(moved), mesh, mesh_dim)
    return moved


def _move_through_replicate(
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    async_op: bool,
    stock_options: dict[str, Any],
) -> torch.Tensor:
    """To and from what only stock can describe: Replicate on the ragged mesh dim, stock for the others."""
    if is_ragged(current):
        open_spec = with_placements(current, unragged(current.placements))
        local = moves.wait(_move_along_one_dim(local, current, open_spec, False))
        current = open_spec
    if not is_ragged(target):
        return _stock_redistribute(local, current, target, async_op=async_op, **stock_options)
    middle = with_placements(target, unragged(target.placements))
    local = _stock_redistribute(local, current, middle, **stock_options)
    return _move_along_one_dim(local, middle, target, async_op)


def _pairs(current: DTensorSpec, target: DTensorSpec) -> list[tuple[Any, Any]]:
    return list(zip(current.placements, target.placements))


def _replaced(spec: DTensorSpec, mesh_dim: int, placement: Placement) -> DTensorSpec:
    placements = spec.placements
    return with_placements(spec, (*placements[:mesh_dim], placement, *placements[mesh_dim + 1 :]))


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
        """This division with another placement, which cuts nothing, along ``mesh_dim``."""
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
