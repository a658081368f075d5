"""Who orthogonalizes which matrix, in which bucket: computed alike on every rank, without torch.

Terms. A *slab* (see :mod:`ragged_fsdp.optim.matrices`) is the unit of work; its *root* is the rank
that orthogonalizes it; a *holding* is the part of a parameter that one rank stores. Parameters that
share ranks are planned together over one exchange group, whose ranks are numbered 0..ranks-1.

A plan is made in three steps, each a function of shapes and placements alone:

1. Roots. Slabs in order of falling cost; each goes to the rank that holds most of it if that rank
   still has room below the even share, and else to the rank with the least work so far.
2. Buckets. Each root (if there are several) mixes the shapes of its slabs evenly, in pieces of about a
   bucket's work, and cuts this queue at equal shares of the work; a bucket has at most
   ``bucket_numel`` elements per root. So roots advance together, equal shapes meet in one batch, and no
   root ever stores more than one bucket's worth of slabs per bucket in flight.
3. Copies. For a slab and a rank: which elements of the rank's flat local tensor are which elements of
   the slab. Every send and every receive of both directions is derived from the roots and these
   copies, so the two ends of a transfer cannot disagree.

With replicas (HSDP) a slab has one root in the whole group: it is gathered from the replica of its
root and its update is sent to the holders in every replica.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from ragged_fsdp.optim.matrices import MatrixRule, Slab, matrix_shape, slabs_of

__all__ = ["Copy", "ExchangePlan", "Holding", "ParameterLayout", "Task", "plan_exchange"]

_Item = tuple[int, int, Slab]
"""A slab with its parameter and its index there."""
_Kind = tuple[int, int, int]
"""Family, rows and columns of a slab."""


@dataclass(frozen=True)
class Holding:
    """What one rank stores of a parameter seen as (batches, rows, columns).

    The rank's flat local tensor is the interval [``start``, ``stop``) of the row-major flattened box
    with these offsets and sizes. ``Shard`` makes boxes, a ragged placement makes intervals.
    """

    offset: tuple[int, int, int]
    size: tuple[int, int, int]
    start: int
    stop: int

    def __post_init__(self) -> None:
        box_numel = self.size[0] * self.size[1] * self.size[2]
        if min(*self.offset, *self.size) < 0 or not 0 <= self.start <= self.stop <= box_numel:
            raise ValueError(f"not an interval of a box: {self}.")

    @property
    def numel(self) -> int:
        """Elements stored."""
        return self.stop - self.start


@dataclass(frozen=True)
class ParameterLayout:
    """One parameter of an exchange group: its matrices, and who stores what.

    ``holdings`` and ``replicas`` have one entry per rank of the group: what it stores, and to which
    copy of the parameter that belongs. ``family`` numbers the parameters whose matrices may be iterated
    in one batch (equal hyper-parameters).
    """

    name: str
    shape: tuple[int, ...]
    rule: MatrixRule
    holdings: tuple[Holding, ...]
    replicas: tuple[int, ...]
    family: int = 0

    def __post_init__(self) -> None:
        """Each replica must hold every element once; overlaps would show as a wrong total."""
        if len(self.holdings) != len(self.replicas) or not self.holdings:
            raise ValueError(f"{self.name}: {len(self.holdings)} holdings for {len(self.replicas)} ranks.")
        batches, rows, columns = self.batches_rows_columns
        stored: dict[int, int] = {}
        for replica, holding in zip(self.replicas, self.holdings):
            stored[replica] = stored.get(replica, 0) + holding.numel
        if set(stored.values()) != {batches * rows * columns}:
            raise ValueError(
                f"{self.name}: the ranks of each replica must hold its {batches * rows * columns} elements "
                f"once, they hold {sorted(stored.values())}."
            )

    @cached_property
    def batches_rows_columns(self) -> tuple[int, int, int]:
        """The parameter as a batch of matrices."""
        return matrix_shape(self.shape, self.rule)

    @cached_property
    def slabs(self) -> tuple[Slab, ...]:
        """Its slabs, in the order of its elements."""
        return slabs_of(self.shape, self.rule)


@dataclass(frozen=True)
class Copy:
    """Elements of a flat local tensor and the same elements of a slab: ``rows`` runs of ``run``."""

    local_start: int
    local_stride: int
    slab_start: int
    slab_stride: int
    rows: int
    run: int

    @property
    def numel(self) -> int:
        """Elements copied."""
        return self.rows * self.run


@dataclass(frozen=True)
class Task:
    """One slab of one parameter, with its root and its bucket."""

    parameter: int
    slab: int
    root: int
    bucket: int


@dataclass(frozen=True)
class ExchangePlan:
    """The owner map of one exchange group, and everything that follows from it.

    ``tasks`` are in bucket order, and within a bucket in the order in which both ends of a transfer
    pack them.
    """

    parameters: tuple[ParameterLayout, ...]
    ranks: int
    bucket_numel: int
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        expected = {(p, s) for p, layout in enumerate(self.parameters) for s in range(len(layout.slabs))}
        if len(self.tasks) != len(expected) or {(t.parameter, t.slab) for t in self.tasks} != expected:
            raise ValueError("a plan must have exactly one task for each slab.")
        if any(not 0 <= t.root < self.ranks for t in self.tasks):
            raise ValueError(f"a root lies outside the {self.ranks} ranks of the group.")
        if list(self.tasks) != sorted(self.tasks, key=lambda t: t.bucket):
            raise ValueError("tasks must be in bucket order.")
        for layout in self.parameters:
            if len(layout.holdings) != self.ranks:
                raise ValueError(f"{layout.name}: {len(layout.holdings)} holdings for {self.ranks} ranks.")

    @cached_property
    def buckets(self) -> tuple[tuple[Task, ...], ...]:
        """The tasks of each bucket."""
        last = self.tasks[-1].bucket + 1 if self.tasks else 0
        return tuple(tuple(t for t in self.tasks if t.bucket == b) for b in range(last))

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly if they would send and receive the same things."""
        hasher = hashlib.sha256(repr((self.ranks, self.bucket_numel, self.tasks)).encode())
        places: dict[tuple[int, int], bytes] = {}  # layers repeat: most share these tuples with others
        for layout in self.parameters:
            key = id(layout.holdings), id(layout.replicas)
            if key not in places:
                places[key] = repr((layout.holdings, layout.replicas)).encode()
            hasher.update(repr((layout.name, layout.shape, layout.rule, layout.family)).encode())
            hasher.update(places[key])
        return hasher.hexdigest()

    def slab(self, task: Task) -> Slab:
        """The slab of a task."""
        return self.parameters[task.parameter].slabs[task.slab]

    def copies(self, task: Task, rank: int) -> tuple[Copy, ...]:
        """What ``rank`` stores of the slab of a task, in the order in which it is packed."""
        layout = self.parameters[task.parameter]
        return copies_of(layout.slabs[task.slab], layout.batches_rows_columns[2], layout.holdings[rank])

    def gathers_from(self, task: Task, rank: int) -> bool:
        """Whether the root takes its elements from ``rank``: it lies in the root's replica."""
        replicas = self.parameters[task.parameter].replicas
        return replicas[rank] == replicas[task.root]

    def stays(self, task: Task) -> bool:
        """Whether the root stores the whole slab and nobody else does: nothing is sent for it."""
        held = sum(copy.numel for copy in self.copies(task, task.root))
        return held == self.slab(task).numel and len(set(self.parameters[task.parameter].replicas)) == 1

    def load(self) -> tuple[int, ...]:
        """Newton-Schulz operations per iteration of each rank."""
        work = [0] * self.ranks
        for task in self.tasks:
            work[task.root] += self.slab(task).flops
        return tuple(work)


