"""Copying a rank's state over TCP, rank to rank: authenticated, checked, never pickled.

Both sides prove that they know the job's token before anything else is said; who cannot is disconnected::

    receiver                                   server
    16 random bytes                     ->
                                        <-     16 random bytes, HMAC of both: the server knows the token
    HMAC of both, the step it needs     ->     the receiver knows it too
                                        <-     header: JSON of names, shapes, dtypes, values; its HMAC
                                        <-     for each run: its bytes; an HMAC over all there was so far

The key of the later HMACs is made of the token and both random values. Of a run the HMAC covers the 64-bit
sums of its words, 512 bytes at a time: it finds what is damaged or misplaced at several times the speed of a
cryptographic hash of every byte. The bytes are not encrypted, as gradients are not.
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


class StateServer:
    """Sends what this rank offers to those who know the token, on threads of its own.

    Args:
        token: of the job, see :func:`job_token`.
        host: the name under which peers reach this rank.
        timeout_s: how long a peer may take to read, or the state it asks for to be offered.
        device: where the state lies, apart from what is on the host.
    """

    def __init__(self, token: bytes, host: str, timeout_s: float, device: torch.device = _HOST) -> None:
        self._token, self._host, self._timeout_s = token, host, timeout_s
        self._staging = Staging(device) if device.type != "cpu" else None
        self._changed = threading.Condition()
        self._offer: tuple[int, Offer] | None = None
        self._sending: set[socket.socket] = set()
        self._listener = socket.create_server(("", 0), family=socket.AF_INET)
        threading.Thread(target=self._accept, name="replica state", daemon=True).start()

    @property
    def address(self) -> str:
        """Where peers find it."""
        return f"{self._host}:{self._listener.getsockname()[1]}"

    def offer(self, step: int, state: Offer) -> None:
        """Let peers copy ``state``, that of ``step``, until :meth:`withdraw`."""
        devices = {run.device.type for run in state.runs} - {"cpu"}
        if devices and self._staging is None:
            raise ValueError(f"offer: the state is on {devices.pop()}; the server was made for the host.")
        with self._changed:
            self._offer = (step, state)
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Offer nothing any more, and return when nobody reads the state: from then on it may change.

        Copies under way are finished; one that takes longer than the time-out is cut.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            self._offer = None
            while self._sending and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            for connection in self._sending:
                connection.shutdown(socket.SHUT_RDWR)
            while self._sending:  # the thread may still read until its send has failed
                self._changed.wait()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(_GREETING_S)
                key, step = _greet_receiver(connection, self._token)
                connection.settimeout(self._timeout_s)
                if (state := self._begin(connection, step)) is not None:
                    self._send(connection, key, state)
            except (OSError, ConnectionError):
                pass  # whoever it was is gone, or was none of us; the receiver says why on its side
            finally:
                with self._changed:
                    self._sending.discard(connection)
                    self._changed.notify_all()

    def _send(self, connection: socket.socket, key: bytes, state: Offer) -> None:
        mac = hmac.new(key, digestmod="sha256")
        header = json.dumps(state.header).encode()
        mac.update(header)
        connection.sendall(struct.pack(">q", len(header)) + header + mac.digest())
        for run in state.runs:
            for chunk in self._host_chunks(run, state.ready):
                connection.sendall(chunk.numpy().data)
                mac.update(_sums(chunk))
            connection.sendall(mac.digest())

    def _host_chunks(self, run: Tensor, ready: Any) -> Iterator[Tensor]:
        if run.device.type == "cpu":
            yield from run.split(_CHUNK_BYTES) if run.numel() else ()
        else:
            assert self._staging is not None
            yield from self._staging.chunks(run, ready)

    def _begin(self, connection: socket.socket, step: int) -> Offer | None:
        """The state of ``step``; this rank may hear of the new quorum later than the one that asks."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while self._offer is None or self._offer[0] < step:
                if (left := deadline - time.monotonic()) <= 0:
                    return None
                self._changed.wait(left)
            if self._offer[0] != step:
                return None
            self._sending.add(connection)  # in the same breath: `withdraw` must wait for it
            return self._offer[1]


def receive(
    address: str,
    token: bytes,
    step: int,
    timeout_s: float,
    check: Callable[[dict[str, Any]], list[list[Piece]]],
    *,
    pin_memory: bool = False,
) -> Received:
    """Copy the state of ``step`` from the server at ``address`` into memory of its own.

    ``check`` raises ValueError if the announced state does not fit; it then is not asked for.
    """
    began = time.monotonic()
    try:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=timeout_s) as connection:
            key = _greet_server(connection, token, step)
            mac = hmac.new(key, digestmod="sha256")
            header = _receive_header(connection, mac)
            staged = [
                _receive_run(connection, mac, pieces[0].name, sum(p.nbytes for p in pieces), pin_memory)
                for pieces in check(header)
            ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HealingError(f"the state of step {step} did not come from {address}: {error}") from error
    nbytes = sum(run.numel() for run in staged)
    return Received(header, staged, nbytes, time.monotonic() - began)


# -- the protocol --------------------------------------------------------------------------------------


def _greet_receiver(connection: socket.socket, token: bytes) -> tuple[bytes, int]:
    theirs = _read(connection, 16)
    ours = secrets.token_bytes(16)
    connection.sendall(ours + _mac(token, b"server", theirs, ours))
    answer = _read(connection, _MAC_BYTES + 8)
    asked = answer[_MAC_BYTES:]
    if not hmac.compare_digest(answer[:_MAC_BYTES], _mac(token, b"receiver", theirs, ours, asked)):
        raise ConnectionError("it does not know the token of the job")
    return _mac(token, b"key", theirs, ours), struct.unpack(">q", asked)[0]


def _greet_server(connection: socket.socket, token: bytes, step: int) -> bytes:
    ours = secrets.token_bytes(16)
    connection.sendall(ours)
    answer = _read(connection, 16 + _MAC_BYTES)
    theirs, asked = answer[:16], struct.pack(">q", step)
    if not hmac.compare_digest(answer[16:], _mac(token, b"server", ours, theirs)):
        raise ConnectionError("the peer does not know the token of the job")
    connection.sendall(_mac(token, b"receiver", ours, theirs, asked) + asked)
    return _mac(token, b"key", ours, theirs)


def _receive_header(connection: socket.socket, mac: hmac.HMAC) -> dict[str, Any]:
    (nbytes,) = struct.unpack(">q", _read(connection, 8))
    if not 0 < nbytes <= _LARGEST_HEADER:
        raise ValueError(f"a header of {nbytes} bytes")
    text = _read(connection, nbytes)
    mac.update(text)
    _compare(connection, mac, "the header")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError(f"the header must be an object, got {type(header).__name__}")
    return header


def _receive_run(
    connection: socket.socket, mac: hmac.HMAC, name: str, nbytes: int, pin_memory: bool
) -> Tensor:
    run = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pin_memory)
    for chunk in run.split(_CHUNK_BYTES) if nbytes else ():
        _read_into(connection, chunk.numpy().data)
        mac.update(_sums(chunk))
    _compare(connection, mac, f"the run that begins with {name}")
    return run


def _compare(connection: socket.socket, mac: hmac.HMAC, what: str) -> None:
    if not hmac.compare_digest(_read(connection, _MAC_BYTES), mac.digest()):
        raise ValueError(f"{what} was changed on its way")


def _read(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    _read_into(connection, memoryview(data))
    return bytes(data)


def _read_into(connection: socket.socket, target: memoryview) -> None:
    while len(target):
        count = connection.recv_into(target)
        if not count:
            raise ConnectionError("the peer ended the connection")
        target = target[count:]
