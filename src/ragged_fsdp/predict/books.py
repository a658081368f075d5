"""What one group, one layer and one step cost, and groups that only keep books of it.

:class:`BookGroup` does to simulated streams and to a :class:`Ledger` what the runtime's groups do to a
device: the runtime's own schedule moves it without knowing. Memory follows the order of the launches, as the
caching allocator does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from ragged_fsdp.fsdp.runtime.group import ALLOWED_MOVES, Residence
from ragged_fsdp.fsdp.streams import CommContext, PendingReduction
from ragged_fsdp.predict.network import Seconds
from ragged_fsdp.predict.simulate import Launches, Streams

__all__ = [
    "BOUND_BY_MEMORY",
    "OWN_KEPT",
    "BookContext",
    "BookGroup",
    "GroupCost",
    "Host",
    "LayerRun",
    "Ledger",
    "StepCosts",
]

_FREE = Seconds(0.0, 0.0)
OWN_KEPT = 2
"""Layers that the runtime's schedule keeps by itself; any other number is a user's choice, layer by layer."""
BOUND_BY_MEMORY = 1.0
"""Contention of copies on the compute stream: of two copies each takes as long as both."""


@dataclass(frozen=True)
class Host:
    """Seconds of the process that launches a step, ahead of the device if it can."""

    collective_s: float = 0.0
    """For one collective, with the hooks and copies that go with it."""
    parameter_s: float = 0.0
    """More for each parameter of a group that is gathered or reduced."""
    layer_s: float = 0.0
    """For all kernels of one layer's forward and backward; 0 where the layer's own time has it."""
    operation_s: float = 0.0
    """For one operation of a layer that was counted."""

    def of_collectives(self, calls: int, parameters: int) -> float:
        """For ``calls`` that gather or reduce a group once."""
        return calls * self.collective_s + parameters * self.parameter_s

    def launches(self, run: LayerRun, phase: str, root: bool = False) -> Launches:
        """The kernels of a layer, or of the root; a backward has two thirds of what a layer takes."""
        operations = run.forward_operations if phase == "forward" else run.backward_operations
        share = 0.0 if root else 1 / 3 if phase == "forward" else 2 / 3
        return Launches(operations, share * self.layer_s + operations * self.operation_s)


@dataclass(frozen=True)
class GroupCost:
    """One group of parameters: seconds on streams and links, and bytes."""

    name: str
    gathered_bytes: int
    """The buffer of the gathered weights, with padding."""
    gather: Seconds
    gather_again: Seconds
    """The gather before backward: less where a slice was parked on the node."""
    cast_s: float
    """The cast of this rank's shard, before it is gathered."""
    memory_s: float = 0.0
    """How long a gather reads and writes the device's memory: it takes no less."""
    decode_s: float = 0.0
    """Decoding of gathered codes into weights, behind the gather."""
    message_bytes: int = 0
    """Bytes of the gathered codes, which live until they are decoded."""
    copy_out_s: float = 0.0
    """FSDP2's copy out of the gathered buffer into parameters, on the compute stream."""
    grad_bytes: int = 0
    """Gradients as autograd makes them."""
    grad_copy_s: float = 0.0
    """The copy of gradients into the buffer of a reduce-scatter, on the compute stream."""
    buffer_bytes: int = 0
    """What a reduction needs beside the gradients."""
    keeps_grads: bool = False
    """Whether the gradients themselves are sent, and live until the reduction is done (an exchange)."""
    reduce: tuple[tuple[Seconds, float], ...] = ()
    """Parts of the reduction in their order: links, then the sum of what arrived."""
    reduce_calls: int = 1
    """Collectives that the host launches for all parts together."""
    all_reduce: Seconds = _FREE
    """Between replicas."""
    shard_grad_bytes: int = 0
    parked_bytes: int = 0
    """What stays between forward and backward with ``reshard_after_forward`` an int."""
    parameters: int = 0
    """How many it has."""


@dataclass(frozen=True)
class LayerRun:
    """The computation between two boundaries: seconds, and bytes above what lived before."""

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward_exchange: Seconds = _FREE
    """Tokens between the ranks that share a layer's experts or matrices: computation waits for them."""
    backward_exchange: Seconds = _FREE
    contention: float = 0.0
    """By how much of their time copies on other streams delay it: both want the device's memory."""
    held: float = 0.0
    """How much longer it takes, as a share, while a collective holds multiprocessors."""
    forward_products_s: float = 0.0
    """Seconds of its products at the rate that a GPU sustains: how much power it draws."""
    backward_products_s: float = 0.0
    forward_operations: float = 0.0
    """That the host launches one by one; 0 where ``forward_s`` was measured, which has it."""
    backward_operations: float = 0.0