def copies_of(slab: Slab, columns: int, holding: Holding) -> tuple[Copy, ...]:
    """The elements that a slab and a holding share; at most three copies."""
    (batch, row, column), (batches, rows, width) = holding.offset, holding.size
    first, last = max(slab.first_row, row), min(slab.first_row + slab.rows, row + rows)
    if not batch <= slab.batch < batch + batches or first >= last or not width:
        return ()
    base = (slab.batch - batch) * rows - row  # box row of parameter row r is base + r
    begin, end = max((base + first) * width, holding.start), min((base + last) * width, holding.stop)
    if begin >= end:
        return ()

    def slab_position(box_element: int) -> int:
        box_row, box_column = divmod(box_element, width)
        return (box_row - base - slab.first_row) * columns + column + box_column

    if width == columns:
        run = end - begin
        return (Copy(begin - holding.start, run, slab_position(begin), run, 1, run),)
    pieces: list[Copy] = []
    whole_begin, whole_end = -(-begin // width) * width, end // width * width
    if whole_begin > whole_end:  # inside one row of the box
        cuts = [(begin, end, 1)]
    else:
        whole_rows = (whole_end - whole_begin) // width
        cuts = [(begin, whole_begin, 1), (whole_begin, whole_end, whole_rows), (whole_end, end, 1)]
    for lo, hi, count in cuts:
        if lo < hi:
            run = (hi - lo) // count
            pieces.append(Copy(lo - holding.start, run, slab_position(lo), columns, count, run))
    return tuple(pieces)


def plan_exchange(parameters: Sequence[ParameterLayout], ranks: int, bucket_numel: int) -> ExchangePlan:
    """Roots, then buckets, for the parameters of one exchange group."""
    if bucket_numel < 1:
        raise ValueError(f"bucket_numel must be at least 1, got {bucket_numel}.")
    layouts = tuple(parameters)
    slabs = [(p, s, slab) for p, layout in enumerate(layouts) for s, slab in enumerate(layout.slabs)]
    slabs.sort(key=lambda item: (-item[2].flops, _kind(layouts, item), item[:2]))
    roots = _select_roots(layouts, slabs, ranks)
    queues: list[list[_Item]] = [[] for _ in range(ranks)]
    for item, root in zip(slabs, roots):
        queues[root].append(item)
    tasks = [
        Task(parameter, index, root, bucket)
        for root, queue in enumerate(_mixed_queues(layouts, queues, bucket_numel))
        for (parameter, index, _), bucket in queue
    ]
    numbers = {bucket: number for number, bucket in enumerate(sorted({task.bucket for task in tasks}))}
    tasks = [replace(task, bucket=numbers[task.bucket]) for task in tasks]
    tasks.sort(key=lambda task: task.bucket)  # stable: the order of a root's queue within a bucket
    return ExchangePlan(layouts, ranks, bucket_numel, tuple(tasks))


def _mixed_queues(
    layouts: tuple[ParameterLayout, ...], queues: list[list[_Item]], bucket_numel: int
) -> list[list[tuple[_Item, int]]]:
    """The slabs of each root in the order of its work, each with its bucket."""
    if len(queues) == 1:  # waits for nobody: whole kinds, in buckets as large as they may be
        (queue,) = queues
        return [list(zip(queue, _cut_buckets(queue, None, bucket_numel)))]
    work = max(sum(slab.flops for _, _, slab in queue) for queue in queues)
    count = max(-(-sum(slab.numel for _, _, slab in queue) // bucket_numel) for queue in queues)
    share = max(1, -(-work // max(1, count)))  # of one bucket
    mixed = [_mixed(layouts, queue, share) for queue in queues]
    return [list(zip(queue, _cut_buckets(queue, share, bucket_numel))) for queue in mixed]


def _kind(layouts: tuple[ParameterLayout, ...], item: _Item) -> _Kind:
    """Slabs of one kind can be iterated as one batch."""
    parameter, _, slab = item
    return layouts[parameter].family, slab.rows, slab.columns


def _select_roots(layouts: tuple[ParameterLayout, ...], slabs: list[_Item], ranks: int) -> list[int]:
    share = sum(slab.flops for _, _, slab in slabs) / ranks
    work = [0] * ranks
    least = [(0, rank) for rank in range(ranks)]  # a heap; entries with outdated work are skipped
    holders = _largest_holders(layouts)
    roots = []
    for parameter, index, slab in slabs:
        root = holders[parameter].get(index, 0)
        if work[root] + slab.flops > max(share, slab.flops):
            while work[least[0][1]] != least[0][0]:
                heapq.heappop(least)
            root = least[0][1]
        work[root] += slab.flops
        heapq.heappush(least, (work[root], root))
        roots.append(root)
    return roots


def _largest_holders(layouts: tuple[ParameterLayout, ...]) -> list[dict[int, int]]:
    """For each parameter: the rank that stores most of each slab; equals (replicas, even cuts) take turns."""
    result: list[dict[int, int]] = []
    turn = 0
    for layout in layouts:
        best: dict[int, tuple[int, list[int]]] = {}
        for rank, holding in enumerate(layout.holdings):
            for index in _touched(layout, holding):
                columns = layout.batches_rows_columns[2]
                held = sum(copy.numel for copy in copies_of(layout.slabs[index], columns, holding))
                most, equals = best.get(index, (0, []))
                if held > most:
                    best[index] = (held, [rank])
                elif held == most and held:
                    equals.append(rank)
        chosen = {}
        for index, (_, equals) in sorted(best.items()):
            chosen[index] = equals[turn % len(equals)]
            turn += 1
        result.append(chosen)
    return result


def _touched(layout: ParameterLayout, holding: Holding) -> range:
    """Slabs a holding may overlap: those between its first and its last element."""
    if not holding.numel:
        return range(0)
    batches = layout.batches_rows_columns[0]
    per_batch = len(layout.slabs) // batches
    box_batch = holding.size[1] * holding.size[2]
    first = holding.offset[0] + holding.start // box_batch
    last = holding.offset[0] + (holding.stop - 1) // box_batch
    return range(first * per_batch, (last + 1) * per_batch)


def _mixed(layouts: tuple[ParameterLayout, ...], queue: list[_Item], share: int) -> list[_Item]:
    """A root's slabs with every kind spread evenly over the queue, in pieces of work that stay together.

    Pieces keep matrices in batches (one 4096 x 4096 matrix alone iterates a third slower than in a batch);
    kinds that took turns as wholes would cost one root more than another in the same bucket.
    """
    kinds: dict[_Kind, list[_Item]] = {}
    for item in queue:
        kinds.setdefault(_kind(layouts, item), []).append(item)
    placed: list[tuple[Fraction, int, _Item]] = []
    for order, items in enumerate(kinds.values()):
        work = sum(slab.flops for _, _, slab in items)
        pieces = max(1, min(len(items), work // share))
        for position, item in enumerate(items):
            piece = position * pieces // len(items)
            placed.append((Fraction(2 * piece + 1, 2 * pieces), order, item))
    return [item for _, _, item in sorted(placed, key=lambda entry: entry[:2])]


def _cut_buckets(queue: list[_Item], share: int | None, bucket_numel: int) -> list[int]:
    """The bucket of each slab: as the middle of its work falls among the shares; later if that is full."""
    current, filled, done = 0, 0, 0
    buckets = []
    for _, _, slab in queue:
        bucket = max(current, (2 * done + slab.flops) // (2 * share)) if share else current
        if bucket == current and filled and filled + slab.numel > bucket_numel:
            bucket += 1
        if bucket > current:
            current, filled = bucket, 0
        filled += slab.numel
        done += slab.flops
        buckets.append(bucket)
    return buckets
