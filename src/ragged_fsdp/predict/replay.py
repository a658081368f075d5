"""One training step as the runtime's own :class:`Schedule` would launch it, on groups that only keep books.

The schedule is the real object: which group is gathered when, what is prefetched and kept, how many
reductions are pending. Its groups are :class:`_BookGroup`, which launch simulated work on :class:`Streams`
and note bytes in a :class:`Ledger`, and its communication context is the real one with the streams
exchanged. FSDP2 is the same replay with nothing kept, no gather ahead of a reduction, and its copies on the
compute stream.

Memory follows the order of the launches, as the caching allocator does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ragged_fsdp.fsdp.runtime.group import ALLOWED_MOVES, Residence
from ragged_fsdp.fsdp.runtime.schedule import Schedule, Turn
from ragged_fsdp.fsdp.streams import CommContext, PendingReduction
from ragged_fsdp.predict.network import Seconds
from ragged_fsdp.predict.simulate import Span, Streams

__all__ = ["GroupCost", "LayerRun", "Ledger", "Replayed", "StepCosts", "replay"]

_FREE = Seconds(0.0, 0.0)


@dataclass(frozen=True)
class GroupCost:
    """One group of parameters: seconds on streams and links, and bytes."""

    name: str
    gathered_bytes: int
    """The buffer of the gathered weights, with padding."""
    gather: Seconds
    gather_again: Seconds
    """Before backward: less where a slice was parked on the node."""
    cast_s: float
    """Of this rank's shard, before it is gathered."""
    memory_s: float = 0.0
    """For which a gather reads and writes the device's memory."""
    decode_s: float = 0.0
    """Of gathered codes into weights, behind the gather."""
    message_bytes: int = 0
    """Of the gathered codes, which live until then."""
    copy_out_s: float = 0.0
    """Out of the gathered buffer into parameters, on the compute stream (FSDP2)."""
    grad_bytes: int = 0
    """Gradients as autograd makes them."""
    grad_copy_s: float = 0.0
    """Into the buffer of a reduce-scatter, on the compute stream."""
    buffer_bytes: int = 0
    """What a reduction needs beside the gradients."""
    keeps_grads: bool = False
    """Whether the gradients themselves are sent, and live until the reduction is done (an exchange)."""
    reduce: tuple[tuple[Seconds, float], ...] = ()
    """Parts of the reduction in their order: links, then the sum of what arrived."""
    all_reduce: Seconds = _FREE
    """Between replicas."""
    shard_grad_bytes: int = 0
    parked_bytes: int = 0
    """What stays between forward and backward with ``reshard_after_forward`` an int."""


@dataclass(frozen=True)
class LayerRun:
    """The computation between two boundaries: seconds, and bytes above what lived before."""

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    exchange: Seconds = _FREE
    """Of tokens between the ranks that share a layer's experts: twice in forward, twice in backward."""
    recomputed: bool = False
    """Whether the backward computes the forward again, with its exchanges."""


@dataclass(frozen=True)
class StepCosts:
    """A model in the order of its forward. The root's computation is after the layers, its gather before."""

    root: GroupCost | None
    root_run: LayerRun
    layers: Sequence[tuple[Sequence[GroupCost], LayerRun]]
    persistent: dict[str, int]
    """Bytes by category that live all the time: weights, optimizer states."""
    optimizer_s: float
    micro_batches: int = 1
    keeps: bool = True
    """Whether the groups with which backward begins stay gathered."""
    gathers_first: bool = False
    """Whether a gather is issued ahead of a reduction (exchanges)."""
    kept_bytes: int = 0
    """Budget of ``reshard_after_forward="auto"``."""
    contention: float = 0.0
    """Of :class:`Streams`."""
    arena_bytes: int = 0
    """Of a gradient buffer that stays allocated between steps: without segments that can grow."""


class Ledger:
    """Live bytes by category, and the categories when there were most."""

    def __init__(self, held: dict[str, int]) -> None:
        self.live: dict[str, int] = defaultdict(int, held)
        self.peak: dict[str, int] = dict(self.live)

    def add(self, category: str, nbytes: int) -> None:
        """Take or, with a negative number, give back."""
        self.live[category] += nbytes
        if nbytes > 0:
            self.note()

    def note(self, category: str = "", transient: int = 0) -> None:
        """Compare with the peak, with bytes that come and go at once."""
        if sum(self.live.values()) + transient > sum(self.peak.values()):
            self.peak = dict(self.live)
            if transient:
                self.peak[category] = self.peak.get(category, 0) + transient


