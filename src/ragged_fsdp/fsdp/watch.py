"""Says which collective does not finish, before the backend's timeout ends the process.

Over gloo a collective that times out raises, and the error carries group, phase and rank. Over NCCL nothing
raises: the host has long gone on, and after the process group's timeout a watchdog kills the process with the
number of a collective in its message. So the launches of the last steps are remembered with their events; a
thread looks at them a few times per timeout and logs, on every rank, the first that is still running after
half of it. A rank that stopped launching is the one that does not report.
"""

from __future__ import annotations

import atexit
import logging
import math
import threading
import time
import weakref
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ragged_fsdp.fsdp.param_group import ParamGroup

__all__ = ["CollectiveWatch", "Launch"]

logger = logging.getLogger("ragged_fsdp")

_REMEMBERED = 512  # more than the host can launch ahead of the device
_LOOKS_PER_TIMEOUT = 8
_LONGEST_PAUSE_S = 30.0


class Launch(NamedTuple):
    """One collective on its way."""

    phase: str
    group_name: str
    pg: dist.ProcessGroup
    event: Any
    """Behind it on its stream; has ``query()``."""
    started_s: float
    timeout_s: float


class CollectiveWatch:
    """The launches below one root, by phase: those of a phase finish in order."""

    def __init__(self) -> None:
        self._launched: dict[str, deque[Launch]] = {}
        self._timeouts_s: dict[dist.ProcessGroup, float] = {}
        self._last_reported: Launch | None = None
        self._device: torch.device | None = None
        self._rank = 0

    def note(self, phase: str, group: ParamGroup, pg: dist.ProcessGroup, event: Any) -> None:
        """A collective of ``group`` was launched in front of ``event``; without streams (None) it is done."""
        if event is None:
            return
        if pg not in self._timeouts_s:
            self._timeouts_s[pg] = _timeout_s(pg, group.device)
            self._device, self._rank = group.device, dist.get_rank()
            _THREAD.add(self, self._timeouts_s[pg])
        timeout_s = self._timeouts_s[pg]
        launched = self._launched.get(phase)
        if launched is None:
            launched = self._launched[phase] = deque(maxlen=_REMEMBERED)
        launched.append(Launch(phase, group.label, pg, event, time.monotonic(), timeout_s))

    def late(self, now_s: float) -> Launch | None:
        """The oldest launch that runs for more than half of its timeout."""
        found = []
        for launched in list(self._launched.values()):
            old = [entry for entry in list(launched) if now_s - entry.started_s > entry.timeout_s / 2]
            if old and _runs(old[-1]):
                found.append(next(entry for entry in old if _runs(entry)))
        return min(found, key=lambda entry: entry.started_s, default=None)

    def _on_device(self) -> AbstractContextManager:
        """A thread starts on device 0, and asking an event there would take memory on it for every rank."""
        if self._device is None or self._device.type == "cpu":
            return nullcontext()
        return torch.get_device_module(self._device).device(self._device)

    def report(self, now_s: float) -> None:
        """Log a late launch, once."""
        with self._on_device():
            entry = self.late(now_s)
        if entry is None or entry is self._last_reported:
            return
        self._last_reported = entry
        logger.error(
            "rank %d: %s of group '%s' (rank %d of %d of process group '%s') was launched %.0f s ago and "
            "has not finished; the process group gives up after %.0f s. Look at ranks that report another "
            "collective or none.",
            self._rank,
            entry.phase,
            entry.group_name,
            entry.pg.rank(),
            entry.pg.size(),
            entry.pg.group_name,
            now_s - entry.started_s,
            entry.timeout_s,
        )


def _runs(entry: Launch) -> bool:
    """Whether it has not finished; what a CUDA graph captured did not run at all and cannot be asked."""
    try:
        return not entry.event.query()
    except RuntimeError:
        return False


def _timeout_s(pg: dist.ProcessGroup, device: torch.device) -> float:
    """Of the group's collectives; infinite if its backend does not tell, as one written in Python."""
    try:
        options = pg._get_backend(device).options
    except RuntimeError:
        return math.inf
    timeout = getattr(options, "_timeout", None)
    return math.inf if timeout is None else timeout.total_seconds()


class _WatchThread:
    """One daemon thread for all watches of the process, from the first launch on."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[CollectiveWatch] = weakref.WeakSet()
        self._lock = threading.Lock()  # a set must not grow while it is read
        self._pause_s = _LONGEST_PAUSE_S
        self._changed = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def add(self, watch: CollectiveWatch, timeout_s: float) -> None:
        """Look after ``watch``, often enough for ``timeout_s``."""
        with self._lock:
            self._watches.add(watch)
        self._pause_s = min(self._pause_s, timeout_s / _LOOKS_PER_TIMEOUT)
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ragged_fsdp watch", daemon=True)
            self._thread.start()
            atexit.register(self.stop)  # before the interpreter goes: the thread must not query events then

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._changed.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stopped:
            self._changed.wait(self._pause_s)
            self._changed.clear()
            if self._stopped:
                return
            self._look()

    def _look(self) -> None:
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.report(time.monotonic())


_THREAD = _WatchThread()
