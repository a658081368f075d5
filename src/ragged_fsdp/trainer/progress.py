"""What rank 0 shows: a progress bar on a terminal, plain lines elsewhere."""

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["LogView", "Silent", "open_view"]


class Silent:
    """The view of every rank but the first."""

    def say(self, text: str) -> None:
        """One line of text."""

    def step(self, step: int, row: dict[str, Any]) -> None:
        """A step is done."""

    def close(self) -> None:
        """The run is over."""


class LogView(Silent):
    """Plain log lines, one every ``log_every`` steps."""

    def __init__(self, steps: int, log_every: int) -> None:
        self._steps = steps
        self._log_every = log_every

    def say(self, text: str) -> None:
        print(_printable(text), flush=True)

    def step(self, step: int, row: dict[str, Any]) -> None:
        if step % self._log_every == 0 or step == self._steps:
            self.say(f"step {step:>5}/{self._steps}  {_line(row)}")


class BarView(LogView):
    """A bar that stays at the bottom; other lines scroll above it."""

    def __init__(self, steps: int, log_every: int, first_step: int) -> None:
        super().__init__(steps, log_every)
        columns = (
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=Console(highlight=False))
        self._progress.start()
        self._progress.console.show_cursor(True)  # a rank that is killed could not bring it back
        self._task = self._progress.add_task("", total=steps, completed=first_step, line="")

    def say(self, text: str) -> None:
        self._progress.console.print(_printable(text), markup=False)

    def step(self, step: int, row: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=step, line=_line(row))

    def close(self) -> None:
        self._progress.stop()


def open_view(rank: int, steps: int, log_every: int, first_step: int) -> Silent:
    """The view of this rank."""
    if rank != 0:
        return Silent()
    return BarView(steps, log_every, first_step) if sys.stdout.isatty() else LogView(steps, log_every)


def _printable(text: str) -> str:
    """``text`` in what the terminal or file takes: a sample may hold any character."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


def _line(row: dict[str, Any]) -> str:
    mib = row["memory"]["allocated"] / 2**20
    mfu = f"  mfu {row['mfu']:.1%}" if row.get("mfu") else ""
    return (
        f"loss {row['loss']:.4f}  |grad| {row['grad_norm']:.2f}  lr {row['lr']:.2e}  "
        f"{row['tokens_per_s']:,.0f} tok/s{mfu}  {mib:,.0f} MiB"
    )
