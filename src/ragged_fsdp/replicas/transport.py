"""Copying a rank's state over TCP, rank to rank: authenticated, checked, never pickled.

Both sides prove that they know the job's token before anything else is said; who cannot is disconnected::

    receiver                                   server
    16 random bytes                     ->
                                        <-     16 random bytes, HMAC of both: the server knows the token
    HMAC of both, the step it needs     ->     the receiver knows it too
                                        <-     header: JSON of names, shapes, dtypes, values, or why there
                                               is nothing; its HMAC
                                        <-     for each run: its bytes; an HMAC over all there was so far

The key of the later HMACs is made of the token and both random values. Of a run the HMAC covers the 64-bit
sums of its words, 512 bytes at a time: it finds damage at several times the speed of a cryptographic hash of
every byte. It does not find what somebody who sits on the line and knows this changes so that the sums stay;
nor are the bytes encrypted. Gradients are not protected from them either.

A copy has one time-out, from its first byte to its last: a peer that trickles holds nobody longer.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragged_fsdp.replicas.state import Offer, Piece

__all__ = ["TOKEN_VARIABLE", "HealingError", "Received", "StateServer", "job_token", "receive"]

TOKEN_VARIABLE = "RAGGED_FSDP_REPLICA_TOKEN"
_SHORTEST_TOKEN = 16
_CHUNK_BYTES = 4 << 20
_SUMMED_BYTES = 512
_LARGEST_HEADER = 1 << 28
_GREETING_S = 5.0
_PAUSE_S = 0.1
_MAC_BYTES = 32
_HOST = torch.device("cpu")


class HealingError(RuntimeError):
    """The state of a peer could not be taken over; nothing of this rank was changed."""


@dataclass(frozen=True)
class Received:
    """A peer's state, staged on the host."""

    header: dict[str, Any]
    runs: list[Tensor]
    nbytes: int
    seconds: float


def job_token(given: str | None = None) -> bytes:
    """The secret that members of a job share: ``given``, or that in the environment."""
    token = given if given is not None else os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < _SHORTEST_TOKEN:
        raise ValueError(
            f"{TOKEN_VARIABLE}: expected a secret of at least {_SHORTEST_TOKEN} characters, the same for all "
            f"replicas of the job, got {len(token)}; make one with `openssl rand -hex 16`."
        )
    return token.encode()


def _mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _sums(chunk: Tensor) -> bytes:
    """What an HMAC covers of a piece of a run: sums of its words, and the bytes behind the last whole one."""
    whole = chunk.numel() // _SUMMED_BYTES * _SUMMED_BYTES
    words = chunk[:whole]
    if words.storage_offset() % 8:
        words = words.clone()
    sums = words.view(torch.int64).view(-1, _SUMMED_BYTES // 8).sum(1)
    return sums.numpy().tobytes() + chunk[whole:].numpy().tobytes()


class Staging:
    """How bytes come from a device to the host: over a stream and through pinned memory of its own.

    Both are made before they are needed. While a peer copies, the stream of this rank's collectives stands
    still until that very peer takes part: pinned memory that is allocated then may wait for the device, and
    a stream taken from torch's pool then may be the one that NCCL was given, behind the standing collective.
    NCCL's are of the pool of ordinary priority.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device, priority=-1)
        self._pinned = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in "ab"]
        self._lock = threading.Lock()

    def chunks(self, run: Tensor, ready: Any) -> Iterator[Tensor]:
        """The bytes of a run, once ``ready`` has come; the next chunk is copied while one is sent.

        Peers that copy at the same time take turns, a run each.
        """
        with self._lock:
            if ready is not None:
                self._stream.wait_event(ready)  # the optimizer's writes may still be under way
            copied: tuple[Tensor, Any] | None = None
            for index, chunk in enumerate(run.split(_CHUNK_BYTES) if run.numel() else ()):
                host = self._pinned[index % 2][: chunk.numel()]
                with self._stream:
                    host.copy_(chunk, non_blocking=True)
                event = self._stream.record_event()
                if copied is not None:
                    copied[1].synchronize()
                    yield copied[0]
                copied = host, event
            if copied is not None:
                copied[1].synchronize()
                yield copied[0]


class _Line:
    """A connection on which everything must have been said by one moment."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self.allow(seconds)

    def allow(self, seconds: float) -> None:
        """Let what follows take this long, all of it together."""
        self._deadline = time.monotonic() + seconds

    def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        self._set_timeout()
        self._connection.sendall(data)

    def read(self, nbytes: int) -> bytes:
        """The next ``nbytes`` bytes."""
        data = bytearray(nbytes)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, target: memoryview) -> None:
        """Fill ``target`` with bytes from the peer."""
        while len(target):
            self._set_timeout()
            count = self._connection.recv_into(target)
            if not count:
                raise ConnectionError("the peer ended the connection")
            target = target[count:]

    def _set_timeout(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)


