"""Streams on the CPU that do nothing, and a check that every two uses of memory have an order.

On a device the work of two streams has an order only where one waited for an event of the other. Here
everything is done at once, so results are right whatever was forgotten, but each operation and collective
notes on which stream it was launched and what that stream had waited for. An error is raised where

- memory is written while another stream may still use it, or read while another may still write it;
- memory goes back to the allocator, which gives it to the next allocation of the stream it came from, while
  another stream may still use it;
- memory that was released is used.

Late streams (``late_streams.py``) run work as late as the compute stream allows and show what is then wrong.
This finds a missing wait between any two streams, in either order, and runs the code of the contexts and of
the storage that chooses streams and records events.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo  # derives a class from ``torch.Event``, which must be the real one then
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_inside
from late_streams import touches_no_data
from ragged_fsdp.collectives import wait_all

__all__ = ["OrderedStreams"]

Clock = Counter
"""By stream: how many of its operations are known to be done before what comes next."""


class Event:
    """What a stream had done and waited for when it was recorded."""

    def __init__(self, streams: OrderedStreams) -> None:
        self._streams = streams
        self.clock = Clock()

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Clock((stream or self._streams.current_stream()).clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self._streams.host |= self.clock

    def query(self) -> bool:
        return True


class Stream:
    """A queue of operations; used as a context it is the current one."""

    def __init__(self, streams: OrderedStreams, name: str) -> None:
        self._streams, self.name = streams, name
        self.clock = Clock()

    def __repr__(self) -> str:
        return self.name

    def wait_event(self, event: Event) -> None:
        self._streams.find_freed()
        self.clock |= event.clock

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        self._streams.stack.append(self)
        return self

    def __exit__(self, *args: Any) -> None:
        self._streams.stack.pop()


@dataclass(frozen=True)
class _Use:
    stream: Stream
    number: int
    """Of the operation on its stream."""
    writes: bool
    begin: int
    end: int
    what: str

    def is_before(self, clock: Clock) -> bool:
        return clock[self.stream] >= self.number

    def __str__(self) -> str:
        return f"{'written' if self.writes else 'read'} on {self.stream} by {self.what}"


@dataclass
class _Memory:
    alive: StorageWeakRef
    origin: Stream | None
    """Of the allocation: the allocator orders the next use behind this stream. None for the host's memory."""
    uses: list[_Use] = field(default_factory=list)

    def clash(self, new: _Use, clock: Clock) -> _Use | None:
        """An earlier use of the same bytes that the stream of ``new`` has not waited for."""
        for old in self.uses:
            same_bytes = old.begin < new.end and new.begin < old.end
            if same_bytes and (old.writes or new.writes) and not old.is_before(clock):
                return old
        return None

    def note(self, new: _Use) -> None:
        """Forget what it covers: who waits for a write, or for a later read of a stream, waits for it too."""
        self.uses = [
            old
            for old in self.uses
            if not (new.begin <= old.begin and old.end <= new.end)
            or not (new.writes or (old.stream is new.stream and not old.writes))
        ]
        self.uses.append(new)


