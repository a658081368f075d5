"""FSDP2's step, in the order of ``torch.distributed.fsdp`` (``_fsdp_param_group.py``) on streams of its own.

* Forward: a gather waits for nothing but the copy out of the gather before the last one, whose buffer it
  takes. A layer's parameters are copied out of the gathered buffer on the compute stream.
* Backward: the next gather is issued when a layer was copied out, and waits for that copy.
* Gradients are copied into the buffer of a reduce-scatter on the compute stream, which first waits for the
  reduce-scatter before it.

A layer may stay gathered after forward (``reshard_after_forward=False``), as the root does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ragged_fsdp.fsdp.runtime.group import Residence
from ragged_fsdp.fsdp.runtime.turns import Turn
from ragged_fsdp.predict.books import BOUND_BY_MEMORY, BookContext, BookGroup
from ragged_fsdp.predict.simulate import NO_LAUNCHES, Launches
from ragged_fsdp.torch_internals import queue_callback

__all__ = ["Fsdp2Group", "Fsdp2Order"]


class Fsdp2Group(BookGroup):
    """Gathers into a buffer and copies parameters out of it."""

    launched = False
    """Whether the gather is on its stream although the host has yet to come to it."""

    @property
    def gathered_at(self) -> float:
        """When its last gather is done."""
        return self._done

    def launch(self) -> None:
        """The gather alone, without its memory."""
        if self.launched or self.residence not in (Residence.SHARDED, Residence.PARKED):
            return
        cost = self.cost
        self.streams.run("gather", cost.cast_s, f"cast {cost.name}")
        held = cost.gather_again if self.residence is Residence.PARKED else cost.gather
        self._done = self.streams.collective("gather", held, f"gather {cost.name}", cost.memory_s)
        self.launched = True

    def unshard(self, async_op: bool | None = None) -> None:
        if self.residence is Residence.SHARDED or self.residence is Residence.PARKED:
            self.streams.launch(self.host.of_collectives(1, self.cost.parameters))
            self.launch()
            self.launched = False
            self.ledger.add("gathered", self.cost.gathered_bytes)
            if self.residence is Residence.PARKED:
                self.ledger.add("gathered", -self.cost.parked_bytes)
            self._move(Residence.GATHERING)

    def wait_for_unshard(self) -> None:
        """The buffer of the gather stays until :meth:`drop_buffer`."""
        if self.residence is Residence.GATHERING:
            self.streams.wait("compute", self._done)
            self.ledger.add("gathered", self.cost.gathered_bytes)
            self.streams.compute(self.cost.copy_out_s, f"copy out {self.cost.name}", BOUND_BY_MEMORY)
        if self.residence is not Residence.UNSHARDED:
            self._move(Residence.UNSHARDED)

    def drop_buffer(self) -> None:
        self.ledger.add("gathered", -self.cost.gathered_bytes)


class Fsdp2Order:
    """Takes the calls that the runtime's schedule does."""

    def __init__(self, root: Turn) -> None:
        self.turns: Sequence[Turn] = [root]
        self.is_last_backward = True
        self.forwards: Mapping[Turn, Launches] = {}
        """What the host launches for the forward of each layer."""
        self._comm: Any = None
        self._copied: tuple[list[Any], float] = [], 0.0
        """Groups whose buffers the last copy out of a forward still holds, and when it is done."""

    def use_comm(self, comm: BookContext) -> None:
        self._comm = comm
        for turn in self.turns:
            for group in turn.groups:
                group.context = comm

    def begin_forward(self, root: Turn) -> None:
        self._comm.timeline.wait("gather", self._comm.timeline.now("compute"))

    def start(self, turn: Turn) -> bool:
        gathered = self._gather(turn)
        self._let_go()
        for group in turn.groups:
            group.wait_for_unshard()
        if gathered:
            self._copied = gathered, self._comm.timeline.now("compute")
        self._launch_ahead(turn)
        return True

    def _launch_ahead(self, turn: Turn) -> None:
        """The gathers that run beside this layer: the host comes to each when the one before is launched."""
        place, streams = self.turns.index(turn), self._comm.timeline
        copied, host = streams.now("compute"), streams.host
        begins = copied
        for before, other in pairwise(self.turns[place : place + 3]):
            host = streams.launched(self.forwards.get(before, NO_LAUNCHES), host, begins, begins)
            streams.wait("gather", host)
            groups: list[Any] = list(other.groups)
            for group in groups:
                group.launch()
            begins = max([begins, *(group.gathered_at for group in groups)])
            streams.wait("gather", copied)

    def end(self, turn: Turn) -> None:
        """Layers after which nothing is kept are freed, or leave a slice on the node."""
        for group in turn.groups:
            if group.settings.reshard_after_forward:
                group.park() if group.parking is not None else group.reshard()

    def end_forward(self) -> None:
        self._let_go()

    def pre_backward(self, turn: Turn) -> None:
        if turn.is_root:
            queue_callback(self._end_backward)
        waiting = self._gather(turn) or [g for g in turn.groups if g.residence is Residence.GATHERING]
        for group in turn.groups:
            group.wait_for_unshard()
        for group in waiting:
            group.drop_buffer()
        if waiting:
            self._comm.timeline.wait("gather", self._comm.timeline.now("compute"))
        place = self.turns.index(turn)
        if place != 1:  # the root is first in forward and in backward: the last layer comes after it
            self._gather(self.turns[place - 1])

    def post_backward(self, turn: Turn) -> None:
        for group in reversed(turn.groups):
            group.post_backward()

    def _gather(self, turn: Turn) -> list[Any]:
        """Issue the gathers of a turn that are not there; those groups."""
        away = [g for g in turn.groups if g.residence in (Residence.SHARDED, Residence.PARKED)]
        for group in away:
            group.unshard()
        return away

    def _let_go(self) -> None:
        groups, done = self._copied
        for group in groups:
            group.drop_buffer()
        self._comm.timeline.wait("gather", done)
        self._copied = [], 0.0

    def _end_backward(self) -> None:
        for group in self.turns[0].groups:
            group.post_backward()
        if self.is_last_backward:
            self._comm.finish_all()
            for turn in self.turns:
                for group in turn.groups:
                    group.finish_backward()
