"""``redistribute_local_tensor`` for specs with a ragged side: chooses the moves, in order.

The plan is a function of the two specs alone, hence the same on every rank of the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from ragged_fsdp.dtensor import moves
from ragged_fsdp.dtensor.geometry import (
    check_placements,
    is_ragged,
    ragged_layout,
    ragged_mesh_dim,
    unragged,
    with_placements,
)
from ragged_fsdp.dtensor.regions import Division, division_of, is_cut, route_between, sends_nothing
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.torch_internals import DTensorSpec, partition_value, reduce_value, stock

__all__ = [
    "redistribute_cost",
    "redistribute_local_tensor",
    "stock_redistribute_cost",
    "stock_redistribute_local_tensor",
]

# Captured before patches.py replaces the names.
stock_redistribute_cost: Callable[..., float] = stock("redistribute_cost")
stock_redistribute_local_tensor: Callable[..., torch.Tensor] = stock("redistribute_local_tensor")


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
        return stock_redistribute_local_tensor(
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
        return stock_redistribute_cost(current_spec, target_spec)
    if current_spec.placements == target_spec.placements or _sends_nothing(current_spec, target_spec):
        return 0.0
    sharded = with_placements(current_spec, unragged(current_spec.placements, Shard(0)))
    gathered = with_placements(target_spec, unragged(target_spec.placements))
    return stock_redistribute_cost(sharded, gathered)


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
        return stock_redistribute_local_tensor(local, current, target, async_op=async_op, **stock_options)
    middle = with_placements(target, unragged(target.placements))
    local = stock_redistribute_local_tensor(local, current, middle, **stock_options)
    return _move_along_one_dim(local, middle, target, async_op)


def _pairs(current: DTensorSpec, target: DTensorSpec) -> list[tuple[Any, Any]]:
    return list(zip(current.placements, target.placements))


def _replaced(spec: DTensorSpec, mesh_dim: int, placement: Placement) -> DTensorSpec:
    placements = spec.placements
    return with_placements(spec, (*placements[:mesh_dim], placement, *placements[mesh_dim + 1 :]))