class OrderedStreams:
    """A device module, as ``torch.cuda`` is one, over memory of the CPU. One at a time in a process."""

    def __init__(self) -> None:
        self.host = Clock()
        """What the host has waited for, and with it everything that it launches later."""
        self.compute = Stream(self, "compute")
        self.stack = [self.compute]
        self._memory: dict[int, _Memory] = {}
        self._foreign: set[int] = set()
        """Memory that another stream than that of its allocation has used."""
        self._of_groups: dict[Any, Stream] = {}
        self._resize = torch.UntypedStorage.resize_

    # -- a device module ---------------------------------------------------------------------------

    def named_stream(self, name: str) -> Stream:
        return Stream(self, name)

    def Event(self, *device: Any) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        return self.stack[-1]

    def stream(self, stream: Stream) -> Stream:
        return stream

    # -- what is launched --------------------------------------------------------------------------

    def launch(self, read: Any, written: Any, what: str, stream: Stream | None = None) -> None:
        """An operation on the current stream, or another, that reads and writes tensors."""
        self.find_freed()
        stream = stream or self.current_stream()
        stream.clock |= self.host
        stream.clock[stream] += 1
        for tensors, writes in ((read, False), (written, True)):
            for tensor in _tensors(tensors):
                if tensor.numel():
                    self._use(tensor, writes, what, stream)

    def _use(self, tensor: torch.Tensor, writes: bool, what: str, stream: Stream) -> None:
        storage = tensor.untyped_storage()
        size = tensor.element_size()
        begin = tensor.storage_offset() * size
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        use = _Use(stream, stream.clock[stream], writes, begin, begin + (last + 1) * size, what)
        if storage.nbytes() < use.end:
            raise AssertionError(f"memory that was released is {use}{_whence()}")
        memory = self._known(storage)
        if (old := memory.clash(use, stream.clock)) is not None:
            raise AssertionError(f"memory is {use}, which did not wait for when it was {old}{_whence()}")
        memory.note(use)
        if stream is not memory.origin:
            self._foreign.add(storage._cdata)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in the memory of the host, which has waited for it: no stream owns that memory."""
        self.current_stream().synchronize()
        self._known(tensor.untyped_storage()).origin = None
        return tensor

    def _known(self, storage: torch.UntypedStorage) -> _Memory:
        if storage._cdata not in self._memory:
            self._memory[storage._cdata] = _Memory(StorageWeakRef(storage), self.current_stream())
        return self._memory[storage._cdata]

    def find_freed(self) -> None:
        """Look which memory was let go since the last operation; before any stream waits for more."""
        for place in [place for place in self._foreign if self._memory[place].alive.expired()]:
            self._freed(place, "let go")

    def _freed(self, place: int, how: str) -> None:
        self._foreign.discard(place)
        memory = self._memory.pop(place)
        for old in memory.uses if memory.origin is not None else ():
            if not old.is_before(memory.origin.clock | self.host):
                raise AssertionError(
                    f"memory was {how} that {memory.origin} had allocated; it has not waited for when it was "
                    f"{old}{_whence()}"
                )

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> Any:
        """Release memory, or allocate it anew on the current stream."""
        if storage.nbytes() and storage._cdata in self._memory:
            self.find_freed()
            self._freed(storage._cdata, "released")
        done = self._resize(storage, nbytes)
        if nbytes:
            self._memory.pop(storage._cdata, None)
            self._known(storage)
        return done

    def later(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """A collective on the stream of its process group, for which the current one waits, now or later."""

        def launch(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            values = [*args, *kwargs.values()]
            tensors = [value for value in values if isinstance(value, (torch.Tensor, list))]
            group = next(value for value in values if isinstance(value, torch.distributed.ProcessGroup))
            own = self._of_groups.setdefault(group, Stream(self, f"stream of {group.group_name}"))
            with torch.utils._python_dispatch._disable_current_modes():
                wait_all(collective(*args, async_op=async_op, **kwargs))
            own.wait_stream(self.current_stream())
            self.launch(tensors[1:2], _changed(*tensors[:2]), collective.__qualname__, own)
            done = own.record_event()
            if async_op:
                return done
            self.current_stream().wait_event(done)
            return None

        return launch

    def install(self, patch: pytest.MonkeyPatch) -> TorchDispatchMode:
        """From here on, until ``patch`` is undone; models must be made afterwards, and run in the result."""
        fsdp_inside.pretend_streams(patch, self)
        patch.setattr(torch.UntypedStorage, "resize_", lambda storage, nbytes: self.resize(storage, nbytes))
        return _Noting(self)


class _Noting(TorchDispatchMode):
    """While it is active, operations are noted on the current stream."""

    def __init__(self, streams: OrderedStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind is not torch.Tensor and kind is not torch.nn.Parameter for kind in types):
            return NotImplemented  # comes again with the local tensors
        made = func(*args, **kwargs)
        name, schema = func.overloadpacket.__name__, func._schema
        if touches_no_data(func):
            self._allocated(made)
            return made
        given = {argument.name: value for argument, value in zip(schema.arguments, args)} | kwargs
        read, written = [], []
        for argument in schema.arguments:
            changed = argument.alias_info is not None and argument.alias_info.is_write
            (written if changed else read).append(given.get(argument.name))
        old = {_place(tensor) for tensor in _tensors([read, written])}
        written += [tensor for tensor in _tensors(made) if _place(tensor) not in old]
        self._streams.launch(read, written, name)
        if name == "_local_scalar_dense":  # the host waits for a number
            self._streams.current_stream().synchronize()
        return made

    def _allocated(self, made: Any) -> None:
        for tensor in _tensors(made):
            self._streams._known(tensor.untyped_storage())


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _changed(result: Any, source: Any = None) -> list[Any]:
    """What a collective writes of its result: a gather in place leaves the part alone that it sends."""
    if isinstance(source, torch.Tensor) and _place(source) == _place(result):
        first = source.storage_offset() - result.storage_offset()
        if first >= 0 and source.numel() < result.numel():
            flat = result.view(-1)
            return [flat[:first], flat[first + source.numel() :]]
    return [result]


def _whence() -> str:
    """The lines of this package that the stack goes through, the innermost last."""
    frames = [f for f in traceback.extract_stack() if "ragged_fsdp" in f.filename or "/spmd/" in f.filename]
    return "\n" + "\n".join(f"  {f.filename}:{f.lineno} {f.name}: {f.line}" for f in frames[-8:])
