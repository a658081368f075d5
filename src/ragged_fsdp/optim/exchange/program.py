"""What one rank does in one bucket of an exchange plan: batches, links, packed places and split sizes.

Memory of a bucket on a rank, all in the dtype of the exchange:

* batches: the slabs this rank is the root of, one (count, rows, columns) tensor per kind of slab;
* an outgoing and an incoming packed buffer per direction, ordered by the rank at the other end, then
  by task, then as its region lies in memory. Both ends walk the same tasks in the same order, so a position
  in one buffer is the same position in the other.

What two ranks share and where it is packed comes from :mod:`ragged_fsdp.routes`. A whole ``RankRoute`` would
not do: it takes one tensor from one layout to another, while here slabs of many parameters share a transfer,
leave one replica and return to all, and begin or end in batches instead of a buffer.

Elements that a rank stores are packed for another root, written straight into a batch (its root is this
rank), or, with replicas, neither: then another replica sends the same elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ragged_fsdp.optim.exchange.matrices import Spot, SubMatrix, continued
from ragged_fsdp.optim.exchange.plan import ExchangePlan, Task
from ragged_fsdp.routes import packed

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Arrival",
    "Batch",
    "BatchKind",
    "BucketProgram",
    "Link",
    "LinkColumns",
    "Links",
    "MatrixId",
    "Splits",
    "bucket_program",
]

Integers = npt.NDArray[np.int64]
_PACKED = 0
"""The place of the packed buffer in the buffers of a pass; batches follow."""
_NOWHERE = -1


@dataclass(frozen=True)
class BatchKind:
    """Slabs that form one batch: equal family, shape and matrices."""

    family: int
    rows: int
    columns: int
    matrices: tuple[SubMatrix, ...]


class MatrixId(NamedTuple):
    """Which matrix it is: the same in every step of an exchange."""

    parameter: int
    """Index in :attr:`Exchange.parameters`."""
    slab: int
    matrix: int


@dataclass(frozen=True)
class Batch:
    """Slabs of one kind that this rank is the root of, each by its parameter and its index there."""

    kind: BatchKind
    slabs: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Slabs, rows and columns."""
        return len(self.slabs), self.kind.rows, self.kind.columns

    @cached_property
    def by_shape(self) -> list[tuple[list[SubMatrix], list[MatrixId]]]:
        """Matrices of a slab that have one shape, and who they are: one of all slabs, then the next."""
        alike: dict[tuple[int, int], tuple[list[SubMatrix], list[MatrixId]]] = {}
        for index, matrix in enumerate(self.kind.matrices):
            matrices, ids = alike.setdefault((matrix.rows, matrix.columns), ([], []))
            matrices.append(matrix)
            ids += [MatrixId(*slab, index) for slab in self.slabs]
        return list(alike.values())


class Link(NamedTuple):
    """Elements of a parameter's flat local tensor, and where they go to or come from.

    ``buffer`` is the place of that tensor in the buffers of a pass: 0 is the packed buffer, 1 the first
    batch; -1 is nowhere, since another replica sends the same elements.
    """

    parameter: int
    """Index in :attr:`Exchange.parameters`."""
    kind: BatchKind
    near: Spot
    far: Spot
    buffer: int

    def near_of(self, local: Tensor) -> Tensor:
        """The elements in a contiguous local tensor of the parameter, in two dims."""
        return self.near.view(local)

    def far_of(self, buffers: Sequence[Tensor]) -> Tensor | None:
        """The elements in the buffers of a pass, in the same shape; None if they are nowhere."""
        return self.far.view(buffers[self.buffer]) if self.buffer != _NOWHERE else None


class LinkColumns(NamedTuple):
    """Links by column: an array each for parameters, first elements, element counts, buffers and kinds.

    A model of many small matrices has many links. Looking at each of them in every step can take longer than
    the kernels run; columns give the addresses of all at once.
    """

    parameter: Integers
    near_start: Integers
    far_start: Integers
    numel: Integers
    buffer: Integers
    kind: Integers
    """Index in ``kinds``."""
    kinds: tuple[BatchKind, ...]


@dataclass(frozen=True)
class Links:
    """The links of one family in one pass over a bucket."""

    family: int
    links: tuple[Link, ...]

    def __iter__(self) -> Iterator[Link]:
        return iter(self.links)

    @cached_property
    def columns(self) -> LinkColumns | None:
        """The links by column; None if one of them has gaps at either end."""
        if not all(link.near.contiguous and link.far.contiguous for link in self.links):
            return None
        kinds = tuple(dict.fromkeys(link.kind for link in self.links))
        index = {kind: i for i, kind in enumerate(kinds)}
        rows = [
            (link.parameter, link.near.start, link.far.start, link.near.numel, link.buffer, index[link.kind])
            for link in self.links
        ]
        parameter, near, far, numel, buffer, kind = np.array(rows, np.int64).T.copy()
        return LinkColumns(parameter, near, far, numel, buffer, kind, kinds)


class Arrival(NamedTuple):
    """Elements of a batch (near) and of a packed buffer (far)."""

    batch: int
    near: Spot
    far: Spot


