"""Says which collective does not finish, before the backend's timeout ends the process.

Over gloo a collective that times out raises, and the error carries group, phase and rank. Over NCCL nothing
raises: the host has long gone on, and after the process group's timeout a watchdog kills the process with the
number of a collective in its message. So the launches of the last steps are remembered with their events; a
thread looks at them a few times per timeout and logs, on every rank, the first that is still running after
half of it, when the host launches no more. A rank that stopped launching is the one that does not report.

With a folder that all ranks see (:func:`keep_records`), each rank then writes there what it has launched,
those that wait for nothing too, and the ranks that wait compare: collectives of a process group are launched
in one order, so who has launched fewer did not arrive, and who has launched another one in its place has lost
the order. Both are named before the timeout, on any backend.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import threading
import time
import weakref
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ragged_fsdp.torch_internals import timeout_of

__all__ = ["CollectiveWatch", "Launch", "keep_records"]

logger = logging.getLogger("ragged_fsdp")

_REMEMBERED = 1024  # more than the host can launch ahead of the device
_LOOKS_PER_TIMEOUT = 8
_LONGEST_PAUSE_S = 30.0
_NAME_BY = 0.8  # of the timeout: then the ranks that did not arrive are named, whoever has written by then


class _Launches:
    """What this process has launched, below all roots: they share process groups."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Launches by the name of the process group."""
        self.watches: list[weakref.ref[CollectiveWatch]] = []
        """Replaced, never changed: another thread may be reading it."""
        self.folder: Path | None = None
        self.written: set[Path] = set()
        self.named: set[Path] = set()


_launches = _Launches()


def keep_records(folder: Path | None) -> None:
    """Let ranks write what they launched into ``folder``, another one for each start, once one is late.

    It is made when it is needed. None: they write nothing, as at first.
    """
    _launches.folder = folder


@dataclass(eq=False, slots=True)
class Launch:
    """One collective, remembered from before its launch until many more have been launched."""

    phase: str = ""
    group_name: str = ""
    pg: Any = None
    number: int = 0
    """Counts the launches of the process group; 0 before the first."""
    event: Any = None
    """An event behind the collective on its stream; has ``query()``."""
    started_s: float = math.nan
    """When the host had launched it; while it is in the launch, since when it was seen there, or nan."""


