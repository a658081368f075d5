"""Which rank works on which matrix, in which bucket: computed alike on every rank, without torch.

Terms. A *slab* (see :mod:`ragged_fsdp.optim.exchange.matrices`) is the unit of work; its *root* is the rank
that works on it. Parameters that share ranks are planned together over one exchange group, whose ranks are
numbered 0..ranks-1.

A plan is made in two steps, each a function of shapes, placements and the cost of a matrix alone:

1. Roots. Slabs in order of falling cost; each goes to the rank that holds most of it if that rank
   still has room below the even share, and else to the rank with the least work so far.
2. Buckets. Each root (if there are several) mixes the shapes of its slabs evenly, in portions of about a
   bucket's work, and cuts this queue at equal shares of the work; a bucket has at most
   ``bucket_numel`` elements per root. So roots advance together, equal shapes meet in one batch, and no
   root ever stores more than one bucket's worth of slabs per bucket in flight.

Every send and every receive of both directions follows from the roots and from what a slab and a region
have in common (:meth:`MatrixLayout.shared`), so the two ends of a transfer cannot disagree.

With replicas (HSDP) a slab has one root in the whole group: it is gathered from the replica of its
root and its result is sent to the holders in every replica.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from ragged_fsdp.optim.exchange.matrices import Ends, MatrixLayout, Slab

__all__ = ["Cost", "ExchangePlan", "PlannedParameter", "Task", "plan_exchange"]

Cost = Callable[[int, int], int]
"""What the work on a matrix of so many rows and columns costs, in any unit."""


class PlannedParameter(NamedTuple):
    """A parameter of an exchange group; ``family`` numbers those whose matrices may share a batch."""

    name: str
    layout: MatrixLayout
    family: int = 0


@dataclass(frozen=True)
class Task:
    """One slab of one parameter, with its cost, its root and its bucket."""

    parameter: int
    slab: int
    cost: int
    root: int
    bucket: int


@dataclass(frozen=True)
class ExchangePlan:
    """The owner map of one exchange group, and everything that follows from it.

    ``tasks`` are in bucket order, and within a bucket in the order in which both ends of a transfer
    pack them.
    """

    parameters: tuple[PlannedParameter, ...]
    ranks: int
    bucket_numel: int
    tasks: tuple[Task, ...]

    def __post_init__(self) -> None:
        expected = {
            (p, s) for p, (_, layout, _) in enumerate(self.parameters) for s in range(len(layout.slabs))
        }
        if len(self.tasks) != len(expected) or {(t.parameter, t.slab) for t in self.tasks} != expected:
            raise ValueError("a plan must have exactly one task for each slab.")
        if any(not 0 <= t.root < self.ranks for t in self.tasks):
            raise ValueError(f"a root lies outside the {self.ranks} ranks of the group.")
        if list(self.tasks) != sorted(self.tasks, key=lambda t: t.bucket):
            raise ValueError("tasks must be in bucket order.")
        for name, layout, _ in self.parameters:
            if len(layout.regions) != self.ranks:
                raise ValueError(f"{name}: {len(layout.regions)} regions for {self.ranks} ranks.")

    @cached_property
    def buckets(self) -> tuple[tuple[Task, ...], ...]:
        """The tasks of each bucket."""
        found: list[list[Task]] = [[] for _ in range(self.tasks[-1].bucket + 1 if self.tasks else 0)]
        for task in self.tasks:
            found[task.bucket].append(task)
        return tuple(map(tuple, found))

    @property
    def text(self) -> str:
        """What is planned, a line for each parameter: equal on two ranks exactly if they would send and
        receive the same things."""
        tasks = hashlib.sha256(repr(self.tasks).encode()).hexdigest()[:16]
        parameters = [
            f"{name}: shape {layout.shape}, {layout.rule or 'plain matrices'}, family {family}, "
            f"stored as {layout.digest}"
            for name, layout, family in self.parameters
        ]
        return "\n".join(
            [*parameters, f"{self.ranks} ranks, bucket_numel {self.bucket_numel}", f"work {tasks}"]
        )

    def slab(self, task: Task) -> Slab:
        """The slab of a task."""
        return self.parameters[task.parameter].layout.slabs[task.slab]

    def shared(self, task: Task, rank: int) -> tuple[Ends, ...]:
        """What ``rank`` stores of the slab of a task; see :meth:`MatrixLayout.shared`."""
        return self.parameters[task.parameter].layout.shared(task.slab, rank)

    def gathers_from(self, task: Task, rank: int) -> bool:
        """Whether the root takes its elements from ``rank``: it lies in the root's replica."""
        replicas = self.parameters[task.parameter].layout.replicas
        return replicas[rank] == replicas[task.root]

    def stays(self, task: Task) -> bool:
        """Whether the root stores the whole slab and nobody else does: nothing is sent for it."""
        held = sum(near.numel for near, _ in self.shared(task, task.root))
        replicas = self.parameters[task.parameter].layout.replicas
        return held == self.slab(task).numel and len(set(replicas)) == 1

    def load(self) -> tuple[int, ...]:
        """The cost of all tasks of each rank."""
        work = [0] * self.ranks
        for task in self.tasks:
            work[task.root] += task.cost
        return tuple(work)


class _Item(NamedTuple):
    """A slab on its way into a plan; slabs of one ``kind`` can be worked on as one batch."""

    parameter: int
    slab: int
    cost: int
    numel: int
    kind: tuple[int, int, int]
    """Family, rows and columns."""


