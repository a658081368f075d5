"""Runs an exchange plan: packed all-to-alls around the iteration, with a bounded number of buckets.

A bucket passes through three stages on every rank:

    start     update the momentum of its elements; write the updates into the packed buffer of their
              root, or straight into the batch if this rank is the root; begin the all-to-all
    iterate   wait for it, unpack into the batches, orthogonalize, pack the results, begin the way back
    finish    wait for it and apply the returned updates to the parameters

With ``in_flight`` buckets at most between their start and their finish:

    in_flight=3 (default)    start 0, start 1, iterate 0, start 2, iterate 1, finish 0, start 3, ...
    in_flight=2              start 0, start 1, iterate 0, finish 0, start 2, iterate 1, ...
    in_flight=1              start 0, iterate 0, finish 0, start 1, ...

so with 2 the gather of bucket k+1 overlaps the iteration of bucket k, and with 3 the way back of bucket
k-1 does too. All buffers of a bucket live from its start to its finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from ragged_fsdp.optim.muon_addresses import (
    Addresses,
    SegmentColumns,
    addresses_of,
    apply_rows,
    columns_of,
    momentum_rows,
)
from ragged_fsdp.optim.muon_elementwise import Piece, apply_updates, update_momentum
from ragged_fsdp.optim.muon_plan import Copy, ExchangePlan
from ragged_fsdp.optim.muon_program import BatchKind, BucketProgram, Route, Segment, bucket_program

__all__ = ["Exchange", "FamilyStep", "LocalState"]


class LocalState(NamedTuple):
    """One parameter on this rank: contiguous tensors of equal size. No gradient, no change."""

    parameter: Tensor
    gradient: Tensor | None
    buffer: Tensor


@dataclass(frozen=True)
class FamilyStep:
    """What the parameters of one family share in this step."""

    momentum: float
    nesterov: bool
    decay: float
    lr: float
    scale_of: Callable[[int, int], float]
    """Factor on the learning rate for a matrix of so many rows and columns."""
    orthogonalize: Callable[[Tensor], Tensor]
    """Of a batch (matrices, rows, columns), which may be overwritten."""


@dataclass(frozen=True)
class _Pass:
    """Segments of one family in one bucket; columns if they can be worked on all at once."""

    family: int
    segments: list[Segment]
    columns: SegmentColumns | None


@dataclass(frozen=True)
class _Step:
    """What one step works on: this rank's parameters, their families, and addresses if they have them."""

    states: Sequence[LocalState]
    families: Sequence[FamilyStep]
    addresses: Addresses | None

    def at_once(self, work: _Pass, far: Sequence[Tensor]) -> tuple[SegmentColumns, Addresses] | None:
        """The columns and addresses of a pass that one launch can do."""
        if self.addresses is None or work.columns is None or far[0].dtype == torch.float64:
            return None
        return work.columns, self.addresses


@dataclass
class _Bucket:
    """The buffers of one bucket in flight."""

    program: BucketProgram
    batches: list[Tensor]
    packed: Tensor
    """What is being received, in either direction."""
    sent: Tensor
    """Kept until the transfer is over."""
    work: dist.Work | None


class Exchange:
    """An exchange plan bound to its process group and to this rank."""

    def __init__(
        self,
        plan: ExchangePlan,
        rank: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        in_flight: int,
    ) -> None:
        if in_flight not in (1, 2, 3):
            raise ValueError(f"buckets_in_flight must be 1, 2 or 3, got {in_flight}.")
        self.plan = plan
        self.group = group
        self.dtype = dtype
        self.in_flight = in_flight
        self.programs = tuple(bucket_program(plan, bucket, rank) for bucket in range(len(plan.buckets)))
        self._to_roots = [_passes((*p.outgoing, *p.kept, *p.elsewhere)) for p in self.programs]
        self._from_roots = [_passes((*p.returned, *p.kept)) for p in self.programs]
        self.most_in_flight = 0
        """Largest number of buckets that were in flight at once."""

    def run(self, states: Sequence[LocalState], families: Sequence[FamilyStep], device: torch.device) -> None:
        """One step of all parameters of the plan."""
        live: dict[int, _Bucket] = {}
        step = _Step(states, families, addresses_of(states))
        for stage, index in _schedule(len(self.programs), self.in_flight):
            with record_function(f"Muon {stage} {index}"):  # what profiles are read by
                if stage == "start":
                    live[index] = self._start(index, step, device)
                    self.most_in_flight = max(self.most_in_flight, len(live))
                elif stage == "iterate":
                    self._iterate(live[index], families)
                else:
                    self._finish(live.pop(index), self._from_roots[index], step)

    def _start(self, index: int, step: _Step, device: torch.device) -> _Bucket:
        program = self.programs[index]
        batches = [
            torch.empty(count * kind.rows * kind.columns, dtype=self.dtype, device=device)
            for kind, count in program.batches
        ]
        sent = torch.empty(sum(program.gather.send), dtype=self.dtype, device=device)
        for work in self._to_roots[index]:
            _update_momentum(work, step, [sent, *batches])
        bucket = _Bucket(program, batches, sent.new_empty(sum(program.gather.receive)), sent, None)
        bucket.work = self._transfer(bucket, program.gather)
        return bucket

    def _iterate(self, bucket: _Bucket, families: Sequence[FamilyStep]) -> None:
        program = bucket.program
        _wait(bucket)
        _copy(
            [(_far(i.copy, bucket.batches[i.batch]), _near(i.copy, bucket.packed)) for i in program.incoming]
        )
        for index, (kind, count) in enumerate(program.batches):
            batch = bucket.batches[index].view(count, kind.rows, kind.columns)
            bucket.batches[index] = _orthogonalize_slabs(batch, kind, families[kind.family]).reshape(-1)
        bucket.sent = torch.empty(sum(program.scatter.send), dtype=self.dtype, device=bucket.sent.device)
        bucket.packed = bucket.sent.new_empty(sum(program.scatter.receive))
        _copy([(_near(i.copy, bucket.sent), _far(i.copy, bucket.batches[i.batch])) for i in program.results])
        bucket.work = self._transfer(bucket, program.scatter)

    def _finish(self, bucket: _Bucket, from_roots: list[_Pass], step: _Step) -> None:
        _wait(bucket)
        for work in from_roots:
            _apply_updates(work, step, [bucket.packed, *bucket.batches])

    def _transfer(self, bucket: _Bucket, route: Route) -> dist.Work | None:
        if not bucket.program.moves:
            return None
        return dist.all_to_all_single(
            bucket.packed, bucket.sent, list(route.receive), list(route.send), group=self.group, async_op=True
        )


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


