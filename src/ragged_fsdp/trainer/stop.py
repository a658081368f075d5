"""Being asked to stop: by a signal, by the launcher, or by the clock; and agreeing on it.

A request only sets a flag. The ranks compare flags between two steps, so all of them stop after the
same step and can still save together.
"""

import os
import signal
import threading
import time
from multiprocessing.connection import Connection
from types import FrameType

import torch
import torch.distributed as dist

__all__ = ["STOP_SIGNALS", "StopRequest", "end_with_parent", "insists"]

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to stop: Ctrl-C, who ends processes, and SLURM's warning before a time limit."""

_GO_ON, _TIME_IS_UP, _INTERRUPTED = 0, 1, 2
_PARENT = os.getppid()  # read at import: an agent that dies while torch loads is noticed too
_LOOK_S = 0.5
_ONE_REQUEST_S = 0.5  # a terminal and a launcher may both pass on one Ctrl-C


def insists(number: int, asked_s: float) -> bool:
    """Whether a signal means "at once" to a run that was asked to stop at ``asked_s``: a person's Ctrl-C.

    Schedulers repeat theirs: SLURM sends SIGTERM to the job and to its steps, and after a SIGUSR1. Those must
    not end a save; what must end at once gets SIGKILL.
    """
    return number == signal.SIGINT and time.monotonic() - asked_s > _ONE_REQUEST_S


class StopRequest:
    """Whether this run should end before its last step."""

    def __init__(self, minutes: float) -> None:
        self._deadline = time.monotonic() + 60 * minutes if minutes else None
        self._asked = threading.Event()
        self._asked_s = 0.0

    def listen_to(self, *signals: int) -> None:
        """Stop at the first of these signals; a Ctrl-C after it ends at once."""
        for number in signals:
            signal.signal(number, self._on_signal)

    def listen_to_launcher(self, channel: Connection) -> None:
        """Stop when the launcher says so; end at once if the launcher is gone."""
        threading.Thread(target=self._follow, args=(channel,), name="launcher", daemon=True).start()

    def agreed(self, control: dist.ProcessGroup) -> str | None:
        """``"interrupted"``, ``"time"`` or None, the same on every rank."""
        mine = _GO_ON
        if self._deadline is not None and time.monotonic() >= self._deadline:
            mine = _TIME_IS_UP
        if self._asked.is_set():
            mine = _INTERRUPTED
        strongest = torch.tensor(mine)
        dist.all_reduce(strongest, op=dist.ReduceOp.MAX, group=control)
        return {_GO_ON: None, _TIME_IS_UP: "time", _INTERRUPTED: "interrupted"}[int(strongest)]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._asked.is_set():
            self._asked_s = time.monotonic()
            self._asked.set()
        elif insists(number, self._asked_s):
            os._exit(128 + number)

    def _follow(self, channel: Connection) -> None:
        try:
            while True:
                channel.recv()
                self._asked.set()
        except (EOFError, OSError):
            os._exit(1)  # without the launcher nobody would end the other ranks


def end_with_parent() -> None:
    """End this process soon after the one that started it, in a thread.

    Without its agent a rank is ended and restarted by nobody: it would train on, or hold the run's folder,
    while the others meet without it.
    """

    def follow() -> None:
        while os.getppid() == _PARENT:
            time.sleep(_LOOK_S)
        os._exit(1)

    threading.Thread(target=follow, name="parent", daemon=True).start()
