"""Runs an exchange plan: packed all-to-alls around the work, with a bounded number of buckets.

A bucket passes through three stages on every rank. The optimizer's part of them is a :class:`MatrixWork`:

    start     ``collect``: write this rank's elements into the packed buffer of their root, or straight into
              a batch if this rank is the root; begin the all-to-all
    iterate   wait for it, unpack into the batches, ``work`` on their matrices, pack the results, begin the
              way back
    finish    wait for it and ``apply`` the results to the parameters

With ``in_flight`` buckets at most between their start and their finish:

    in_flight=3 (default)    start 0, start 1, iterate 0, start 2, iterate 1, finish 0, start 3, ...
    in_flight=2              start 0, start 1, iterate 0, finish 0, start 2, iterate 1, ...
    in_flight=1              start 0, iterate 0, finish 0, start 1, ...

so with 2 the gather of bucket k+1 overlaps the iteration of bucket k, and with 3 the way back of bucket
k-1 does too. All buffers of a bucket live from its start to its finish.

A rank whose step raised before leaves the others in a transfer: the watch names that transfer while they
wait (:mod:`ragged_fsdp.watch`), and an error of the backend has a note that does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ragged_fsdp.collectives import explain
from ragged_fsdp.dbuffer.storage import stream_getter
from ragged_fsdp.optim.exchange.plan import ExchangePlan
from ragged_fsdp.optim.exchange.program import (
    Batch,
    BatchKind,
    BucketProgram,
    Links,
    MatrixId,
    Splits,
    bucket_program,
)
from ragged_fsdp.watch import CollectiveWatch, Launch

__all__ = ["Exchange", "MatrixWork", "Team"]

_WATCHED = 256
"""Transfers that are remembered: more than are launched before the device has come to the first of them."""


class MatrixWork(Protocol):
    """What an optimizer does with the matrices of an exchange in one step.

    ``collect`` and ``apply`` see every element of this rank's parameters once; they must compute each element
    from itself alone, because matrices are cut anywhere. ``work`` sees whole matrices, on their roots.
    """

    def collect(self, links: Links, buffers: Sequence[Tensor]) -> None:
        """Write what is to be worked on into the far end of each link, where it has one."""

    def work(self, matrices: Tensor, kind: BatchKind, ids: Sequence[MatrixId]) -> Tensor:
        """Results for a batch (matrices, rows, columns), of its shape and dtype; it may be overwritten."""

    def apply(self, links: Links, buffers: Sequence[Tensor]) -> None:
        """Take the results from the far ends of the links, and update the parameters with them."""


@dataclass(frozen=True)
class Team:
    """The ranks that exchange with each other, and the device of their buffers on this one.

    Without a process group this process does all of the work.
    """

    ranks: tuple[int, ...]
    """Global ranks, in the order of the group."""
    index: int
    """This rank's place in the group."""
    group: dist.ProcessGroup | None
    device: torch.device


@dataclass
class _InFlight:
    """The buffers of one bucket in flight."""

    label: str
    """What errors and the watch call it."""
    program: BucketProgram
    batches: list[Tensor]
    packed: Tensor
    """What is being received, in either direction."""
    sent: Tensor
    """Kept until the transfer is over: its memory must not be used for anything else before."""
    transfer: tuple[dist.Work, Launch] | None = None