class CollectiveWatch:
    """The last launches below one root."""

    def __init__(self, device: torch.device, remembered: int = _REMEMBERED) -> None:
        self._device, self._remembered = device, remembered
        self._timeouts_s: dict[dist.ProcessGroup, float] = {}
        self._names: dict[dist.ProcessGroup, str] = {}
        self._last_reported: tuple[Launch, float] | None = None
        self._rank = 0
        self._pause_s = math.inf
        self.inside: Launch | None = None
        """A collective that the host is in: over gloo it returns when all ranks have come."""
        self._last = [Launch() for _ in range(remembered)]
        self._begun = 0
        _launches.watches = [*(ref for ref in _launches.watches if ref() is not None), weakref.ref(self)]

    def begin(self, phase: str, group: Any, pg: dist.ProcessGroup) -> Launch:
        """Note a collective of ``group``, which has a label, that is about to be launched: for ``record``.

        Each layer comes here three times: what takes a call is left to the thread that looks.
        """
        if pg not in self._timeouts_s:
            self._know(pg)
        name = self._names[pg]
        launch = self._last[self._begun % self._remembered]
        self._begun += 1
        launch.started_s = math.nan  # first: else the thread would take it for as old as the last one here
        # not the group: it would be held in a cycle, and a dropped model would stay until the collector runs
        launch.phase, launch.group_name, launch.pg = phase, group.label, pg
        # last: what has a number is written to a rank's record, by the thread, at any moment
        launch.number = _launches.counts[name] = _launches.counts[name] + 1
        self.inside = launch
        return launch

    def record(self, launch: Launch, stream: Any) -> Any:
        """An event behind a collective that was launched on ``stream`` just now."""
        self.inside = None
        if launch.event is None:
            launch.event = torch.Event(self._device)
        launch.started_s = time.monotonic()  # before the event, see ``late``
        launch.event.record(stream)
        return launch.event

    def _know(self, pg: dist.ProcessGroup) -> None:
        """Look after a process group, from its first collective on."""
        timeout = timeout_of(pg, self._device)  # None: its backend, like one in Python, does not say
        self._timeouts_s[pg] = math.inf if timeout is None else timeout.total_seconds()
        self._names[pg] = pg.group_name
        self._rank = dist.get_rank()
        pause_s = min(self._timeouts_s[pg] / _LOOKS_PER_TIMEOUT, _LONGEST_PAUSE_S)
        if pause_s < self._pause_s:  # a thread with shorter pauses takes the place of the last
            self._pause_s = pause_s
            looking = threading.Thread(target=_look, args=(weakref.ref(self), pause_s), daemon=True)
            looking.name = "ragged_fsdp watch"
            looking.start()

    def late(self, now_s: float) -> Launch | None:
        """The oldest launch that runs for more than half of its timeout, once the host launches no more.

        A host behind a collective that does not finish waits soon. While it still launches no event is
        asked: a thread that asks one ends the capture of a CUDA graph on another.
        """
        inside = self.inside
        if inside is not None:
            if math.isnan(inside.started_s):
                inside.started_s = now_s
            if self._is_old(inside, now_s):
                return inside
        launched = [each for each in self._in_order() if each.event is not None and each is not inside]
        if launched and not self._is_old(launched[-1], now_s):
            return None
        for launch in launched:
            # asked twice: an event that runs may have been taken for a new launch since
            if self._is_old(launch, now_s) and _runs(launch) and self._is_old(launch, now_s):
                return launch
        return None

    def _is_old(self, launch: Launch, now_s: float) -> bool:
        return now_s - launch.started_s > self._timeouts_s[launch.pg] / 2

    def _on_device(self) -> AbstractContextManager:
        """A thread starts on device 0, and asking an event there would take memory on it for every rank."""
        if self._device.type == "cpu":
            return nullcontext()
        return torch.get_device_module(self._device).device(self._device)

    def report(self, now_s: float) -> None:
        """Log a late launch, once."""
        with self._on_device():
            launch = self.late(now_s)
        if launch is not None and self._last_reported != (launch, launch.started_s):
            self._last_reported = launch, launch.started_s
            self._log(launch, now_s)
        try:  # after the log: a folder of a file system that is gone raises, or never answers
            self._write_record(launch, now_s)
        except OSError as error:
            logger.error("the launches of the ranks in %s: %s", _launches.folder, error)

    def _log(self, launch: Launch, now_s: float) -> None:
        logger.error(
            "rank %d: %s of group '%s' (rank %d of %d of process group '%s') was launched %.0f s ago and "
            "has not finished; the process group gives up after %.0f s. Look at ranks that report another "
            "collective or none.",
            self._rank,
            launch.phase,
            launch.group_name,
            launch.pg.rank(),
            launch.pg.size(),
            launch.pg.group_name,
            now_s - launch.started_s,
            self._timeouts_s[launch.pg],
        )

    def _write_record(self, late: Launch | None, now_s: float) -> None:
        """Write what this rank launched if it is late, or if another one is; then name who did not arrive."""
        folder = _launches.folder
        if folder is None or (late is None and not folder.is_dir()):
            return
        own = folder / f"rank-{self._rank:05d}.json"
        if own not in _launches.written:
            _launches.written.add(own)
            _write(own, self._record(late))
        elif late is not None and own not in _launches.named:
            others = self._others(folder, late.pg)
            waited_s = now_s - late.started_s
            if None in others.values() and waited_s < _NAME_BY * self._timeouts_s[late.pg]:
                return
            _launches.named.add(own)
            record = self._record(late)
            mine = _by_number(record, late.pg.group_name)
            missing, strayed = [], []
            for rank, said in others.items():
                if said is None:
                    missing.append(f"rank {rank} (no word from it)")
                    continue
                count, theirs = said
                if count < late.number:
                    last = f"last: {list(theirs.values())[-1]}" if theirs else "it launched nothing"
                    missing.append(f"rank {rank} ({last})")
                apart = [number for number, what in mine.items() if theirs.get(number, what) != what]
                if apart:
                    strayed.append(f"rank {rank} ({theirs[apart[0]]}, here {mine[apart[0]]})")
            _write(own, {**record, "did_not_arrive": missing, "launched_another": strayed})
            found = [f"did not arrive: {', '.join(missing)}"] if missing else []
            found += [f"launched another collective in its place: {', '.join(strayed)}"] if strayed else []
            logger.error(
                "rank %d: %s of group '%s': %s. The launches of all ranks are in %s.",
                self._rank,
                late.phase,
                late.group_name,
                "; ".join(found) or "all have arrived, so the collective itself stands still",
                folder,
            )

    def _record(self, late: Launch | None) -> dict[str, Any]:
        last = [
            {**_named(launch), "number": launch.number}
            for ref in _launches.watches
            if (watch := ref()) is not None
            for launch in watch._in_order()
        ]
        return {
            "rank": self._rank,
            "waits_in": None if late is None else _named(late),
            "launches": dict(_launches.counts),
            "last_launches": last,
        }

    def _in_order(self) -> list[Launch]:
        """The last launches, the oldest first."""
        turn = self._begun % self._remembered
        return [launch for launch in self._last[turn:] + self._last[:turn] if launch.number]

    def _others(self, folder: Path, pg: dist.ProcessGroup) -> dict[int, tuple[int, dict[int, str]] | None]:
        """How many collectives of ``pg`` each other rank has launched, and the last; None: no word of it."""
        found: dict[int, tuple[int, dict[int, str]] | None] = {}
        for rank in dist.get_process_group_ranks(pg):
            if rank == self._rank:
                continue
            try:
                said = json.loads((folder / f"rank-{rank:05d}.json").read_text())
                found[rank] = said["launches"].get(pg.group_name, 0), _by_number(said, pg.group_name)
            except (OSError, ValueError, KeyError):
                found[rank] = None
        return found


