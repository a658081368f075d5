"""CommContext: streams, events, memory and pending reductions of the groups below one root.

Memory that several streams use is allocated and freed on the compute stream (the one that is current when
hooks run). The other streams wait for it before they touch new memory, and it waits for their events before
memory goes back. So the allocator never sees a cross-stream lifetime, and ``record_stream`` is not needed.
See docs/schedule.md.

Two groups are gathered at a time and one gradient buffer is reduced, each the size of a layer. Given back to
the allocator, their blocks would be cut up for activations and gradients, and the next layer would reserve
new ones; so that memory stays here, in a :class:`GatherPool` and an :class:`Arena`.

``RAGGED_FSDP_DEBUG=1`` finds ranks that launch different collectives before they hang or mix data, and
weights that are used on a stream that did not wait for them: :class:`OrderCheck` and :class:`StreamOwners`.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ragged_fsdp.agreement import compare
from ragged_fsdp.dbuffer import FlatStorage, debug_enabled
from ragged_fsdp.dbuffer.storage import stream_getter
from ragged_fsdp.torch_internals import has_expandable_segments, peek_interpreter_stack
from ragged_fsdp.watch import CollectiveWatch, Launch

__all__ = [
    "Arena",
    "CommContext",
    "GatherPool",
    "OrderCheck",
    "PendingReduction",
    "StreamOwners",
    "arena_bytes",
    "pooled_bytes",
]

_HERE = nullcontext()
_PENDING_COMPANIONS = 4  # per gradient buffer; a module has seldom more groups
_GROUPS_ALIVE = 2
_OWN_SEGMENT_BYTES = 10 << 20  # below this, torch's allocator lets blocks share a segment anyway


@dataclass
class PendingReduction:
    """Buffers that a reduction still uses; ``release`` frees them once ``event`` has been waited for."""

    event: Any
    release: Callable[[], None]
    owner: Any
    """The reducer of the group."""
    companion: bool
    """Whether it is one of the small groups of a module, which are counted by themselves."""
    held: Any = None
    """Memory that must not go back to the compute stream's pool before ``event``."""
    stream: Any = None
    """The compute stream that launched it; None without streams."""


