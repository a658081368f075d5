"""Weights to processes of the same machine without a gather: ranks share their parts, receivers join them.

The gathered buffer of a group is the shards of its ranks, one behind the other. So a receiver that can open
the ranks' memory (CUDA IPC; files on the CPU) needs no collective: a rank writes its shard, as it is sent,
into one of two slots that the receivers opened at the start. In each turn the ranks tell each other once that
they go on, and from that know::

    turn t    bucket t - 2 has been taken: every rank with a receiver had its answer before it told
              bucket t - 1 is being written: every rank has recorded its event; receivers hear of it now
              bucket t is written next, into the slots of t - 2, beside the receivers' copies of t - 1

A receiver's stream waits for the events of the ranks; no rank waits for its device.

Messages and answers carry the name of their pass: one that ended early may leave some of them in the
connection, and an old answer that counted in the next pass would let a slot be overwritten too early.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from ragged_fsdp.agreement import together
from ragged_fsdp.weights.buckets import Bucket, Record
from ragged_fsdp.weights.streaming import Stream

__all__ = ["Connection", "hand_over", "take_over"]

_SLOTS = 2
_END = "end"
_LEFT: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By a receiver's connection: the pass that it left before the end, of which messages may still come."""


class Connection(Protocol):
    """What is used of a ``multiprocessing.connection.Connection``."""

    def send(self, obj: Any, /) -> None: ...

    def recv(self) -> Any: ...

    def poll(self, timeout: float, /) -> bool: ...


@dataclass(frozen=True)
class _SharedMemory:
    """What another process opens memory with."""

    host: str
    handle: Any
    """The path of a file, or what torch rebuilds a CUDA tensor from."""
    nbytes: int
    event: bytes | None
    """Recorded on CUDA devices when the memory has been written."""


@dataclass(frozen=True)
class _Slots:
    """The first message: every rank's slots, by process group, rank in the group, and number."""

    of: list[list[list[_SharedMemory]]]


@dataclass(frozen=True)
class _PlacedBucket:
    """A bucket in slots of the ranks of a process group; or, with ``memory``, in that of one rank."""

    label: str
    records: tuple[Record, ...]
    group: int = 0
    slot: int = 0
    piece_bytes: int = 0
    memory: _SharedMemory | None = None


@dataclass(frozen=True)
class _Failed:
    """No more will come."""

    why: str


def hand_over(stream: Stream, connection: Connection | None, *, timeout_s: float = 600.0) -> None:
    """A pass to processes of this machine that run :func:`take_over`; no bucket is gathered if it is shards.

    All ranks of the stream call it. They and the receivers must reach each other's memory: one machine, and
    GPUs with peer access. A rank has memory for two of its shards meanwhile.

    Args:
        connection: to this rank's receiver, as made by ``multiprocessing.Pipe()``; None on ranks without one.
        timeout_s: how long a receiver may be silent.

    Raises:
        RuntimeError: on every rank, if a receiver or a rank fails; the receivers raise too.
    """
    if stream.delta:
        raise ValueError("hand_over: receivers take whole tensors; the stream has delta=True")
    if stream.to is not None:
        raise ValueError(f"hand_over: every rank hands over its part; the stream has to={stream.to}")
    channel = _Receiver(connection, timeout_s) if connection is not None else None
    stream.begin()
    complete = told = False
    try:
        with tempfile.TemporaryDirectory(prefix="weights-") as folder:
            giver = _Giver(stream, Path(folder))
            last = giver.buckets + 1
            for turn in range(last + 1):
                if channel is not None:
                    channel.settle()
                    channel.put([giver.slots] if turn == 0 else [_END] if turn == last else ())
                    channel.settle()  # at the end: no rank lets go of slots that a receiver has open
                write = giver.prepare(turn) if turn < giver.buckets else None
                told = turn == last
                if not stream.agree(going_on=True):
                    told = True
                    raise RuntimeError("the hand-over ended early: another rank or its receiver has failed")
                if channel is not None and 0 < turn < last:
                    channel.put(giver.messages(turn - 1))
                if write is not None:
                    write()
        complete = True
    except BaseException as error:
        if not told:
            stream.agree(going_on=False)
        if channel is not None:
            channel.give_up(error)
        raise
    finally:
        stream.ended(complete=complete)


