"""Running one function on several local processes, and ending all of them when one ends badly.

Used when neither torchrun nor SLURM started us. Processes come from a fork server that has torch
loaded already, so a start costs a fork. Each process has a pipe to the launcher: results and
tracebacks come up, a request to stop goes down, and its end tells a process that the launcher is gone.
"""

import multiprocessing as mp
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.ranks import LAUNCHER_STORE
from ragged_fsdp.trainer.stop import STOP_SIGNALS, insists

__all__ = ["RankFailure", "launch"]

_REPORT_S = 2.0  # how long the others may take to report after a first failure, before they are ended
_FOLLOW_UP = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Connection refused",
    "Socket Timeout",
)


class RankFailure(RuntimeError):
    """A rank ended badly; the message leads with the traceback of the one that was first."""


@dataclass
class _Rank:
    index: int
    process: BaseProcess
    pipe: Connection
    result: Any = None
    is_done: bool = False
    trace: str | None = None
    refusal: str | None = None
    failed_at: float | None = None
    ended: bool = False


def launch(target: str, argument: Any, processes: int) -> Any:
    """Call ``module:function`` with (argument, pipe) on each of ``processes`` ranks; returns rank 0's result.

    Raises :class:`RankFailure` within seconds of a rank's death, after ending the others, or the
    :class:`ConfigError` with which a rank refused to start. Ctrl-C, SIGTERM and SIGUSR1 ask all ranks
    to stop; a Ctrl-C after that kills them.
    """
    import torch.distributed as dist

    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["ragged_fsdp.trainer.worker"])
    # Held here, on a port that it chooses: one that is looked up for the ranks may be taken when they use it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        LAUNCHER_STORE: "1",
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes))),
    }
    ranks: list[_Rank] = []
    oom_kills_before = _oom_kills()
    try:
        with _stop_on_signals(ranks) as stop:
            _start_fork_server()
            for index in range(processes):
                ours, theirs = context.Pipe()
                own = {**environment, "RANK": str(index), "LOCAL_RANK": str(index)}
                process = context.Process(target=_serve, args=(target, argument, own, theirs))
                try:
                    process.start()
                except (EOFError, ConnectionError) as error:
                    why = _memory_killer(oom_kills_before)
                    raise RankFailure(
                        f"the process that starts the ranks died before rank {index}; {why}"
                    ) from error
                theirs.close()
                ranks.append(_Rank(index, process, ours))
                if stop.is_set():  # asked before this rank was there to hear it
                    _ask_to_stop(ranks[-1:])
            return _watch(ranks, oom_kills_before)
    finally:
        for rank in ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            rank.pipe.close()


def _start_fork_server() -> None:
    """Start the fork server with these signals blocked, which it inherits: a terminal's Ctrl-C, the SIGTERM
    of ``timeout`` and SLURM's warning reach the whole process group. It must not end: it tells us how ranks
    end, so that without it all of them would seem dead, and be killed before they saved."""
    resource_tracker.ensure_running()  # first: it unblocks signals when it starts
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _ask_to_stop(ranks: list[_Rank]) -> None:
    for rank in ranks:
        if not rank.ended:
            with suppress(OSError):  # it ends this very moment
                rank.pipe.send("stop")


def _serve(target: str, argument: Any, environment: dict[str, str], pipe: Connection) -> None:
    """The life of a rank: run the function, send up what came of it."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a terminal signals all processes; the launcher decides
    os.environ.update(environment)
    module, _, name = target.partition(":")
    try:
        result = getattr(import_module(module), name)(argument, pipe)
    except BaseException as error:
        refused = isinstance(error, ConfigError)
        pipe.send(("refused", str(error)) if refused else ("failed", traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # interpreter shutdown could wait for a collective whose peers are gone
    pipe.send(("result", result))


def _watch(ranks: list[_Rank], oom_kills_before: int | None) -> Any:
    """Until all ranks are done, or one has failed and the others had time to say why."""
    first_failure: float | None = None
    while not all(rank.ended for rank in ranks):
        left = None if first_failure is None else first_failure + _REPORT_S - time.monotonic()
        if left is not None and left <= 0:
            break
        live = [rank for rank in ranks if not rank.ended]
        wait([h for rank in live for h in (rank.pipe, rank.process.sentinel)], timeout=left)
        for rank in live:
            _collect(rank)
            if rank.failed_at is not None and first_failure is None:
                first_failure = rank.failed_at
    failed = [rank for rank in ranks if rank.failed_at is not None]
    refusals = [rank.refusal for rank in failed if rank.refusal]
    if refusals:
        raise ConfigError(refusals[0])
    if failed:
        raise RankFailure(_story(failed, len(ranks), oom_kills_before))
    return ranks[0].result


def _collect(rank: _Rank) -> None:
    """Take what the rank has sent, and notice its end."""
    try:
        while rank.pipe.poll():
            kind, value = rank.pipe.recv()
            if kind == "refused":
                rank.refusal, rank.failed_at = value, time.monotonic()
            elif kind == "failed":
                rank.trace, rank.failed_at = value, time.monotonic()
            else:
                rank.result, rank.is_done = value, True
    except (EOFError, OSError):
        rank.process.join(5)  # its end of the pipe is closed: it is ending
    if rank.process.exitcode is not None:
        rank.ended = True
        done = rank.is_done and rank.process.exitcode == 0  # something may end a process with status 0
        if not done and rank.failed_at is None:
            rank.failed_at = time.monotonic()


def _memory_killer(kills_before: int | None) -> str:
    """Whether the system killed for memory: what its counter says, or where to look."""
    kills = _oom_kills()
    if kills is not None and kills_before is not None and kills > kills_before:
        return "the system's out-of-memory killer was at work since the start (dmesg names its victims)"
    return "if nobody did it, the system's out-of-memory killer may have: see dmesg"


def _oom_kills() -> int | None:
    """How often the system's out-of-memory killer has struck since boot; None where it does not count."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


def _story(failed: list[_Rank], processes: int, oom_kills_before: int | None) -> str:
    """What happened, the cause first: a silent death, then an error that is not about a peer."""

    def order(rank: _Rank) -> tuple[bool, bool, float]:
        follow_up = rank.trace is not None and any(text in rank.trace for text in _FOLLOW_UP)
        return rank.trace is not None, follow_up, rank.failed_at or 0.0

    cause = min(failed, key=order)
    if cause.trace is not None:
        what = cause.trace.rstrip()
        headline = f"rank {cause.index} failed:"
    else:
        code = cause.process.exitcode
        what = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"exit status {code}"
        if code == -signal.SIGKILL:
            what += f"; {_memory_killer(oom_kills_before)}"
        headline = f"rank {cause.index} died without a traceback:"
    others = {1: "", 2: "\nthe other process was ended"}
    return f"{headline}\n{what}" + others.get(processes, f"\nthe other {processes - 1} processes were ended")


@contextmanager
def _stop_on_signals(ranks: list[_Rank]) -> Iterator[threading.Event]:
    """A first signal asks every rank to stop, a Ctrl-C after it kills them; yields whether one has come."""
    asked = threading.Event()
    asked_s = 0.0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked_s
        if asked.is_set():
            if not insists(number, asked_s):
                return
            for rank in ranks:
                rank.process.kill()
            raise KeyboardInterrupt
        asked_s = time.monotonic()
        asked.set()
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr, flush=True)
        _ask_to_stop(ranks)

    previous: dict[int, Any] = {}
    try:
        for chosen in STOP_SIGNALS:
            previous[chosen] = signal.signal(chosen, on_signal)
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