class _SoFar(threading.local):
    """An event for what a stream waits for at once, recorded again each time.

    One per thread: another thread could record it anew, on its own stream, before the wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.event = torch.Event(device)


class CommContext:
    """Made once for a root, on its device; roots that ``share_comm_ctx`` joined have the same one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.device_module: Any = None
        """None on a device without streams (CPU), where everything runs in order."""
        self.streams: dict[str, Any] = {}
        self._so_far: Any = None
        if device.type not in ("cpu", "meta"):
            self.device_module = torch.get_device_module(device)
            if device.index is None:
                self.device = torch.device(device.type, self.device_module.current_device())
            self._so_far = _SoFar(self.device)
            for name in ("gather", "reduce", "all_reduce"):
                self.streams[name] = self.device_module.Stream(device=self.device, priority=-1)
        self.current_stream: Callable[[], Any] = stream_getter(self.device)
        """The stream on which hooks launch; None without streams."""
        self.pending: deque[PendingReduction] = deque()
        """Without a lock: one thread at a time touches it, the one that runs hooks. That is the caller's in
        forward, and in backward autograd's, for which the caller waits. Roots that share this must not run in
        two threads at once: their collectives would have no order that all ranks share."""
        self.max_grad_buffers = 1
        """Gradient buffers alive at once; see :meth:`ask_grad_buffers`."""
        self._asked: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.arena = Arena(self.device)
        self.gather_pool = GatherPool()
        self.watch = CollectiveWatch(self.device)
        self.order_check = OrderCheck(self.device) if debug_enabled() else None
        self.owners = StreamOwners(lambda: self.current_stream()) if debug_enabled() else None

    def on_stream(self, name: str, stream: Any = None) -> AbstractContextManager:
        """Run on a communication stream, behind everything launched so far on the current one."""
        target = stream if stream is not None else self.streams.get(name)
        if target is None:
            return _HERE
        if self.device_module is None:
            return torch.cpu.stream(target)  # no real stream, but the user's hook asks which is current
        # without it the stream would write memory that kernels launched before still use
        so_far = self._so_far.event
        so_far.record(self.current_stream())
        target.wait_event(so_far)
        return target if stream is None else self.device_module.stream(stream)

    def record(self, begun: Launch | None = None) -> Any:
        """An event behind the current stream's work; None without streams.

        If that ends with a collective that ``watch.begin`` has noted, it is watched from now on.
        """
        if self.device_module is None:
            self.watch.inside = None
            return None
        stream = self.current_stream()
        return stream.record_event() if begun is None else self.watch.record(begun, stream)

    def wait(self, event: Any) -> None:
        """Let the current stream wait for ``event``."""
        if event is not None and self.device_module is not None:
            self.current_stream().wait_event(event)

    def ask_grad_buffers(self, schedule: Any, count: int) -> None:
        """Let ``count`` gradient buffers live at once; of roots that share them the largest count holds."""
        self._asked[schedule] = count
        self.max_grad_buffers = max(self._asked.values())

    # -- pending reductions ----------------------------------------------------------------------

    def make_room(self, companion: bool) -> None:
        """Before another gradient buffer is filled: wait for reductions beyond the allowed number.

        The small groups of a module are not counted with its large one: computation would wait for the
        reduction of the one to start that of the other.
        """
        most = self.max_grad_buffers * (_PENDING_COMPANIONS if companion else 1)
        beyond = -most
        for entry in self.pending:
            beyond += entry.companion is companion
        while beyond >= 0:
            entry = self.pending.popleft()
            beyond -= entry.companion is companion
            self._finish(entry)

    def finish_of(self, owner: Any) -> None:
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
        self.wait(entry.event)  # before the release: the reduce stream may still read the buffers
        elsewhere = entry.stream is not None and entry.stream != self.current_stream()
        if elsewhere and not self.arena.is_captured:  # by when a stream that waited would be joined no more
            entry.stream.wait_event(entry.event)  # of a root that shares this: its gradients are read there
        entry.release()


def pooled_bytes(sizes: Sequence[int]) -> int:
    """The largest size that more groups have than are gathered at a time; 0 if none, or only small ones."""
    counts = Counter(sizes)
    largest = max((size for size, groups in counts.items() if groups > _GROUPS_ALIVE), default=0)
    return largest if largest >= _OWN_SEGMENT_BYTES else 0


