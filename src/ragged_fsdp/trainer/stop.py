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

__all__ = ["StopRequest"]

_GO_ON, _TIME_IS_UP, _INTERRUPTED = 0, 1, 2


class StopRequest:
    """Whether this run should end before its last step."""

    def __init__(self, minutes: float) -> None:
        self._deadline = time.monotonic() + 60 * minutes if minutes else None
        self._asked = threading.Event()

    def listen_to(self, *signals: int) -> None:
        """Stop at the first of these signals; a second one ends at once."""
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
        if self._asked.is_set():
            os._exit(128 + number)
        self._asked.set()

    def _follow(self, channel: Connection) -> None:
        try:
            while True:
                channel.recv()
                self._asked.set()
        except (EOFError, OSError):
            os._exit(1)  # without the launcher nobody would end the other ranks
