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
    is_ragged,
    ragged_layout,
    ragged_mesh_dim,
    unragged,
    with_placements,
)
from ragged_fsdp.dtensor.internals import DTensorSpec, collective_module, redistribute_module
from ragged_fsdp.placement import RaggedShard

__all__ = [
    "redistribute_cost",
    "redistribute_local_tensor",
    "stock_redistribute_cost",
    "stock_redistribute_local_tensor",
]

# Captured before patches.py replaces the names.
stock_redistribute_cost: Callable[..., float] = collective_module.redistribute_cost
stock_redistribute_local_tensor: Callable[..., torch.Tensor] = redistribute_module.redistribute_local_tensor


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
    if _one_dim_move(current_spec.placements, target_spec.placements):
        moved = _move_along_one_dim(local_tensor, current_spec, target_spec, async_op)
    else:
        moved = _move_through_replicate(local_tensor, current_spec, target_spec, async_op, stock_options)
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
    if not _one_dim_move(current.placements, target.placements):
        return False
    if is_ragged(current) and is_ragged(target):
        return ragged_layout(current).counts == ragged_layout(target).counts
    entry = ragged_mesh_dim(target.placements)
    return entry is not None and current.placements[entry].is_replicate()


def _one_dim_move(current: tuple[Placement, ...], target: tuple[Placement, ...]) -> bool:
    """Whether the inner tensor is the same on both sides, so that one move along one mesh dim does."""
    sources, targets = ragged_mesh_dim(current), ragged_mesh_dim(target)
    if sources is not None and targets is not None and sources != targets:
        return False
    mesh_dim = sources if sources is not None else targets
    assert mesh_dim is not None
    for other, (before, after) in enumerate(zip(current, target)):
        if other != mesh_dim and before != after and not _commutes(before, after):
            return False
    for placement, all_placements in ((current[mesh_dim], current), (target[mesh_dim], target)):
        # Shard(d) here and again further right: the right one cuts the result of this one, so what
        # the others leave is not what this one cuts.
        if isinstance(placement, Shard) and any(
            isinstance(later, Shard) and later.dim == placement.dim
            for later in all_placements[mesh_dim + 1 :]
        ):
            return False
        if not isinstance(placement, (RaggedShard, Shard, Partial, Replicate)):
            return False
    return True


def _commutes(before: Placement, after: Placement) -> bool:
    """Changes elsewhere that act on each element alone, so they may run on ragged pieces."""
    return (type(before) is Partial and after.is_replicate()) or (
        before.is_replicate() and type(after) is Partial
    )


def _move_along_one_dim(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, async_op: bool
) -> torch.Tensor:
    mesh_dim = ragged_mesh_dim(current.placements)
    leaves_ragged = mesh_dim is not None
    if mesh_dim is None:
        mesh_dim = ragged_mesh_dim(target.placements)
    assert mesh_dim is not None
    if leaves_ragged:  # the pieces are smallest now
        local = _change_others(local, current, target, mesh_dim)
    local = _move(local, current, target, mesh_dim, async_op)
    if not leaves_ragged:
        local = _change_others(local, current, target, mesh_dim)
    return local


def _change_others(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, ragged_dim: int
) -> torch.Tensor:
    """Reduce (or split) the Partials of the other mesh dims, element by element."""
    for mesh_dim, (before, after) in enumerate(zip(current.placements, target.placements)):
        if mesh_dim == ragged_dim or before == after:
            continue
        if after.is_replicate():
            local = moves.wait(before._reduce_value(moves.wait(local), current.mesh, mesh_dim))
        else:
            local = after._partition_value(moves.wait(local), current.mesh, mesh_dim)
    return local


def _move(
    local: torch.Tensor, current: DTensorSpec, target: DTensorSpec, mesh_dim: int, async_op: bool
) -> torch.Tensor:
    """One row of the transition table."""
    before: Any = current.placements[mesh_dim]
    after: Any = target.placements[mesh_dim]
    group = (current.mesh, mesh_dim)
    if isinstance(before, RaggedShard):
        source = ragged_layout(current)
        if isinstance(after, RaggedShard):
            return moves.ragged_from_ragged(local, source, ragged_layout(target), group)
        if isinstance(after, Shard):
            return moves.shard_from_ragged(local, source, after.dim, group)
        if after.is_partial():
            return moves.partial_from_ragged(local, after, source)
        return moves.all_from_ragged(local, source, group, async_op=async_op)
    layout = ragged_layout(target)
    if isinstance(before, Shard):
        return moves.ragged_from_shard(local, layout, before.dim, group)
    if before.is_partial():
        return moves.ragged_from_partial(local, before, layout, group)
    return moves.ragged_from_all(local, layout)


def _move_through_replicate(
    local: torch.Tensor,
    current: DTensorSpec,
    target: DTensorSpec,
    async_op: bool,
    stock_options: dict[str, Any],
) -> torch.Tensor:
    """Replicate on the ragged mesh dim, stock moves for the others, then ragged again if asked."""
    if is_ragged(current):
        open_spec = with_placements(current, unragged(current.placements))
        local = moves.wait(_move_along_one_dim(local, current, open_spec, False))
        current = open_spec
    if not is_ragged(target):
        return stock_redistribute_local_tensor(local, current, target, async_op=async_op, **stock_options)
    entry = ragged_mesh_dim(target.placements)
    assert entry is not None
    # A pending sum stays pending until the last move, where it is a reduce-scatter.
    kept = current.placements[entry] if current.placements[entry].is_partial() else Replicate()
    middle = with_placements(target, unragged(target.placements, kept))
    if current.placements != middle.placements:
        local = stock_redistribute_local_tensor(local, current, middle, **stock_options)
    return _move_along_one_dim(local, middle, target, async_op)