class StateServer:
    """Sends what this rank offers to those who know the token, on threads of its own.

    Args:
        token: of the job, see :func:`job_token`.
        host: the name under which peers reach this rank.
        timeout_s: how long a copy may take, and how long a peer waits for the state it asks for.
        device: where the state lies, apart from what is on the host.
    """

    def __init__(self, token: bytes, host: str, timeout_s: float, device: torch.device = _HOST) -> None:
        self._token, self._host, self._timeout_s = token, host, timeout_s
        self._staging = Staging(device) if device.type != "cpu" else None
        self._changed = threading.Condition()
        self._offer: tuple[int, Offer | str] | None = None
        """The step of the state on offer, and the state; a text says why there is none."""
        self._copies = 0
        """Under way: who reads the state."""
        self._closed = False
        self._listener = socket.create_server(("", 0), family=socket.AF_INET)
        self._port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="replica state", daemon=True).start()

    @property
    def address(self) -> str:
        """Where peers find it."""
        return f"{self._host}:{self._port}"

    def offer(self, step: int, state: Offer | str) -> None:
        """Let peers copy ``state``, that of ``step``, until :meth:`withdraw`; a text says why they cannot."""
        devices = {run.device.type for run in state.runs} - {"cpu"} if isinstance(state, Offer) else set()
        if devices and self._staging is None:
            raise ValueError(f"offer: the state is on {devices.pop()}; the server was made for the host.")
        with self._changed:
            self._offer = (step, state)
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Offer nothing any more, and return when nobody reads the state: from then on it may change.

        Copies under way are finished, or cut when their time is over.
        """
        with self._changed:
            self._offer = None
            while self._copies:
                self._changed.wait()

    def close(self) -> None:
        """Take no more connections."""
        with self._changed:
            self._offer, self._closed = None, True
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else the thread would wait there, and the port listen
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # too many files or threads, or closed
                time.sleep(_PAUSE_S)

    def _serve(self, connection: socket.socket) -> None:
        # whoever it was is gone, or was none of us; the receiver says why on its side
        with connection, suppress(OSError):
            line = _Line(connection, _GREETING_S)
            key, step = _greet_receiver(line, self._token)
            state = self._begin(step)
            line.allow(self._timeout_s)
            if isinstance(state, str):
                _send_header(line, hmac.new(key, digestmod="sha256"), {"refused": state})
                return
            try:
                self._send(line, key, state)
            finally:
                with self._changed:
                    self._copies -= 1
                    self._changed.notify_all()

    def _send(self, line: _Line, key: bytes, state: Offer) -> None:
        mac = hmac.new(key, digestmod="sha256")
        _send_header(line, mac, state.header)
        for run in state.runs:
            for chunk in self._host_chunks(run, state.ready):
                line.send(chunk.numpy().data)
                mac.update(_sums(chunk))
            line.send(mac.digest())

    def _host_chunks(self, run: Tensor, ready: Any) -> Iterator[Tensor]:
        if run.device.type == "cpu":
            yield from run.split(_CHUNK_BYTES) if run.numel() else ()
        else:
            assert self._staging is not None
            yield from self._staging.chunks(run, ready)

    def _begin(self, step: int) -> Offer | str:
        """The state of ``step``; this rank may hear of the new quorum later than the one that asks."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while self._offer is None or self._offer[0] < step:
                left = deadline - time.monotonic()
                if left <= 0 or self._closed:
                    return (
                        "it has left" if self._closed else f"it did not offer it within {self._timeout_s:g} s"
                    )
                self._changed.wait(left)
            offered, state = self._offer
            if offered != step:
                return f"it is at step {offered}"
            if isinstance(state, Offer):
                self._copies += 1  # in the same breath: `withdraw` must wait for it
            return state


