"""Parameters that are neighbours in memory, joined so that one kernel call updates them as one tensor.

Parameters made by ``fully_shard`` are views of one buffer per group, and so are their gradients. Parameters
whose local parts are neighbours in memory form a *run*; its state is one flat tensor per kind, of which the
``state`` of a parameter is a view, laid out like the parameter, as checkpoints expect it::

    weights     | a a a a | b b | c c c c c | . |    a run: a, b, c         (. padding ends it)
    exp_avg     | a a a a | b b | c c c c c |        one tensor, three views
    gradients   | a a a a | b b |   none    |        this step: one span, a and b

A step updates each span of a run whose gradients are neighbours too, and whose parameters are at the same
step, as one tensor; parameters that are not neighbours of others are runs of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ragged_fsdp.optim.state import Gradients, StepCounters, local_of

__all__ = ["GroupRuns", "Update"]

_MOST_REMEMBERED = 8
"""Sets of spans whose tensors are kept; they rarely are more than one."""


@dataclass(frozen=True)
class _Member:
    """One parameter of a run: its place in its group, and its elements' start and number in the run."""

    name: str
    param: Tensor
    position: int
    start: int
    numel: int


@dataclass
class _Run:
    """Neighbouring parameters, their weights as one tensor, and their flat state by key.

    A parameter that is alone keeps its shape, so that its gradient needs no view.
    """

    members: list[_Member]
    weights: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.itemsize = self.weights.element_size()
        self.held = [member for member in self.members if member.numel]
        self.kind = (self.weights.dtype, self.weights.device)
        self.address = self.weights.data_ptr()
        self.whole = _Span(self, 0, self.weights.numel())
        self.last_address = self.address + self.held[-1].start * self.itemsize if self.held else 0

    def has_moved(self) -> bool:
        """Whether the ends of the run are no longer where its weights are."""
        if not self.held:
            return False
        if local_of(self.held[0].param).data_ptr() != self.address:
            return True
        return len(self.held) > 1 and local_of(self.held[-1].param).data_ptr() != self.last_address


@dataclass(frozen=True, eq=False)
class _Span:
    """Elements [start, stop) of a run."""

    run: _Run
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        """The span's part of a tensor of the run."""
        if self.start == 0 and self.stop == flat.numel():
            return flat
        return flat.view(-1)[self.start : self.stop]


@dataclass
class Update:
    """Spans of one dtype and device whose parameters took ``count`` steps before, and their gradients."""

    count: int
    spans: list[_Span] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)


