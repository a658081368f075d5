"""What one rank does in one bucket of an exchange plan: batches, packed offsets, splits; no torch.

Memory of a bucket on a rank, all in the dtype of the iteration:

* ``batches``: the slabs this rank is the root of, one (count, rows, columns) tensor per kind of slab;
* an outgoing and an incoming packed buffer per direction, ordered by the rank at the other end, then
  by task, then by copy. Both ends walk the same tasks in the same order, so a position in one buffer
  is the same position in the other.

A *segment* of the local tensor is either packed for another root, kept (its root is this rank), or,
with replicas, neither: then only the momentum is updated, because another replica sends it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ragged_fsdp.optim.matrices import SubMatrix
from ragged_fsdp.optim.muon_plan import Copy, ExchangePlan, Task

__all__ = ["BatchKind", "BucketProgram", "Packed", "Route", "Segment", "bucket_program"]


@dataclass(frozen=True)
class BatchKind:
    """Slabs that form one batch: equal hyper-parameters, shape and matrices."""

    family: int
    rows: int
    columns: int
    matrices: tuple[SubMatrix, ...]


@dataclass(frozen=True)
class Segment:
    """Elements of a parameter's flat local tensor; ``copy.slab_*`` locate them where they go or come from.

    ``batch`` is the index of the batch that holds them, or -1 for the packed buffer, where they are
    contiguous from ``copy.slab_start``. Not ``sent``: another replica sends the same elements.
    """

    parameter: int
    kind: BatchKind
    copy: Copy
    batch: int = -1
    sent: bool = True


@dataclass(frozen=True)
class Packed:
    """Elements of a batch, from ``copy.slab_start`` on, and of a packed buffer, from ``copy.local_start``."""

    batch: int
    copy: Copy


@dataclass(frozen=True)
class Route:
    """One packed all-to-all: elements to and from each rank of the group."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True)
class BucketProgram:
    """All copies and transfers of one rank in one bucket; see the module's description."""

    batches: tuple[tuple[BatchKind, int], ...]
    outgoing: tuple[Segment, ...]
    kept: tuple[Segment, ...]
    elsewhere: tuple[Segment, ...]
    incoming: tuple[Packed, ...]
    gather: Route
    results: tuple[Packed, ...]
    returned: tuple[Segment, ...]
    scatter: Route
    moves: bool
    """Whether any rank of the group sends anything in this bucket (the same answer on all of them)."""


def bucket_program(plan: ExchangePlan, bucket: int, rank: int) -> BucketProgram:
    """The part of ``rank`` in a bucket."""
    tasks = plan.buckets[bucket]
    batches, slots = _batches(plan, tasks, rank)
    kept: list[Segment] = []
    elsewhere: list[Segment] = []
    outgoing: list[list[Segment]] = [[] for _ in range(plan.ranks)]
    returned: list[list[Segment]] = [[] for _ in range(plan.ranks)]
    incoming: list[list[Packed]] = [[] for _ in range(plan.ranks)]
    results: list[list[Packed]] = [[] for _ in range(plan.ranks)]
    for task in tasks:
        own = plan.copies(task, rank)
        kind = _kind(plan, task)
        if task.root == rank:
            batch, base = slots[task]
            kept += [Segment(task.parameter, kind, _shifted(copy, base), batch) for copy in own]
            for other in range(plan.ranks):
                if other == rank:
                    continue
                packed = [Packed(batch, _shifted(copy, base)) for copy in plan.copies(task, other)]
                results[other] += packed
                if plan.gathers_from(task, other):
                    incoming[other] += packed
        else:
            segments = [Segment(task.parameter, kind, copy) for copy in own]
            returned[task.root] += segments
            if plan.gathers_from(task, rank):
                outgoing[task.root] += segments
            else:
                elsewhere += [replace(segment, sent=False) for segment in segments]
    return BucketProgram(
        batches,
        _pack_segments(outgoing),
        _merged(kept),
        _merged(elsewhere),
        _pack_batches(incoming),
        Route(_numels(outgoing), _numels(incoming)),
        _pack_batches(results),
        _pack_segments(returned),
        Route(_numels(results), _numels(returned)),
        plan.ranks > 1 and not all(plan.stays(task) for task in tasks),
    )


def _kind(plan: ExchangePlan, task: Task) -> BatchKind:
    slab = plan.slab(task)
    return BatchKind(plan.parameters[task.parameter].family, slab.rows, slab.columns, slab.matrices)


def _batches(
    plan: ExchangePlan, tasks: tuple[Task, ...], rank: int
) -> tuple[tuple[tuple[BatchKind, int], ...], dict[Task, tuple[int, int]]]:
    """The batches of a root, and for each of its tasks the batch and the first element in it."""
    members: dict[BatchKind, list[Task]] = {}
    for task in tasks:
        if task.root == rank:
            members.setdefault(_kind(plan, task), []).append(task)
    slots = {}
    for index, (kind, owned) in enumerate(members.items()):
        for position, task in enumerate(sorted(owned, key=lambda t: (t.parameter, t.slab))):
            slots[task] = (index, position * kind.rows * kind.columns)
    return tuple((kind, len(owned)) for kind, owned in members.items()), slots


def _shifted(copy: Copy, base: int) -> Copy:
    return replace(copy, slab_start=copy.slab_start + base)


def _numels(by_rank: list[list[Segment]] | list[list[Packed]]) -> tuple[int, ...]:
    return tuple(sum(item.copy.numel for item in items) for items in by_rank)


def _pack_segments(by_rank: list[list[Segment]]) -> tuple[Segment, ...]:
    """Give each segment its place in the packed buffer."""
    packed, position = [], 0
    for segment in (s for segments in by_rank for s in segments):
        place = replace(segment.copy, slab_start=position, slab_stride=segment.copy.run)
        packed.append(replace(segment, copy=place))
        position += segment.copy.numel
    return _merged(packed)


def _pack_batches(by_rank: list[list[Packed]]) -> tuple[Packed, ...]:
    placed, position = [], 0
    for item in (i for items in by_rank for i in items):
        copy = replace(item.copy, local_start=position, local_stride=item.copy.run)
        placed.append(replace(item, copy=copy))
        position += copy.numel
    return tuple(placed)


def _merged(segments: list[Segment]) -> tuple[Segment, ...]:
    """Join neighbours that are contiguous on both sides, such as the experts of one tensor."""
    ordered = sorted(segments, key=lambda s: (s.parameter, s.copy.local_start))
    result: list[Segment] = []
    for segment in ordered:
        last = result[-1] if result else None
        if last is not None and _continues(last, segment):
            run = last.copy.run + segment.copy.run
            joined = replace(last.copy, run=run, local_stride=run, slab_stride=run)
            result[-1] = replace(last, copy=joined)
        else:
            result.append(segment)
    return tuple(result)


def _continues(last: Segment, segment: Segment) -> bool:
    a, b = last.copy, segment.copy
    return (
        (last.parameter, last.kind, last.batch) == (segment.parameter, segment.kind, segment.batch)
        and a.rows == b.rows == 1
        and a.local_start + a.run == b.local_start
        and a.slab_start + a.run == b.slab_start
    )