class Exchange:
    """An exchange plan bound to the parameters and ranks that it is for; :meth:`run` is a step of it."""

    def __init__(
        self,
        label: str,
        plan: ExchangePlan,
        parameters: Sequence[Tensor],
        team: Team,
        dtype: torch.dtype,
        in_flight: int,
    ) -> None:
        self.label = label
        self.plan = plan
        self.parameters = tuple(parameters)
        self.team = team
        self.dtype = dtype
        self.in_flight = in_flight
        self.programs = tuple(bucket_program(plan, b, team.index) for b in range(len(plan.buckets)))
        self._watch = CollectiveWatch(team.device, _WATCHED)
        self._stream = stream_getter(team.device)

    @property
    def names(self) -> list[str]:
        """What errors call the parameters."""
        return [parameter.name for parameter in self.plan.parameters]

    def roots(self) -> list[list[int]]:
        """For each parameter, the global ranks that work on its matrices."""
        found: list[set[int]] = [set() for _ in self.parameters]
        for task in self.plan.tasks:
            found[task.parameter].add(self.team.ranks[task.root])
        return [sorted(ranks) for ranks in found]

    def run(self, work: MatrixWork) -> None:
        """One step of all parameters of the plan. Every rank of the group must call it."""
        live: dict[int, _InFlight] = {}
        try:
            for stage, index in _schedule(len(self.programs), self.in_flight):
                with record_function(f"{self.label} {stage} {index}"):  # what profiles are read by
                    if stage == "start":
                        live[index] = self._start(index, work)
                    elif stage == "iterate":
                        self._iterate(live[index], work)
                    else:
                        self._finish(live.pop(index), work)
        except RuntimeError as error:
            if (inside := self._watch.inside) is not None:
                explain(error, inside.phase, inside.group_name, inside.pg)
            raise
        finally:
            self._watch.inside = None  # it raised: the watch would report it as not finished

    def _start(self, index: int, work: MatrixWork) -> _InFlight:
        program = self.programs[index]
        batches = [self._empty(math.prod(batch.shape)) for batch in program.batches]
        sent = self._empty(sum(program.gather.send))
        for links in program.collected:
            work.collect(links, [sent, *batches])
        received = self._empty(sum(program.gather.receive))
        bucket = _InFlight(f"{self.label} bucket {index}", program, batches, received, sent)
        self._transfer(bucket, program.gather, "all-to-all to the roots")
        return bucket

    def _iterate(self, bucket: _InFlight, work: MatrixWork) -> None:
        program = bucket.program
        self._wait(bucket)
        _copy([(a.near.view(bucket.batches[a.batch]), a.far.view(bucket.packed)) for a in program.incoming])
        for index, batch in enumerate(program.batches):
            slabs = bucket.batches[index].view(batch.shape)
            bucket.batches[index] = _worked_on(slabs, batch, work).reshape(-1)
        bucket.sent = self._empty(sum(program.scatter.send))
        bucket.packed = self._empty(sum(program.scatter.receive))
        _copy([(a.far.view(bucket.sent), a.near.view(bucket.batches[a.batch])) for a in program.results])
        self._transfer(bucket, program.scatter, "all-to-all from the roots")

    def _finish(self, bucket: _InFlight, work: MatrixWork) -> None:
        self._wait(bucket)
        for links in bucket.program.applied:
            work.apply(links, [bucket.packed, *bucket.batches])

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self.team.device)

    def _transfer(self, bucket: _InFlight, splits: Splits, phase: str) -> None:
        group = self.team.group
        # By what all ranks do, not by what this one sends: the others would wait for it.
        if group is None or not bucket.program.moves:
            return
        launch = self._watch.begin(phase, bucket, group)
        work = dist.all_to_all_single(
            bucket.packed,
            bucket.sent,
            list(splits.receive),
            list(splits.send),
            group=group,
            async_op=True,
        )
        launch.started_s = time.monotonic()
        self._watch.inside = None  # the host goes on, and is in it again when it waits
        bucket.transfer = work, launch

    def _wait(self, bucket: _InFlight) -> None:
        if bucket.transfer is None:
            return
        work, launch = bucket.transfer
        self._watch.inside = launch
        work.wait()
        bucket.transfer = self._watch.inside = None
        stream = self._stream()
        if stream is not None:  # the host did not wait: an event behind the transfer tells the watch
            self._watch.record(launch, stream)


def _schedule(buckets: int, in_flight: int) -> Iterator[tuple[str, int]]:
    """The order of the stages, identical on every rank."""
    if in_flight == 1:
        for index in range(buckets):
            yield from (("start", index), ("iterate", index), ("finish", index))
        return
    for index in range(buckets + 2):
        if in_flight == 2 and index >= 2:
            yield "finish", index - 2
        if index < buckets:
            yield "start", index
        if 1 <= index <= buckets:
            yield "iterate", index - 1
        if in_flight == 3 and index >= 2:
            yield "finish", index - 2


def _copy(pairs: list[tuple[Tensor, Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def _worked_on(slabs: Tensor, batch: Batch, work: MatrixWork) -> Tensor:
    """The results for a batch of slabs (count, rows, columns): those of their matrices, shape by shape."""
    kind, first = batch.kind, batch.kind.matrices[0]
    if len(kind.matrices) == 1 and (first.rows, first.columns) == (kind.rows, kind.columns):
        return work.work(slabs, kind, batch.by_shape[0][1])
    for matrices, ids in batch.by_shape:
        parts = [
            slabs[:, m.row :: m.row_step][:, : m.rows, m.column :: m.column_step][:, :, : m.columns]
            for m in matrices
        ]
        done = work.work(torch.cat(parts), kind, ids)
        for part, result in zip(parts, done.reshape(len(parts), len(slabs), *done.shape[1:])):
            part.copy_(result)
    return slabs
