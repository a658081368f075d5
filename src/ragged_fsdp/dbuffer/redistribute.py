"""From placements to placements, by the collective that each change needs.

Along the mesh dim that shards:

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

Along every other mesh dim: Partial to Replicate is an all-reduce of what the rank then holds, so
(Partial, Partial) to (Replicate, Shard(0)) is a reduce-scatter and an all-reduce of the shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp import collectives
from ragged_fsdp.dbuffer.checks import wait_all

if TYPE_CHECKING:
    from ragged_fsdp.dbuffer.buffer import DBuffer

__all__ = ["redistribute"]


def redistribute(
    source: DBuffer, target: tuple[Placement, ...], out: DBuffer | None, average: bool, async_op: bool
) -> tuple[DBuffer, list[Any]]:
    """``source`` in the placements ``target``, and the works to wait for; arguments have been checked."""
    have, want = source.placements[-1], target[-1]
    if any(isinstance(old, Partial) and old != new for old, new in zip(source.placements, target)):
        source.check_arithmetic("a reduction")
    works: list[Any] = []
    result = source
    if isinstance(want, Shard) and isinstance(have, Partial):
        result = _reduce_scatter(result, out, average, works, async_op)
    _all_reduce(result, target, average, works, async_op)
    if isinstance(want, Replicate) and isinstance(have, Shard):
        result = _all_gather(result, out, works, async_op)
    elif isinstance(want, Shard) and isinstance(have, Replicate):
        result = result.slot_as(target)
    if out is not None and result is not out:
        wait_all(works)
        return out.copy_(result), []
    return result, works


def _all_gather(source: DBuffer, out: DBuffer | None, works: list[Any], async_op: bool) -> DBuffer:
    full = out or source.with_placements((*source.placements[:-1], Replicate()))
    wait_all(works)
    full.slot_buffer.copy_(source)
    if source.ranks > 1:
        works[:] = [collectives.all_gather_(full.flat, full.slot, source.group, async_op=async_op)]
    return full


def _reduce_scatter(
    source: DBuffer, out: DBuffer | None, average: bool, works: list[Any], async_op: bool
) -> DBuffer:
    placements = (*source.placements[:-1], Shard(0))
    direct = out is not None and out.dtype == source.dtype and out.placements == placements
    shard = out if out is not None and direct else source.slot_as(placements)
    if source.ranks == 1:
        return shard if shard.slot.data_ptr() == source.slot.data_ptr() else shard.copy_(source.slot_buffer)
    op = collectives.reduce_op(average)
    works.append(collectives.reduce_scatter(shard.flat, source.flat, source.group, op=op, async_op=async_op))
    return shard


def _all_reduce(
    buffer: DBuffer, target: tuple[Placement, ...], average: bool, works: list[Any], async_op: bool
) -> None:
    """Reduce in place over every mesh dim that goes from Partial to Replicate."""
    done = list(buffer.placements)
    for dim, (have, want) in enumerate(zip(buffer.placements, target)):
        if not (isinstance(have, Partial) and isinstance(want, Replicate)):
            continue
        wait_all(works)
        works.clear()
        if buffer.mesh.size(dim) > 1:
            op, group = collectives.reduce_op(average), buffer.mesh.get_group(dim)
            works.append(collectives.all_reduce_(buffer.flat, group, op=op, async_op=async_op))
        done[dim] = want
    if buffer.placements != tuple(done):
        buffer.placements = tuple(done)
        buffer.__dict__.pop("slot_buffer", None)  # it has the placements of before
