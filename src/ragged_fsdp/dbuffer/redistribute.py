"""From placements to placements, by the collective that each change needs.

Along a mesh dim that cuts the buffer (a *level*):

    =========  =========  ====================================================
    from       to         operation
    =========  =========  ====================================================
    Shard(0)   Replicate  all-gather in place: the shard is a slot of the result
    Partial    Shard(0)   reduce-scatter in place: the result is a slot of the source
    Partial    Replicate  all-reduce in place
    Replicate  Shard(0)   none: a view of the slot
    any        the same   none
    any        Partial    raises
    =========  =========  ====================================================

Along every other mesh dim Partial to Replicate is an all-reduce of what the rank then holds, so
(Partial, Partial) to (Replicate, Shard(0)) is a reduce-scatter and an all-reduce of the shard.

With several levels, reductions go from the last level to the first and gathers from the first to the last:
over (node, local) a reduction adds inside the node before anything leaves it, and a gather brings each
rank's slots from the other nodes once, then shares them inside. The middle of such a move is a buffer of
its own. Where a level before the one that changes is held whole, what changes is not one run but one per
slot of that level, with a collective each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.collectives import Comm, all_reduce_, reduce_op, wait_all

if TYPE_CHECKING:
    from ragged_fsdp.dbuffer.buffer import DBuffer

__all__ = ["Move", "plan_move"]

Move = Callable[["DBuffer", "DBuffer | None", bool, bool, Comm], "tuple[DBuffer, Any]"]
"""From (source, out, average, async_op, comm) to the result and the works it still needs."""


def plan_move(source: DBuffer, target: tuple[Placement, ...], out: DBuffer | None) -> Move:
    """How a buffer like ``source`` gets the placements ``target``; arguments have been checked."""
    changes = [dim for dim, (have, want) in enumerate(zip(source.placements, target)) if have != want]
    if any(isinstance(source.placements[dim], Partial) for dim in changes):
        source.check_arithmetic("a reduction")
    # a level of one rank holds the same whatever its placement: it must not make the move one in steps
    levels = [dim for dim in source.levels if source.mesh.size(dim) > 1] or [source.levels[-1]]
    moved = [dim for dim in changes if dim in levels or source.mesh.size(dim) > 1]
    if out is not None and len(levels) == 1 and moved == levels:
        group = source.mesh.get_group(levels[0])
        have, want = source.placements[levels[0]], target[levels[0]]
        if isinstance(have, Shard) and isinstance(want, Replicate):
            return _gather_alone(group, source, out)
        if isinstance(have, Partial) and isinstance(want, Shard) and out.dtype == source.dtype:
            return _reduce_alone(group)
    order = _order(source, target, changes)
    return lambda source, out, *how: _in_steps(source, target, order, out, _How(*how))


def _gather_alone(group: Any, source: DBuffer, out: DBuffer) -> Move:
    """The gather of every step of a training: one level, into a buffer that is there."""
    alone = group.size() == 1
    in_one_kernel = source.is_uniform and out.is_uniform and source.device == out.device

    def gather(source: DBuffer, out: Any, average: bool, async_op: bool, comm: Comm) -> tuple[DBuffer, Any]:
        if in_one_kernel:
            out.slot.copy_(source.flat)
        elif source is not out.slot_buffer:
            out.slot_buffer.copy_(source, non_blocking=source.pin_memory)
        return out, None if alone else comm.gather(out.flat, out.slot, group, async_op=async_op)

    return gather


def _reduce_alone(group: Any) -> Move:
    """The reduction of every step of a training: one level, into a buffer of the sum's dtype."""
    alone = group.size() == 1

    def reduce(source: DBuffer, out: Any, average: bool, async_op: bool, comm: Comm) -> tuple[DBuffer, Any]:
        if not alone:
            op = reduce_op(average)
            return out, comm.reduce(out.flat, source.flat, group, op=op, async_op=async_op)
        if out.flat.data_ptr() != source.slot.data_ptr():
            out.flat.copy_(source.slot)
        return out, None

    return reduce


class _How(NamedTuple):
    """What all collectives of one move have in common."""

    average: bool
    async_op: bool
    comm: Comm