@dataclass(frozen=True)
class StepCosts:
    """A model in the order of its forward. The root's computation is after the layers, its gather before."""

    root: Sequence[GroupCost]
    root_run: LayerRun
    layers: Sequence[tuple[Sequence[GroupCost], LayerRun]]
    persistent: dict[str, int]
    """Bytes by category that live all the time: weights, optimizer states."""
    optimizer_s: float
    optimizer_peak_bytes: int = 0
    """What an update needs while it runs."""
    micro_batches: int = 1
    kept_layers: int = OWN_KEPT
    """Layers that stay gathered after forward: backward begins with them."""
    gathers_first: bool = False
    """Whether a gather is issued ahead of a reduction (exchanges)."""
    kept_bytes: int = 0
    """Budget of ``reshard_after_forward="auto"``."""
    fsdp2: bool = False
    """Whether the order is FSDP2's."""
    arena_bytes: int = 0
    """Bytes of a gradient buffer that stays allocated between steps: without segments that can grow."""
    host: Host = field(default_factory=Host)


class Ledger:
    """Live bytes by category, and the categories when there were most."""

    def __init__(self, held: dict[str, int]) -> None:
        self.live: dict[str, int] = defaultdict(int, held)
        self._total = sum(held.values())
        self.restart()

    def restart(self) -> None:
        """Look for the peak from now on."""
        self.peak: dict[str, int] = dict(self.live)
        self._most = self._total

    def add(self, category: str, nbytes: int) -> None:
        """Take or, with a negative number, give back."""
        self.live[category] += nbytes
        self._total += nbytes
        if self._total > self._most:
            self.note()

    def note(self, category: str = "", transient: int = 0) -> None:
        """Compare with the peak, with bytes that come and go at once."""
        if self._total + transient > self._most:
            self._most = self._total + transient
            self.peak = dict(self.live)
            if transient:
                self.peak[category] = self.peak.get(category, 0) + transient


class BookContext(CommContext):
    """The real pending reductions and gradient buffers; waiting is a time."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(torch.device("cpu"))
        self.timeline = streams
        self.owners = None
        self.order_check = None

    def wait(self, event: Any) -> None:
        self.timeline.wait("compute", event)


class BookGroup:
    """Does what :class:`~ragged_fsdp.fsdp.runtime.group.ParamGroup` does to streams and memory."""

    pin_memory = offload = False
    is_old = False  # what is gathered when a forward begins was so in the same step

    def __init__(self, cost: GroupCost, streams: Streams, ledger: Ledger, step: StepCosts) -> None:
        self.cost, self.streams, self.ledger, self.host = cost, streams, ledger, step.host
        self._needs = 0 if cost.buffer_bytes <= step.arena_bytes else cost.buffer_bytes
        """Bytes of a reduction that no kept storage has."""
        self.context: Any = None
        self.residence = Residence.SHARDED
        self.transport = SimpleNamespace(nbytes=cost.gathered_bytes)
        self.parking = cost.parked_bytes or None
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
            streams.launch(self.host.of_collectives(1, cost.parameters))
            streams.wait("gather", streams.now("compute"))
            streams.run("gather", cost.cast_s, f"cast {cost.name}")
            held = cost.gather_again if again else cost.gather
            self._done = streams.collective("gather", held, f"gather {cost.name}", cost.memory_s)
            self.ledger.add("gathered", cost.message_bytes)
            self._move(Residence.GATHERING)

    def wait_for_unshard(self) -> None:
        if self.residence is Residence.GATHERING:
            self.streams.wait("compute", self._done)
            if self.cost.decode_s:  # just before the layer, on its stream; only then its memory is taken
                self.ledger.add("gathered", self.cost.gathered_bytes)
                self.streams.compute(self.cost.decode_s, f"decode {self.cost.name}", BOUND_BY_MEMORY)
            self.ledger.add("gathered", -self.cost.message_bytes)
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
        self.streams.compute(cost.grad_copy_s, f"collect {cost.name}", BOUND_BY_MEMORY)
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
        launch_s = self.host.of_collectives(cost.reduce_calls + any(cost.all_reduce), cost.parameters)
        end = 0.0
        for held, sum_s in cost.reduce:
            streams.launch(launch_s / len(cost.reduce))
            streams.collective("reduce", held, f"reduce {cost.name}")
            end = streams.run("reduce", sum_s, f"sum {cost.name}")
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
