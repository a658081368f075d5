"""Streams, events and the order of groups: what the groups below one root share.

Everything is allocated and freed on the compute stream (the stream current when hooks run); the other
streams wait for it before they touch new memory, and it waits for their events before memory goes back.
So the allocator never sees a cross-stream lifetime and ``record_stream`` is not needed.
See docs/schedule.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ragged_fsdp.dbuffer import FlatStorage, debug_enabled
from ragged_fsdp.dbuffer.storage import stream_getter
from ragged_fsdp.fsdp.arena import Arena
from ragged_fsdp.fsdp.debug import OrderCheck, StreamOwners
from ragged_fsdp.fsdp.gather_pool import GatherPool
from ragged_fsdp.fsdp.watch import CollectiveWatch

if TYPE_CHECKING:
    from ragged_fsdp.fsdp.param_group import ParamGroup
    from ragged_fsdp.fsdp.reduction import GradReducer

__all__ = ["CommContext", "ForwardOrder", "PendingReduction"]


_HERE = nullcontext()
_PENDING_COMPANIONS = 4  # per gradient buffer; a module has seldom more groups


@dataclass
class PendingReduction:
    """Buffers that a reduction still uses; ``release`` frees them once ``event`` has been waited for."""

    event: Any
    release: Callable[[], None]
    owner: GradReducer
    held: Any = None
    """Memory that must not go back to the compute stream's pool before ``event``."""


class CommContext:
    """Streams and pending work of all groups below one root."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.device_module: Any = None
        self.current_stream: Callable[[], Any] = stream_getter(torch.device("cpu"))
        """The stream on which hooks launch; None without streams."""
        self._so_far: Any = None
        """An event for what a stream waits for at once, recorded again each time."""
        self.streams: dict[str, Any] = {}
        self.pending: deque[PendingReduction] = deque()
        self.max_grad_buffers = 1
        """Gradient buffers alive at once. With more than one, a buffer is filled while others are reduced."""
        self.arena = Arena()
        self.gather_pool = GatherPool()
        self.order_check = OrderCheck() if debug_enabled() else None
        self.owners = StreamOwners(lambda: self.current_stream()) if debug_enabled() else None
        self.watch = CollectiveWatch()

    def use_device(self, device: torch.device) -> None:
        """Create the streams; a device without streams (CPU) runs everything in order."""
        if self.device is not None:
            return
        self.device = device
        if device.type in ("cpu", "meta"):
            return
        self.device_module = torch.get_device_module(device)
        if device.index is None:
            self.device = torch.device(device.type, self.device_module.current_device())
        self.current_stream = stream_getter(self.device)
        self._so_far = torch.Event(device)
        for name in ("gather", "reduce", "all_reduce"):
            self.streams[name] = self.device_module.Stream(device=device, priority=-1)

    def on_stream(self, name: str, stream: Any = None) -> AbstractContextManager:
        """Run on a communication stream, behind everything launched so far on the current one."""
        target = stream if stream is not None else self.streams.get(name)
        if target is None:
            return _HERE
        if self.device_module is None:
            return torch.cpu.stream(target)  # no real stream, but the user's hook asks which is current
        self._so_far.record(self.current_stream())
        target.wait_event(self._so_far)
        return target if stream is None else self.device_module.stream(stream)

    def record(self) -> Any:
        """An event behind the current stream's work; None without streams."""
        return None if self.device_module is None else self.current_stream().record_event()

    def record_launch(self, phase: str, group: ParamGroup, pg: Any) -> Any:
        """The same behind a collective of ``group``, which is watched from now on."""
        if self.device_module is None:
            return None
        return self.watch.record(phase, group, pg, self.current_stream())

    def wait(self, event: Any) -> None:
        """Let the current stream wait for ``event``."""
        if event is not None and self.device_module is not None:
            self.current_stream().wait_event(event)

    def wait_user_event(self, event: Any) -> None:
        """Let gathers wait for an event the user recorded after the optimizer step."""
        if event is not None and self.streams:
            self.streams["gather"].wait_event(event)

    def lease(self, nbytes: int) -> FlatStorage | None:
        """Storage for a gradient buffer that stays allocated between steps; None if none is that large.

        A CUDA graph that is being captured gets none: a later forward without gradients would free it.
        """
        assert self.device is not None
        if self._is_capturing():
            return None
        return self.arena.lease(nbytes, self.device, self.max_grad_buffers)

    def fill_arena(self) -> None:
        """Allocate what :meth:`lease` will lend, before the step's other memory.

        Not inside a transform of ``torch.func``, whose tensors have no storage.
        """
        assert self.device is not None
        if not self._is_capturing() and torch._C._functorch.peek_interpreter_stack() is None:
            self.arena.fill(self.device, self.max_grad_buffers)

    def _is_capturing(self) -> bool:
        return self.device_module is torch.cuda and torch.cuda.is_current_stream_capturing()

    def give_back(self, storage: FlatStorage) -> None:
        """Return storage from :meth:`lease` after the compute stream has waited for its last use."""
        self.arena.give_back(storage)

    def make_room(self, companion: bool) -> None:
        """Before another gradient buffer is filled: wait for reductions beyond the allowed number.

        The small groups of a module are not counted with its large one: computation would wait for the
        reduction of the one to start that of the other.
        """
        most = self.max_grad_buffers * (_PENDING_COMPANIONS if companion else 1)
        pending = self.pending
        while len(pending) >= most and sum(p.owner.companion is companion for p in pending) >= most:
            self._finish(pending.popleft())

    def finish_of(self, owner: GradReducer) -> None:
        """Wait for the pending reductions of one group."""
        for entry in [p for p in self.pending if p.owner is owner]:
            self.pending.remove(entry)
            self._finish(entry)

    def finish_all(self) -> None:
        """Wait for every pending reduction and free its buffers."""
        while self.pending:
            self._finish(self.pending.popleft())

    def join(self) -> None:
        """Let the current stream wait for everything launched on the others, finished or given up."""
        for stream in self.streams.values():
            self.current_stream().wait_stream(stream)
        self.finish_all()

    def _finish(self, entry: PendingReduction) -> None:
        self.wait(entry.event)
        entry.release()


class ForwardOrder:
    """The order in which groups start their forward, recorded to prefetch the next one.

    One per root of a forward: a training step and an evaluation that starts at a submodule have
    different orders. A forward that leaves the recorded order stops prefetching until it is seen again.
    """

    def __init__(self) -> None:
        self.recorded: list[ParamGroup] = []
        self._current: list[ParamGroup] = []
        self._position: int | None = 0

    def begin(self) -> None:
        """A forward starts."""
        self._current = []
        self._position = 0

    def advance(self, group: ParamGroup) -> ParamGroup | None:
        """``group`` starts; the group that started next the last time, if this is the same order."""
        self._current.append(group)
        if self._position is None or self._position >= len(self.recorded):
            return None
        if self.recorded[self._position] is not group:
            self._position = None
            return None
        self._position += 1
        return self.recorded[self._position] if self._position < len(self.recorded) else None

    def end(self) -> None:
        """The forward is over; what was seen is what the next one will follow."""
        self.recorded = self._current
        self._current = []

    @property
    def last(self) -> ParamGroup | None:
        """The group that started last in the recorded forward."""
        return self.recorded[-1] if self.recorded else None