class GroupRuns:
    """The parameters of one group: runs, step counts, and tensors of spans that were updated before."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self.runs = list(_find_runs(named))
        self.counters = StepCounters([param for _, param in named])
        self.gradients = Gradients(named)
        self.places = {member.position: (run, member) for run in self.runs for member in run.members}
        self._spans: dict[tuple[int, int, int], _Span] = {}
        self._tensors: dict[tuple[Any, ...], list[list[Tensor]]] = {}

    def checked_grads(self) -> dict[int, Tensor]:
        """The gradients of the group, by position; torch's fused kernels want the dtype of the weights."""
        grads = self.gradients.read()
        for run in self.runs:
            dtype = run.kind[0]
            for member in run.held:
                grad = grads.get(member.position)
                if grad is not None and grad.dtype is not dtype:
                    raise TypeError(f"{member.name}: expected a gradient of {dtype}, got {grad.dtype}.")
        return grads

    def updates(self, grads: dict[int, Tensor]) -> list[Update]:
        """What this step does: neighbours with neighbouring gradients and equal counts are one span."""
        counts = self.counters.counts()
        found: dict[Any, Update] = {}
        for run in self.runs:
            if len(run.held) == 1:  # most of them, where parameters are not of one buffer
                position = run.held[0].position
                grad = grads.get(position)
                if grad is None:
                    continue
                spans = [(counts[position], run.whole, grad)]
            else:
                spans = list(self._stretches(run, grads, counts))
            for count, span, span_grads in spans:
                key = (count, run.kind)
                update = found.get(key)
                if update is None:
                    update = found[key] = Update(count)
                update.spans.append(span)
                update.grads.append(span_grads)
        return list(found.values())

    def _stretches(
        self, run: _Run, grads: dict[int, Tensor], counts: Sequence[int]
    ) -> Iterator[tuple[int, _Span, Tensor]]:
        """The spans of a run with several parameters."""
        first: _Member | None = None
        count, stop, expected = 0, 0, 0
        for member in run.held:
            grad = grads.get(member.position)
            if grad is None:
                continue
            address = grad.data_ptr()
            extends = member.start == stop and counts[member.position] == count and address == expected
            if first is not None and not extends:
                yield from self._joined(run, first, stop, grads, count)
            if first is None or not extends:
                first, count = member, counts[member.position]
            stop, expected = member.start + member.numel, address + member.numel * run.itemsize
        if first is not None:
            yield from self._joined(run, first, stop, grads, count)

    def _joined(
        self, run: _Run, first: _Member, stop: int, grads: dict[int, Tensor], count: int
    ) -> Iterator[tuple[int, _Span, Tensor]]:
        """Neighbours from ``first`` to ``stop`` as one span, if their gradients lie in one storage."""
        grad, numel = grads[first.position], stop - first.start
        if numel == first.numel:
            yield count, self._span(run, first.start, stop), grad.view(-1)
        elif (grad.storage_offset() + numel) * run.itemsize <= grad.untyped_storage().nbytes():
            yield count, self._span(run, first.start, stop), _flat_from(grad, numel)
        else:  # allocations that touch by chance
            for member in run.held:
                if first.start <= member.start < stop:
                    flat = grads[member.position].view(-1)
                    yield count, self._span(run, member.start, member.start + member.numel), flat

    def _span(self, run: _Run, start: int, stop: int) -> _Span:
        if stop - start == run.weights.numel():
            return run.whole
        return self._spans.setdefault((id(run), start, stop), _Span(run, start, stop))

    def tensors(self, spans: Sequence[_Span], keys: Sequence[str]) -> list[list[Tensor]]:
        """The weights of the spans, then their state by key."""
        key = (*keys, *spans)
        if key not in self._tensors:
            if len(self._tensors) >= _MOST_REMEMBERED:
                self._tensors.clear()
            weights = [span.of(span.run.weights) for span in spans]
            states = [[span.of(span.run.state[key]) for span in spans] for key in keys]
            self._tensors[key] = [weights, *states]
        return self._tensors[key]


def _find_runs(named: Iterable[tuple[str, Tensor]]) -> Iterator[_Run]:
    """Parameters in order of their addresses, joined where one ends and the next begins."""
    every = [(position, name, param) for position, (name, param) in enumerate(named)]
    members: list[_Member] = []
    stop = 0
    for position, name, param in sorted(every, key=lambda item: local_of(item[2]).data_ptr()):
        local = local_of(param)
        if not local.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous parameter, got stride {local.stride()}.")
        if not local.numel():  # a rank that holds nothing still has state to save
            yield _Run([_Member(name, param, position, 0, 0)], local.detach())
            continue
        if members and not _are_neighbours(local_of(members[-1].param), local):
            yield _run_of(members, stop)
            members, stop = [], 0
        members.append(_Member(name, param, position, stop, local.numel()))
        stop += local.numel()
    if members:
        yield _run_of(members, stop)


def _run_of(members: list[_Member], numel: int) -> _Run:
    first = local_of(members[0].param).detach()
    return _Run(members, first if len(members) == 1 else _flat_from(first, numel))


def _are_neighbours(left: Tensor, right: Tensor) -> bool:
    end = left.data_ptr() + left.numel() * left.element_size()
    same_storage = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return left.dtype == right.dtype and end == right.data_ptr() and same_storage


def _flat_from(first: Tensor, numel: int) -> Tensor:
    """``numel`` elements from the start of ``first``, beyond its end within its storage."""
    return torch.as_strided(first, (numel,), (1,), first.storage_offset())