def _in_steps(
    source: DBuffer, target: tuple[Placement, ...], order: Sequence[int], out: DBuffer | None, how: _How
) -> tuple[DBuffer, Any]:
    """Change one mesh dim after the other; only the last collectives are still under way afterwards."""
    result: DBuffer = source
    works: list[Any] = []
    for dim in order:
        wait_all(works)  # this level sends what the last one brought
        have, want = result.placements[dim], target[dim]
        placements = (*result.placements[:dim], want, *result.placements[dim + 1 :])
        into = out if placements == target else None
        if isinstance(have, Shard):
            result, works = _gather_level(result, dim, placements, into, how)
        elif isinstance(have, Replicate):
            result, works = _slice_level(result, dim, placements), []
        elif isinstance(want, Shard):
            result, works = _reduce_level(result, dim, placements, into, how)
        else:
            result, works = _all_reduce(result, dim, placements, how)
    if out is not None and result is not out:
        wait_all(works)
        return out.copy_(result), None
    return result, works


def _order(source: DBuffer, target: tuple[Placement, ...], changes: Sequence[int]) -> list[int]:
    """Reduce from the last level to the first, all-reduce the little that is left, cut, gather."""

    def turn(dim: int) -> tuple[int, int]:
        have, want = source.placements[dim], target[dim]
        if isinstance(have, Partial):
            return (0, -dim) if isinstance(want, Shard) else (1, dim)
        return (2, dim) if isinstance(have, Replicate) else (3, dim)

    return sorted(changes, key=turn)


def _runs(buffer: DBuffer, dim: int) -> int:
    """Into how many runs a rank's part of a level falls: one per slot of levels before it that is held."""
    before = buffer.levels[: buffer.levels.index(dim)]
    return math.prod(buffer.mesh.size(d) for d in before if not isinstance(buffer.placements[d], Shard))


def _gather_level(
    source: DBuffer, dim: int, placements: tuple[Placement, ...], out: DBuffer | None, how: _How
) -> tuple[DBuffer, list[Any]]:
    full = out if out is not None else source.with_placements(placements)
    ranks, mine, group = full.mesh.size(dim), full.coordinate[dim], full.mesh.get_group(dim)
    if full.dtypes != source.dtypes:  # cast first: what is sent has the dtype of the result
        source = full.with_placements(source.placements).copy_(source)
    runs = _runs(full, dim)
    wholes, parts = full.flat.view(runs, ranks, -1), source.flat.view(runs, -1)
    works = []
    for whole, part in zip(wholes, parts):
        slot = whole[mine]
        slot.copy_(part)
        if ranks > 1:
            works.append(how.comm.gather(whole.view(-1), slot, group, async_op=how.async_op))
    return full, works


def _reduce_level(
    source: DBuffer, dim: int, placements: tuple[Placement, ...], out: DBuffer | None, how: _How
) -> tuple[DBuffer, list[Any]]:
    ranks, mine, group = source.mesh.size(dim), source.coordinate[dim], source.mesh.get_group(dim)
    runs, op = _runs(source, dim), reduce_op(how.average)
    if out is not None and out.dtype == source.dtype:
        shard = out
    else:
        shard = source.part_as(dim, placements) if runs == 1 else source.with_placements(placements)
    works = []
    for whole, part in zip(source.flat.view(runs, ranks, -1), shard.flat.view(runs, -1)):
        if ranks > 1:
            works.append(how.comm.reduce(part, whole.view(-1), group, op=op, async_op=how.async_op))
        elif part.data_ptr() != whole[mine].data_ptr():
            part.copy_(whole[mine])
    return shard, works


def _slice_level(source: DBuffer, dim: int, placements: tuple[Placement, ...]) -> DBuffer:
    runs = _runs(source, dim)
    if runs == 1:
        return source.part_as(dim, placements)
    made = source.with_placements(placements)
    parts = source.flat.view(runs, source.mesh.size(dim), -1)[:, source.coordinate[dim]]
    made.flat.view(runs, -1).copy_(parts)
    return made


def _all_reduce(
    source: DBuffer, dim: int, placements: tuple[Placement, ...], how: _How
) -> tuple[DBuffer, list[Any]]:
    works = []
    if source.mesh.size(dim) > 1:
        group = source.mesh.get_group(dim)
        works.append(all_reduce_(source.flat, group, op=reduce_op(how.average), async_op=how.async_op))
    return source.now_has(placements), works