class _BookContext(CommContext):
    """The real pending reductions and gradient buffers; waiting is a time."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(torch.device("cpu"))
        self.timeline = streams
        self.owners = None
        self.order_check = None

    def wait(self, event: Any) -> None:
        self.timeline.wait("compute", event)

    def fill_arena(self) -> None:
        """The books of memory are those of segments that can grow: a buffer comes with its first gradient."""


class _BookGroup:
    """Does what :class:`~ragged_fsdp.fsdp.runtime.group.ParamGroup` does to streams and memory."""

    pin_memory = offload = False

    def __init__(self, cost: GroupCost, streams: Streams, ledger: Ledger, arena_bytes: int) -> None:
        self.cost, self.streams, self.ledger = cost, streams, ledger
        self._needs = 0 if cost.buffer_bytes <= arena_bytes else cost.buffer_bytes
        """Bytes of a reduction that no kept storage has."""
        self.context: Any = None
        self.residence = Residence.SHARDED
        self.transport = SimpleNamespace(nbytes=cost.gathered_bytes, parking=cost.parked_bytes or None)
        self.settings = SimpleNamespace(
            reshard_after_forward=True,
            unshard_in_backward=True,
            reduce_grads=True,
            max_grad_buffers=1,
            reduce_comm=SimpleNamespace(common_memory=True),
        )
        self.in_backward = False
        self.companion = False
        """Whether it is one of the small groups of its layer, whose reductions are counted by themselves."""
        self._done = 0.0
        self._grads = 0
        self._buffered = False

    def _move(self, to: Residence) -> None:
        if (self.residence, to) not in ALLOWED_MOVES:
            raise RuntimeError(f"{self.cost.name}: no transition to {to.name}; this is a bug.")
        self.residence = to

    # -- weights ---------------------------------------------------------------------------------

    def unshard(self, async_op: bool | None = None) -> None:
        if self.residence is Residence.SHARDED or self.residence is Residence.PARKED:
            cost, streams = self.cost, self.streams
            again = self.residence is Residence.PARKED or (self.in_backward and not cost.parked_bytes)
            if not cost.decode_s:
                self.ledger.add("gathered", cost.gathered_bytes)
            streams.wait("gather", streams.now("compute"))
            streams.run("gather", cost.cast_s, f"cast {cost.name}")
            held = cost.gather_again if again else cost.gather
            streams.beside(cost.cast_s + cost.memory_s)
            self._done = streams.collective("gather", held, f"gather {cost.name}")
            self.ledger.add("gathered", cost.message_bytes)
            self._move(Residence.GATHERING)

    def wait_for_unshard(self) -> None:
        if self.residence is Residence.GATHERING:
            self.streams.wait("compute", self._done)
            if self.cost.decode_s:  # just before the layer, on its stream; only then its memory is taken
                self.ledger.add("gathered", self.cost.gathered_bytes)
                self.streams.run("compute", self.cost.decode_s, f"decode {self.cost.name}")
            self.ledger.add("gathered", -self.cost.message_bytes)
            if self.cost.copy_out_s:
                self.ledger.note("gathered", self.cost.gathered_bytes)
                self.streams.run("compute", self.cost.copy_out_s, f"copy out {self.cost.name}")
        if self.residence is not Residence.UNSHARDED:
            if self.residence is Residence.GATHERING and self.cost.parked_bytes and self.in_backward:
                self.ledger.add("gathered", -self.cost.parked_bytes)
            self._move(Residence.UNSHARDED)

    def settle(self) -> None: ...
    def hand_over(self) -> None: ...

    def reshard(self) -> None:
        if self.residence is Residence.SHARDED:
            return
        gathering = self.residence is Residence.GATHERING
        if gathering:
            self.streams.wait("compute", self._done)
            self.ledger.add("gathered", -self.cost.message_bytes)
        if not (gathering and self.cost.decode_s):
            self.ledger.add("gathered", -self.cost.gathered_bytes)
        self._move(Residence.SHARDED)

    to_sharded = reshard

    def keep(self) -> None:
        self._move(Residence.KEPT)

    def park(self) -> None:
        self.ledger.add("gathered", self.cost.parked_bytes)
        self.ledger.add("gathered", -self.cost.gathered_bytes)
        self._move(Residence.PARKED)

    # -- gradients -------------------------------------------------------------------------------

    def computed(self, grads: bool) -> None:
        """The backward of its layer has run; ``grads`` are what autograd left."""
        if grads:
            self._grads += self.cost.grad_bytes
            self.ledger.add("gradients", self.cost.grad_bytes)

    def collect(self) -> None:
        self.reshard()
        cost = self.cost
        if not self._grads or cost.keeps_grads:
            return
        self.context.finish_of(self)
        if not self._buffered:
            self.context.make_room(self.companion)
            self._buffered = True
            self.ledger.add("reduction", self._needs)
        self.streams.run("compute", cost.grad_copy_s, f"collect {cost.name}")
        self.ledger.add("gradients", -self._grads)
        self._grads = 0

    def reduce(self) -> None:
        cost, streams = self.cost, self.streams
        if not self.settings.reduce_grads or not (self._grads or self._buffered):
            return
        if cost.keeps_grads:
            self.context.make_room(self.companion)
            self.ledger.add("reduction", self._needs)
        self.ledger.add("gradients", cost.shard_grad_bytes)
        streams.wait("reduce", streams.now("compute"))
        end = 0.0
        for held, sum_s in cost.reduce:
            streams.collective("reduce", held, f"reduce {cost.name}")
            end = streams.run("reduce", sum_s, f"sum {cost.name}")
            streams.beside(sum_s)
        if any(cost.all_reduce):
            streams.wait("all_reduce", end)
            end = streams.collective("all_reduce", cost.all_reduce, f"all-reduce {cost.name}")
        grads, self._grads, self._buffered = self._grads, 0, False

        def release() -> None:
            self.ledger.add("reduction", -self._needs)
            self.ledger.add("gradients", -grads)

        self.context.pending.append(PendingReduction(end, release, self, self.companion))

    def post_backward(self) -> None:
        self.collect()
        self.reduce()

    def finish_backward(self) -> None:
        if self.residence is Residence.GATHERING or self.residence is Residence.KEPT:
            self.reshard()

    def drop_grads(self) -> None:
        """The optimizer has used them."""
        self.ledger.add("gradients", -self.cost.shard_grad_bytes)


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
    """The third of three steps: what is kept and prefetched is known by then."""
    model = _Model(costs)
    for _ in range(2):
        model.step()
    begin = model.streams.join()
    model.streams.spans.clear()
    model.ledger.peak = dict(model.ledger.live)
    forward = model.step()
    end = model.streams.join()
    spans = tuple(s._replace(start=s.start - begin, end=s.end - begin) for s in model.streams.spans)
    compute = model.streams.busy(["compute"])["compute"]
    return Replayed(end - begin, forward - begin, compute, spans, model.ledger.peak)


class _WaitsFirst(Schedule):
    """FSDP2's order: the next gather is issued when this one was waited for and copied out."""

    def __init__(self, turn: Turn) -> None:
        super().__init__(turn)
        self._later: list[Callable[[], None]] | None = None

    def start(self, turn: Turn) -> bool:
        with self._ahead_later():
            return super().start(turn)

    def pre_backward(self, turn: Turn) -> None:
        with self._ahead_later():
            super().pre_backward(turn)

    @contextmanager
    def _ahead_later(self) -> Iterator[None]:
        self._later = []
        yield
        later, self._later = self._later, None
        for gather in later:
            gather()

    def _prefetch(self, turn: Turn) -> None:
        assert self._later is not None
        self._later.append(partial(super()._prefetch, turn))

    def _gather_ahead(self, turn: Turn | None) -> None:  # type: ignore[override]
        assert self._later is not None
        self._later.append(partial(Schedule._gather_ahead, turn))