def plan_exchange(
    parameters: Sequence[PlannedParameter], ranks: int, bucket_numel: int, cost: Cost
) -> ExchangePlan:
    """Roots, then buckets, for the parameters of one exchange group."""
    if bucket_numel < 1:
        raise ValueError(f"bucket_numel must be at least 1, got {bucket_numel}.")
    items = _items(parameters, cost)
    items.sort(key=lambda item: (-item.cost, item.kind, item.parameter, item.slab))
    queues: list[list[_Item]] = [[] for _ in range(ranks)]
    for item, root in zip(items, _select_roots(parameters, items, ranks)):
        queues[root].append(item)
    placed = [
        (bucket, root, item)
        for root, queue in enumerate(_mixed_queues(queues, bucket_numel))
        for item, bucket in queue
    ]
    numbers = {bucket: number for number, bucket in enumerate(sorted({bucket for bucket, _, _ in placed}))}
    placed.sort(key=lambda entry: entry[0])  # stable: the order of a root's queue within a bucket
    tasks = [
        Task(item.parameter, item.slab, item.cost, root, numbers[bucket]) for bucket, root, item in placed
    ]
    return ExchangePlan(tuple(parameters), ranks, bucket_numel, tuple(tasks))


def _items(parameters: Sequence[PlannedParameter], cost: Cost) -> list[_Item]:
    costs: dict[int, list[int]] = {}  # of the slabs of a layout, which many layers share
    items = []
    for parameter, (_, layout, family) in enumerate(parameters):
        if id(layout) not in costs:
            costs[id(layout)] = [sum(cost(m.rows, m.columns) for m in slab.matrices) for slab in layout.slabs]
        for index, (slab, slab_cost) in enumerate(zip(layout.slabs, costs[id(layout)])):
            kind = family, slab.rows, slab.columns
            items.append(_Item(parameter, index, slab_cost, slab.numel, kind))
    return items


def _mixed_queues(queues: list[list[_Item]], bucket_numel: int) -> list[list[tuple[_Item, int]]]:
    """The slabs of each root in the order of its work, each with its bucket."""
    if len(queues) == 1:  # waits for nobody: whole kinds, in buckets as large as they may be
        (queue,) = queues
        return [list(zip(queue, _cut_buckets(queue, None, bucket_numel)))]
    work = max(sum(item.cost for item in queue) for queue in queues)
    count = max(-(-sum(item.numel for item in queue) // bucket_numel) for queue in queues)
    share = max(1, -(-work // max(1, count)))  # of one bucket
    mixed = [_mixed(queue, share) for queue in queues]
    return [list(zip(queue, _cut_buckets(queue, share, bucket_numel))) for queue in mixed]


def _select_roots(parameters: Sequence[PlannedParameter], items: list[_Item], ranks: int) -> list[int]:
    share = sum(item.cost for item in items) / ranks
    work = [0] * ranks
    least = [(0, rank) for rank in range(ranks)]  # a heap; entries with outdated work are skipped
    preferred = _preferred_roots(parameters)
    roots = []
    for item in items:
        root = preferred[item.parameter][item.slab]
        if work[root] + item.cost > max(share, item.cost):
            while work[least[0][1]] != least[0][0]:
                heapq.heappop(least)
            root = least[0][1]
        work[root] += item.cost
        heapq.heappush(least, (work[root], root))
        roots.append(root)
    return roots


def _preferred_roots(parameters: Sequence[PlannedParameter]) -> list[list[int]]:
    """For each slab of each parameter a rank that stores most of it; those that store as much take turns."""
    result = []
    turn = 0
    for _, layout, _ in parameters:
        chosen = []
        for ranks in layout.holders:
            chosen.append(ranks[turn % len(ranks)] if ranks else 0)
            turn += bool(ranks)
        result.append(chosen)
    return result


def _mixed(queue: list[_Item], share: int) -> list[_Item]:
    """A root's slabs with every kind spread evenly over the queue, in portions of work that stay together.

    Portions keep matrices in batches (one 4096 x 4096 matrix alone iterates a third slower than in a batch);
    kinds that took turns as wholes would cost one root more than another in the same bucket.
    """
    kinds: dict[tuple[int, int, int], list[_Item]] = {}
    for item in queue:
        kinds.setdefault(item.kind, []).append(item)
    placed: list[tuple[Fraction, int, _Item]] = []
    for order, items in enumerate(kinds.values()):
        work = sum(item.cost for item in items)
        portions = max(1, min(len(items), work // share))
        for position, item in enumerate(items):
            portion = position * portions // len(items)
            placed.append((Fraction(2 * portion + 1, 2 * portions), order, item))
    return [item for _, _, item in sorted(placed, key=lambda entry: entry[:2])]


def _cut_buckets(queue: list[_Item], share: int | None, bucket_numel: int) -> list[int]:
    """The bucket of each slab: as the middle of its work falls among the shares; later if that is full."""
    current, filled, done = 0, 0, 0
    buckets = []
    for item in queue:
        bucket = max(current, (2 * done + item.cost) // (2 * share)) if share else current
        if bucket == current and filled and filled + item.numel > bucket_numel:
            bucket += 1
        if bucket > current:
            current, filled = bucket, 0
        filled += item.numel
        done += item.cost
        buckets.append(bucket)
    return buckets