def receive(
    address: str,
    token: bytes,
    step: int,
    timeout_s: float,
    check: Callable[[dict[str, Any]], list[list[Piece]]],
    *,
    pin_memory: bool = False,
) -> Received:
    """Copy the state of ``step`` from the server at ``address`` into memory of its own, within ``timeout_s``.

    ``check`` raises ValueError if the announced state does not fit; it then is not asked for.
    """
    began = time.monotonic()
    try:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            line = _Line(connection, began + timeout_s - time.monotonic())
            key = _greet_server(line, token, step)
            mac = hmac.new(key, digestmod="sha256")
            header = _receive_header(line, mac)
            staged = [
                _receive_run(line, mac, pieces[0].name, sum(p.nbytes for p in pieces), pin_memory)
                for pieces in check(header)
            ]
    except Exception as error:  # memory for it, too, may be missing: nobody may wait for this rank then
        raise HealingError(f"the state of step {step} did not come from {address}: {error}") from error
    nbytes = sum(run.numel() for run in staged)
    return Received(header, staged, nbytes, time.monotonic() - began)


# -- the protocol --------------------------------------------------------------------------------------


def _greet_receiver(line: _Line, token: bytes) -> tuple[bytes, int]:
    theirs = line.read(16)
    ours = secrets.token_bytes(16)
    line.send(ours + _mac(token, b"server", theirs, ours))
    answer = line.read(_MAC_BYTES + 8)
    asked = answer[_MAC_BYTES:]
    if not hmac.compare_digest(answer[:_MAC_BYTES], _mac(token, b"receiver", theirs, ours, asked)):
        raise ConnectionError("it does not know the token of the job")
    return _mac(token, b"key", theirs, ours), struct.unpack(">q", asked)[0]


def _greet_server(line: _Line, token: bytes, step: int) -> bytes:
    ours = secrets.token_bytes(16)
    line.send(ours)
    answer = line.read(16 + _MAC_BYTES)
    theirs, asked = answer[:16], struct.pack(">q", step)
    if not hmac.compare_digest(answer[16:], _mac(token, b"server", ours, theirs)):
        raise ConnectionError("the peer does not know the token of the job")
    line.send(_mac(token, b"receiver", ours, theirs, asked) + asked)
    return _mac(token, b"key", ours, theirs)


def _send_header(line: _Line, mac: hmac.HMAC, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    mac.update(text)
    line.send(struct.pack(">q", len(text)) + text + mac.digest())


def _receive_header(line: _Line, mac: hmac.HMAC) -> dict[str, Any]:
    (nbytes,) = struct.unpack(">q", line.read(8))
    if not 0 < nbytes <= _LARGEST_HEADER:
        raise ValueError(f"a header of {nbytes} bytes")
    text = line.read(nbytes)
    mac.update(text)
    _compare(line, mac, "the header")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError(f"the header must be an object, got {type(header).__name__}")
    if "refused" in header:
        raise ValueError(f"the peer says: {header['refused']}")
    return header


def _receive_run(line: _Line, mac: hmac.HMAC, name: str, nbytes: int, pin_memory: bool) -> Tensor:
    run = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin_memory)
    for chunk in run.split(_CHUNK_BYTES) if nbytes else ():
        line.read_into(chunk.numpy().data)
        mac.update(_sums(chunk))
    _compare(line, mac, f"the run that begins with {name}")
    return run


def _compare(line: _Line, mac: hmac.HMAC, what: str) -> None:
    if not hmac.compare_digest(line.read(_MAC_BYTES), mac.digest()):
        raise ValueError(f"{what} was changed on its way")