class GatherPool:
    """Where the storage of gathered weights of ``nbytes`` is allocated.

    Groups of any other size (embedding and head, at the root) stay in the common pool: a block of a size that
    nobody else asks for would lie idle.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._pool: Any = None

    def allocating(self, device: torch.device) -> AbstractContextManager:
        """Within it allocations of this thread on ``device`` come from the pool."""
        # a graph has a pool of its own, which lives as long as it can be replayed
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return _HERE
        if self._pool is None:
            self._pool = torch.cuda.MemPool(use_on_oom=True)
        return torch.cuda.use_mem_pool(self._pool, device)


def arena_bytes(needs: Sequence[int]) -> int:
    """The largest need that at least two groups have.

    A single larger group (embedding and head, at the root) reduces last, when the rest of the step's memory
    is free again: keeping a buffer of its size through the step would raise the peak.
    """
    largest = sorted(needs, reverse=True)
    return largest[1] if len(largest) > 1 else 0


class Arena:
    """A few storages of one size, lent to one gradient buffer at a time.

    It is filled when a forward that will have a backward starts: a buffer that came between the gradients of
    the first backward would divide the memory in which later gradients must find room. A forward without
    gradients (evaluation, generation) does not need it and frees it. Segments that can grow are not divided:
    there a storage lives from its first lease to the end of the backward, and the peak before is without it.

    A CUDA graph that is being captured gets none of it: a later forward without gradients would free it.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes = 0
        self._device = device
        self._has_streams = device.type not in ("cpu", "meta")
        self._free: list[FlatStorage] = []
        self._lent = 0

    @cached_property
    def _stays(self) -> bool:
        """Whether it is filled before a step and stays between steps."""
        return self._device.type != "cuda" or not has_expandable_segments()

    @property
    def is_captured(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def lease(self, nbytes: int, limit: int) -> FlatStorage | None:
        """A storage of at least ``nbytes``; None if it is too large for the arena or ``limit`` are lent."""
        if nbytes > self.nbytes or self._lent >= limit or (self._has_streams and self.is_captured):
            return None
        while self._free and self._free[-1].nbytes != self.nbytes:  # the arena was resized
            self._free.pop().release()
        storage = self._free.pop() if self._free else self._new_storage()
        if not storage.is_materialized:
            storage.materialize()
        elif self._has_streams:
            storage.enter()  # the last to use it may have been a root with another compute stream
        self._lent += 1
        return storage

    def _new_storage(self) -> FlatStorage:
        return FlatStorage(self.nbytes, self._device, allocate=False)

    def fill(self, limit: int) -> None:
        """Before a step's other memory: allocate what ``limit`` leases need, free the rest.

        Not inside a transform of ``torch.func``, whose tensors have no storage.
        """
        if not self.nbytes or not self._stays or self.is_captured or peek_interpreter_stack() is not None:
            return
        needed = max(0, limit - self._lent)
        fitting = [storage for storage in self._free if storage.nbytes == self.nbytes][:needed]
        for storage in self._free:
            if storage not in fitting:  # the arena was resized, or fewer are asked for than before
                storage.release()
        self._free = fitting + [self._new_storage() for _ in range(needed - len(fitting))]
        for storage in self._free:
            storage.materialize()

    def give_back(self, storage: FlatStorage) -> None:
        """The buffer that was lent is not used by any stream any more."""
        if storage.debug:
            storage.poison()
        if self._has_streams:
            storage.leave()
        self._lent -= 1
        self._free.append(storage)

    def end_backward(self) -> None:
        """Free what was lent, unless it stays for the next step."""
        if not self._stays:
            self.release()

    def release(self) -> None:
        """Free what is not lent."""
        for storage in self._free:
            storage.release()


class OrderCheck:
    """The collectives launched so far on each process group, compared over its ranks before each new one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._history: dict[Any, tuple[int, str]] = {}

    def note(self, kind: str, name: str, pg: dist.ProcessGroup) -> None:
        """Raise on every rank if one is about to launch anything but ``kind`` of the group ``name``."""
        count, past = self._history.get(pg, (0, ""))
        now = f"collective {count} on this process group: {kind} of group '{name}'"
        self._history[pg] = (count + 1, hashlib.sha256(f"{past} {now}".encode()).hexdigest())
        found = compare(now, [pg], self._device, history=past)
        if found is not None:
            raise RuntimeError(f"the ranks launch different collectives: {found.difference}.")


class StreamOwners:
    """Which stream the gathered weights of each group belong to: the one that waited for them last."""

    def __init__(self, current_stream: Callable[[], Any]) -> None:
        self._current_stream = current_stream
        self._owner: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def hand_over(self, group: Any) -> None:
        """Let the weights belong to the current stream, which has waited for the one that had them."""
        self._owner[group] = self._current_stream()

    def check(self, group: Any, done: str) -> None:
        """Raise unless the weights belong to the current stream."""
        now = self._current_stream()
        owner = self._owner.get(group, now)
        if owner != now:
            raise RuntimeError(
                f"the weights of group '{group.label}' were waited for on stream {owner} and are {done} on "
                f"stream {now}. Let the second wait for the first, then call unshard() on it."
            )