class Splits(NamedTuple):
    """One packed all-to-all: elements to and from each rank of the group."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass(frozen=True)
class BucketProgram:
    """All copies and transfers of one rank in one bucket, in the order in which they happen."""

    batches: tuple[Batch, ...]
    collected: tuple[Links, ...]
    """Every element that this rank stores of the slabs of the bucket, on its way to a root."""
    gather: Splits
    incoming: tuple[Arrival, ...]
    results: tuple[Arrival, ...]
    scatter: Splits
    applied: tuple[Links, ...]
    """Every element that this rank stores of the slabs of the bucket, on its way back from a root."""
    moves: bool
    """Whether any rank of the group sends anything in this bucket (the same answer on all of them)."""


def bucket_program(plan: ExchangePlan, bucket: int, rank: int) -> BucketProgram:
    """The part of ``rank`` in a bucket."""
    tasks = plan.buckets[bucket]
    batches, slots = _batches(plan, tasks, rank)
    here: list[Link] = []
    elsewhere: list[Link] = []
    outgoing: list[tuple[int, Link]] = []
    returned: list[tuple[int, Link]] = []
    incoming: list[tuple[int, Arrival]] = []
    results: list[tuple[int, Arrival]] = []
    for task in tasks:
        kind = _kind(plan, task)
        if task.root == rank:
            batch, base = slots[task]
            for near, far in plan.shared(task, rank):
                here.append(Link(task.parameter, kind, near, _moved(far, base), batch + 1))
            for other in range(plan.ranks):
                if other == rank:
                    continue
                ends = plan.shared(task, other)
                arrivals = [(other, Arrival(batch, _moved(in_slab, base), there)) for there, in_slab in ends]
                results += arrivals
                if plan.gathers_from(task, other):
                    incoming += arrivals
        else:
            links = [Link(task.parameter, kind, *ends, _PACKED) for ends in plan.shared(task, rank)]
            returned += [(task.root, link) for link in links]
            if plan.gathers_from(task, rank):
                outgoing += [(task.root, link) for link in links]
            else:
                elsewhere += [link._replace(buffer=_NOWHERE) for link in links]
    sent, outgoing_links = _packed(outgoing, plan.ranks)
    received, incoming_parts = _packed(incoming, plan.ranks)
    sent_back, result_parts = _packed(results, plan.ranks)
    received_back, returned_links = _packed(returned, plan.ranks)
    return BucketProgram(
        batches,
        _by_family([*outgoing_links, *here, *elsewhere]),
        Splits(sent, received),
        incoming_parts,
        result_parts,
        Splits(sent_back, received_back),
        _by_family([*returned_links, *here]),
        plan.ranks > 1 and not all(plan.stays(task) for task in tasks),
    )


def _kind(plan: ExchangePlan, task: Task) -> BatchKind:
    slab = plan.slab(task)
    return BatchKind(plan.parameters[task.parameter].family, slab.rows, slab.columns, slab.matrices)


def _batches(
    plan: ExchangePlan, tasks: tuple[Task, ...], rank: int
) -> tuple[tuple[Batch, ...], dict[Task, tuple[int, int]]]:
    """The batches of a root, and for each of its tasks the batch and the first element in it."""
    members: dict[BatchKind, list[Task]] = {}
    for task in tasks:
        if task.root == rank:
            members.setdefault(_kind(plan, task), []).append(task)
    batches, slots = [], {}
    for index, (kind, owned) in enumerate(members.items()):
        owned.sort(key=lambda task: (task.parameter, task.slab))
        for position, task in enumerate(owned):
            slots[task] = (index, position * kind.rows * kind.columns)
        batches.append(Batch(kind, tuple((task.parameter, task.slab) for task in owned)))
    return tuple(batches), slots


def _moved(spot: Spot, base: int) -> Spot:
    return spot._replace(start=spot.start + base)


_Ended = TypeVar("_Ended", Link, Arrival)


def _packed(items: list[tuple[int, _Ended]], ranks: int) -> tuple[tuple[int, ...], tuple[_Ended, ...]]:
    """Split sizes of a packed buffer for items of each rank, and the items with their places in it as far
    ends."""
    splits, starts = packed([(rank, item.near.numel) for rank, item in items], ranks)
    placed = [
        item._replace(far=Spot(start, item.near.rows, item.near.run, item.near.run))
        for start, (_, item) in zip(starts, items)
    ]
    return splits, tuple(placed)


def _by_family(links: Iterable[Link]) -> tuple[Links, ...]:
    """The links of a pass; neighbours that go on at both ends, such as experts of one tensor, are joined."""
    families: dict[int, list[Link]] = {}
    for link in sorted(links, key=lambda link: (link.parameter, link.near.start)):
        merged = families.setdefault(link.kind.family, [])
        if merged and (longer := _continued(merged[-1], link)) is not None:
            merged[-1] = longer
        else:
            merged.append(link)
    return tuple(Links(family, tuple(merged)) for family, merged in families.items())


def _continued(link: Link, following: Link) -> Link | None:
    """Both as one, if the second goes on where the first ends; else None."""
    if (link.parameter, link.kind, link.buffer) != (following.parameter, following.kind, following.buffer):
        return None
    ends = continued((link.near, link.far), (following.near, following.far))
    return Link(link.parameter, link.kind, *ends, link.buffer) if ends is not None else None