class _Giver:
    """This rank's slots, and what lies in them."""

    def __init__(self, stream: Stream, folder: Path) -> None:
        self._stream, self._folder = stream, folder
        self.buckets = stream.gathers
        sources = [source for source in map(stream.in_shards, range(self.buckets)) if source is not None]
        self._groups = list(dict.fromkeys(source.process_group for source in sources))
        self._slot_bytes = max((source.shard_bytes for source in sources), default=0)
        self._memory: list[Tensor] = []
        self._events: list[Any] = []
        self._kept: list[list[tuple[Bucket, Any]]] = [[] for _ in range(_SLOTS)]
        """Buckets that had to be gathered, with the events behind them."""
        self.slots = _Slots([together(self._exported, stream.group(group)) for group in self._groups])
        for ranks in self.slots.of:
            hosts = sorted({memory.host for slots in ranks for memory in slots})
            if len(hosts) > 1:
                raise ValueError(
                    f"hand_over: the ranks are on {hosts[0]!r} and {hosts[1]!r}, and no process opens memory "
                    "of both; gather with stream(to=...), and share() or send() what comes"
                )

    def _new(self, name: str, nbytes: int) -> Tensor:
        """Memory that can be exported."""
        if self._stream.device.type == "cuda" or not nbytes:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._stream.device)
        return torch.from_file(str(self._folder / name), shared=True, size=nbytes, dtype=torch.uint8)

    def _exported(self) -> list[_SharedMemory]:
        """The slots, made when they are first asked for."""
        on_device = self._stream.device.type == "cuda"
        for number in range(len(self._memory), _SLOTS):
            self._events.append(torch.cuda.Event(interprocess=True) if on_device else None)
            self._memory.append(self._new(f"slot-{number}", self._slot_bytes))
        return [self._export(f"slot-{i}", memory, self._events[i]) for i, memory in enumerate(self._memory)]

    def _export(self, name: str, memory: Tensor, event: Any) -> _SharedMemory:
        handle: Any = str(self._folder / name)
        if memory.device.type == "cuda":
            handle = reduce_tensor(memory)
        written = event.ipc_handle() if event is not None else None
        return _SharedMemory(socket.gethostname(), handle, memory.numel(), written)

    def prepare(self, index: int) -> Callable[[], None]:
        """Take the memory of a bucket; returns what writes this rank's part of it, once all ranks go on."""
        if index == 0:
            self._stream.look()
        slot = index % _SLOTS
        self._kept[slot] = []
        if self._stream.in_shards(index) is not None:
            return partial(self._stream.write_shard, index, self._memory[slot], self._events[slot])
        start = self._stream.prepare(index)

        def gather() -> None:
            self._kept[slot] = [(bucket, None) for bucket in start()()]

        return gather

    def messages(self, index: int) -> list[_PlacedBucket]:
        """What receivers are told of a bucket that is being written."""
        slot, source = index % _SLOTS, self._stream.in_shards(index)
        if source is not None:
            group = self._groups.index(source.process_group)
            return [_PlacedBucket(source.label, tuple(source.records), group, slot, source.shard_bytes)]
        told = []
        for number, (bucket, _) in enumerate(self._kept[slot]):
            name, event, data = f"bucket-{slot}-{number}", None, bucket.data
            if data.device.type == "cuda":
                event = torch.cuda.Event(interprocess=True)
                event.record()
            else:
                data = self._new(name, data.numel()).copy_(data)
            self._kept[slot][number] = (bucket, event)  # until the receiver has opened it
            told.append(_PlacedBucket(bucket.label, bucket.records, memory=self._export(name, data, event)))
        return told