class _Model:
    """Drives the schedule as the hooks of a model would."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        held = dict(costs.persistent)
        if costs.arena_bytes:
            held["reduction"] = costs.arena_bytes
        self.streams, self.ledger = Streams(costs.contention), Ledger(held)
        self.root = self._turn([costs.root] if costs.root is not None else [], root=True)
        self.layers = [(self._turn(groups), run) for groups, run in costs.layers]
        copies_out = any(cost.copy_out_s for groups, _ in costs.layers for cost in groups)
        self.schedule = (_WaitsFirst if copies_out else Schedule)(self.root)
        self.schedule.turns = [self.root, *(turn for turn, _ in self.layers)]
        self.schedule.use_comm(_BookContext(self.streams))

    def _turn(self, groups: Sequence[GroupCost], root: bool = False) -> Turn:
        turn = Turn()
        turn.is_root = root
        turn.auto_reshard = self.costs.keeps
        turn.gathers_first = self.costs.gathers_first
        turn.gathered_budget_bytes = self.costs.kept_bytes
        arena = self.costs.arena_bytes
        books: list[Any] = [_BookGroup(cost, self.streams, self.ledger, arena) for cost in groups]
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

    def _exchange(self, run: LayerRun, times: int, name: str) -> None:
        """Tokens to their experts and back: computation waits for it."""
        if any(run.exchange):
            held = Seconds(run.exchange.inside * times, run.exchange.outside * times)
            self.streams.collective("compute", held, f"tokens of {name}")

    def _compute(self, phase: str, turn: Turn, run: LayerRun) -> None:
        """The kernels between two boundaries: their memory, then their time."""
        groups: Any = turn.groups
        name = groups[0].cost.name if groups else "root"
        if phase == "forward":
            self.ledger.note("activations", run.forward_peak_bytes)
            self._exchange(run, 2, name)
            self.streams.compute(run.forward_s, f"forward {name}")
            self.ledger.add("activations", run.saved_bytes)
            return
        self.ledger.note("activations", run.backward_peak_bytes)
        self._exchange(run, 4 if run.recomputed else 2, name)
        self.streams.compute(run.backward_s, f"backward {name}")
        self.ledger.add("activations", -run.saved_bytes)
        for group in groups:
            group.computed(True)