def _update_momentum(work: _Pass, step: _Step, far: Sequence[Tensor]) -> None:
    """Update the momentum of some segments and write the updates into ``far``: packed buffer, batches."""
    momentum, nesterov = step.families[work.family].momentum, step.families[work.family].nesterov
    if (found := step.at_once(work, far)) is not None:
        from ragged_fsdp.optim.muon_elementwise_triton import launch_momentum_rows

        columns, addresses = found
        dtypes = addresses.gradient_dtype, addresses.dtype, far[0].dtype
        rows = momentum_rows(columns, addresses, far)
        launch_momentum_rows(rows, dtypes, far[0].device, momentum, nesterov)
        return
    gradients, buffers, targets = [], [], []
    for segment in work.segments:
        state = step.states[segment.parameter]
        wanted = segment.batch >= 0 or segment.sent  # if not, another replica sends these elements
        target = _far(segment.copy, far[segment.batch + 1]) if wanted else None
        if state.gradient is not None:
            gradients.append(_near(segment.copy, state.gradient))
            buffers.append(_near(segment.copy, state.buffer))
            targets.append(target)
        elif target is not None:
            target.view().zero_()  # the transfer has a fixed size; the result is not used
    update_momentum(gradients, buffers, targets, momentum, nesterov)


def _apply_updates(work: _Pass, step: _Step, far: Sequence[Tensor]) -> None:
    """Apply updates that lie in ``far`` to the parameters that have a gradient."""
    family = step.families[work.family]
    if (found := step.at_once(work, far)) is not None:
        from ragged_fsdp.optim.muon_elementwise_triton import launch_apply_rows

        columns, addresses = found
        lengths = [family.lr * _slab_scale(kind, family) for kind in columns.kinds]
        rows = apply_rows(columns, addresses, far, lengths)
        launch_apply_rows(rows, (addresses.dtype, far[0].dtype), far[0].device, family.decay)
        return
    present = [s for s in work.segments if step.states[s.parameter].gradient is not None]
    apply_updates(
        [_near(s.copy, step.states[s.parameter].parameter) for s in present],
        [_far(s.copy, far[s.batch + 1]) for s in present],
        [family.lr * _slab_scale(s.kind, family) for s in present],
        family.decay,
    )


def _near(copy: Copy, tensor: Tensor) -> Piece:
    return Piece(tensor, copy.local_start, copy.rows, copy.run, copy.local_stride)


def _far(copy: Copy, tensor: Tensor) -> Piece:
    return Piece(tensor, copy.slab_start, copy.rows, copy.run, copy.slab_stride)


def _copy(pairs: list[tuple[Piece, Piece]]) -> None:
    if pairs:
        torch._foreach_copy_(
            [target.view() for target, _ in pairs],
            [source.view() for _, source in pairs],
        )


def _wait(bucket: _Bucket) -> None:
    if bucket.work is not None:
        bucket.work.wait()
        bucket.work = None


def _passes(segments: Sequence[Segment]) -> list[_Pass]:
    chosen: dict[int, list[Segment]] = {}
    for segment in segments:
        chosen.setdefault(segment.kind.family, []).append(segment)
    return [_Pass(family, own, columns_of(own)) for family, own in chosen.items()]


def _slab_scale(kind: BatchKind, step: FamilyStep) -> float:
    """The scale of a slab is that of its first matrix; see :func:`_orthogonalize_slabs`."""
    return step.scale_of(kind.matrices[0].rows, kind.matrices[0].columns)


def _orthogonalize_slabs(slabs: Tensor, kind: BatchKind, step: FamilyStep) -> Tensor:
    """Orthogonalize the matrices inside a batch of slabs (count, rows, columns)."""
    first = kind.matrices[0]
    if len(kind.matrices) == 1 and (first.rows, first.columns) == (kind.rows, kind.columns):
        return step.orthogonalize(slabs)
    by_shape: dict[tuple[int, int], list[Tensor]] = {}
    for m in kind.matrices:
        part = slabs[:, m.row :: m.row_step][:, : m.rows, m.column :: m.column_step][:, :, : m.columns]
        by_shape.setdefault((m.rows, m.columns), []).append(part)
    for (rows, columns), parts in by_shape.items():
        done = step.orthogonalize(torch.cat(parts)).view(len(parts), -1, rows, columns)
        # Parts of other shapes may have other scales; the slab is applied with that of its first matrix.
        ratio = step.scale_of(rows, columns) / _slab_scale(kind, step)
        for part, result in zip(parts, done):
            part.copy_(result if ratio == 1.0 else result * ratio)
    return slabs