class _Receiver:
    """A rank's end of its connection: every message is answered, by None or by what went wrong."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        self._pass = secrets.token_hex(8)
        self._unanswered = 0

    def put(self, messages: Sequence[Any]) -> None:
        """Send messages."""
        for message in messages:
            self._unanswered += 1
            self._connection.send((self._pass, message))

    def settle(self) -> None:
        """Wait until every message has been answered."""
        while self._unanswered:
            of_pass, answer = _heard(self._connection, self._timeout_s, "the receiver")
            if of_pass not in (self._pass, None):
                continue
            self._unanswered -= 1
            if answer is not None:
                raise RuntimeError(f"the receiver failed: {answer}")

    def give_up(self, error: BaseException) -> None:
        """Let the receiver raise too, if it still listens."""
        with contextlib.suppress(OSError):
            self._connection.send((self._pass, _Failed(f"{type(error).__name__}: {error}")))


def _heard(connection: Connection, timeout_s: float, who: str) -> Any:
    """The next message, or an error that says who did not send one."""
    if not connection.poll(timeout_s):
        raise TimeoutError(f"{who} was silent for {timeout_s} s")
    try:
        return connection.recv()
    except (EOFError, OSError) as error:
        raise RuntimeError(f"{who} has closed the connection") from error


def take_over(
    connection: Connection, *, device: torch.device | str = "cuda", timeout_s: float = 600.0
) -> Iterator[Bucket]:
    """The buckets of one :func:`hand_over`, on a receiver, in memory of its own on ``device``.

    Raises:
        RuntimeError: if the trainer ended the pass early; what has come so far is not whole.
    """
    device = torch.device(device)
    slots: list[list[list[_Opened]]] = []
    of_pass: str | None = None
    answer: str | None = (
        "its loop ended before the last bucket"  # what the trainer hears of an end that is not the trainer's
    )
    try:
        while True:
            came_of, message = _heard(connection, timeout_s, "the trainer")
            if came_of == _LEFT.get(connection):
                continue
            of_pass = came_of
            if isinstance(message, _Failed):
                answer = None
                raise RuntimeError(
                    f"the trainer ended the pass early, the weights are not whole: {message.why}"
                )
            bucket = None
            if isinstance(message, _Slots):
                slots = [[[_Opened(memory) for memory in own] for own in ranks] for ranks in message.of]
            elif isinstance(message, _PlacedBucket):
                bucket = _joined(message, slots, device)
            else:
                slots, answer = [], None
            connection.send((of_pass, None))
            if answer is None:
                return
            if bucket is not None:
                yield bucket
            del bucket  # before the next is made
    except Exception as error:
        if answer is not None:
            answer = f"{type(error).__name__}: {error}"
        raise
    finally:
        if answer is not None:
            if of_pass is not None:
                _LEFT[connection] = of_pass
            with contextlib.suppress(OSError):
                connection.send((of_pass, answer))


class _Opened:
    """Memory of another process."""

    def __init__(self, memory: _SharedMemory) -> None:
        self._event: Any = None
        if isinstance(memory.handle, str):
            self._data = torch.from_file(memory.handle, shared=True, size=memory.nbytes, dtype=torch.uint8)
            return
        rebuild, arguments = memory.handle
        self._data = rebuild(*arguments)
        self._event = torch.cuda.Event.from_ipc_handle(self._data.device, memory.event)

    def copy_to(self, place: Tensor) -> None:
        """Copy as much as ``place`` takes, behind what writes the memory."""
        if self._event is not None:
            self._event.wait(torch.cuda.current_stream(self._data.device))
        place.copy_(self._data[: place.numel()], non_blocking=True)


def _joined(message: _PlacedBucket, slots: list[list[list[_Opened]]], device: torch.device) -> Bucket:
    """A bucket's pieces one behind the other, in new memory; they may be overwritten when this returns."""
    if message.memory is not None:
        pieces, nbytes = [_Opened(message.memory)] if message.memory.nbytes else [], message.memory.nbytes
    else:
        pieces, nbytes = [own[message.slot] for own in slots[message.group]], message.piece_bytes
    data = torch.empty(nbytes * len(pieces), dtype=torch.uint8, device=device)
    for piece, place in zip(pieces, data.split(nbytes) if pieces else ()):
        piece.copy_to(place)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return Bucket(message.label, data, message.records)