def _by_number(record: dict[str, Any], group_name: str) -> dict[int, str]:
    """The last launches of a process group in a rank's record, in their order."""
    own = [begun for begun in record["last_launches"] if begun["process_group"] == group_name]
    own.sort(key=lambda begun: begun["number"])  # those of several roots
    return {begun["number"]: f"{begun['phase']} of '{begun['group']}'" for begun in own}


def _named(launch: Launch) -> dict[str, Any]:
    return {"phase": launch.phase, "group": launch.group_name, "process_group": launch.pg.group_name}


def _write(path: Path, record: dict[str, Any]) -> None:
    """Under another name first: other ranks read it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(record, indent=1))
        os.replace(temporary, path)
    except OSError as error:
        logger.error("what this rank launched could not be written to %s: %s", path, error)


def _runs(launch: Launch) -> bool:
    """Whether it has not finished; what a CUDA graph captured did not run at all and cannot be asked."""
    try:
        return not launch.event.query()
    except RuntimeError:
        return False


_GLOO_LETS_GO_S = 0.05
_ENDING = threading.Event()
_LOOKING = threading.Lock()


def _look(watch: weakref.ref[CollectiveWatch], pause_s: float) -> None:
    """Report after each pause until the watch goes, one with shorter pauses comes, or the process ends."""
    while not _ENDING.wait(pause_s):
        looked_after = watch()
        if looked_after is None or looked_after._pause_s < pause_s:
            return
        with _LOOKING:
            if not _ENDING.is_set():
                looked_after.report(time.monotonic())
        del looked_after  # else this thread would keep it


@atexit.register
def _end() -> None:
    """Before the interpreter goes: no thread may ask an event then.

    A thread of gloo tells first that a collective is done and drops its tensors then, for which it asks for
    the interpreter. Without the pause it may ask one that is going, which ends the process with SIGABRT after
    all its work (torch 2.13, without this package too).
    """
    _ENDING.set()
    _LOOKING.acquire(timeout=1.0)
    if _launches.counts:
        time.sleep(_GLOO_LETS_GO_S)
