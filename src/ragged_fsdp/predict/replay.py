"""One training step as the runtime's own :class:`Schedule` would launch it, on groups that only keep books.

The schedule is the real object: which group is gathered when, what is prefetched and kept, how many
reductions are pending. Its groups are :class:`~ragged_fsdp.predict.books.BookGroup`, and its communication
context is the real one with the streams exchanged. FSDP2 has an order of its own
(:mod:`ragged_fsdp.predict.fsdp2`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragged_fsdp.fsdp.runtime.schedule import Schedule
from ragged_fsdp.fsdp.runtime.turns import Turn
from ragged_fsdp.predict.books import (
    OWN_KEPT,
    BookContext,
    BookGroup,
    GroupCost,
    LayerRun,
    Ledger,
    StepCosts,
)
from ragged_fsdp.predict.fsdp2 import Fsdp2Group, Fsdp2Order
from ragged_fsdp.predict.network import Seconds
from ragged_fsdp.predict.simulate import Span, Streams

__all__ = ["Replayed", "replay"]


class _InBackward(torch.autograd.Function):
    """Runs a function inside a backward, where the schedule may ask to be called at its end."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Callable[[], None]) -> torch.Tensor:
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.function()
        return grads[0], None


@dataclass(frozen=True)
class Replayed:
    """One step in the steady state."""

    seconds: float
    forward_s: float
    compute_s: float
    """That the compute stream worked, with the optimizer."""
    host_s: float
    """That the host took to launch it, ahead of the device."""
    spans: tuple[Span, ...]
    peak: dict[str, int]
    """Bytes by category when there were most."""

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def exposed_s(self) -> float:
        """That the compute stream waited."""
        return self.seconds - self.compute_s


def replay(costs: StepCosts) -> Replayed:
    """The second of two steps: what is kept and prefetched is known by then."""
    model = _Model(costs)
    model.step()
    begin, launched_s = model.streams.join(), model.streams.launching_s
    model.streams.spans.clear()
    model.ledger.restart()
    forward = model.step()
    end = model.streams.join()
    spans = tuple(s._replace(start=s.start - begin, end=s.end - begin) for s in model.streams.spans)
    compute = model.streams.busy(["compute"])["compute"]
    host = model.streams.launching_s - launched_s
    seconds = max(end - begin, host)  # two steps are too few for a host that is a little too slow to show it
    return Replayed(seconds, forward - begin, compute, host, spans, model.ledger.peak)


class _Model:
    """Drives the schedule as the hooks of a model would."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        held = dict(costs.persistent)
        if costs.arena_bytes:
            held["reduction"] = costs.arena_bytes
        self.streams, self.ledger = Streams(), Ledger(held)
        self.root = self._turn(costs.root, root=True)
        self.layers = [(self._turn(groups), run) for groups, run in costs.layers]
        parks = any(group.parked_bytes for groups, _ in costs.layers for group in groups)
        kept = costs.kept_layers
        if kept and (costs.fsdp2 or parks or kept != OWN_KEPT):  # by the user's choice, layer by layer
            for turn, _ in self.layers if costs.kept_bytes else self.layers[-kept:]:
                for group in turn.groups:
                    group.settings.reshard_after_forward = False
        self.schedule = Fsdp2Order(self.root) if costs.fsdp2 else Schedule(self.root)
        if isinstance(self.schedule, Fsdp2Order):
            self.schedule.forwards = {turn: costs.host.launches(run, "forward") for turn, run in self.layers}
        self.schedule.turns = [self.root, *(turn for turn, _ in self.layers)]
        self.schedule.use_comm(BookContext(self.streams))

    def _turn(self, groups: Sequence[GroupCost], root: bool = False) -> Turn:
        turn = Turn()
        turn.is_root = root
        turn.auto_reshard = self.costs.kept_layers == OWN_KEPT
        turn.gathers_first = self.costs.gathers_first
        turn.gathered_budget_bytes = self.costs.kept_bytes
        kind = Fsdp2Group if self.costs.fsdp2 else BookGroup
        books: list[Any] = [kind(cost, self.streams, self.ledger, self.costs) for cost in groups]
        turn.groups = books
        most = max((group.cost.grad_bytes for group in books), default=0)
        for group in books:
            group.companion = 0 < group.cost.grad_bytes * 4 <= most
        if root:
            for group in books:
                group.settings.reshard_after_forward = False
        return turn

    @property
    def _groups(self) -> list[Any]:
        return [group for turn in self.schedule.turns for group in turn.groups]

    def step(self) -> float:
        """All micro-batches and the update; when the last forward was over."""
        forward = 0.0
        for number in range(self.costs.micro_batches):
            last = number == self.costs.micro_batches - 1
            self.schedule.is_last_backward = last
            for group in self._groups:
                group.settings.reduce_grads, group.in_backward = last, False
            self._forward()
            forward = self.streams.now("compute")
            for group in self._groups:
                group.in_backward = True
            x = torch.zeros(1, requires_grad=True)
            _InBackward.apply(x, self._backward).backward()
        self.ledger.note("optimizer step", self.costs.optimizer_peak_bytes)
        self.streams.run("compute", self.costs.optimizer_s, "optimizer")
        for group in self._groups:
            group.drop_grads()
        return forward

    def _forward(self) -> None:
        schedule = self.schedule
        schedule.begin_forward(self.root)
        schedule.start(self.root)
        for turn, run in self.layers:
            schedule.start(turn)
            self._compute("forward", turn, run)
            schedule.end(turn)
        self._compute("forward", self.root, self.costs.root_run)
        schedule.end(self.root)
        schedule.end_forward()

    def _backward(self) -> None:
        schedule = self.schedule
        schedule.pre_backward(self.root)
        self._compute("backward", self.root, self.costs.root_run)
        for turn, run in reversed(self.layers):
            schedule.pre_backward(turn)
            self._compute("backward", turn, run)
            schedule.post_backward(turn)

    def _exchange(self, held: Seconds, name: str) -> None:
        if any(held):
            self.streams.collective("compute", held, f"tokens of {name}")

    def _compute(self, phase: str, turn: Turn, run: LayerRun) -> None:
        """The kernels between two boundaries: their memory, then their time."""
        groups: Any = turn.groups
        name = groups[0].cost.name if groups else "root"
        launches = self.costs.host.launches(run, phase, turn is self.root)
        if phase == "forward":
            self.ledger.note("activations", run.forward_peak_bytes)
            self._exchange(run.forward_exchange, name)
            self.streams.compute(run.forward_s, f"forward {name}", run.contention, run.held, launches)
            self.ledger.add("activations", run.saved_bytes)
            return
        self.ledger.note("activations", run.backward_peak_bytes)
        self._exchange(run.backward_exchange, name)
        self.streams.compute(run.backward_s, f"backward {name}", run.contention, run.held, launches)
        self.ledger.add("activations", -run.saved_bytes)
        for group in groups:
            group.computed(True)
