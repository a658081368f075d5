"""A progress bar that appears only when the work takes more than a second."""

import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

__all__ = ["progress"]

_Item = TypeVar("_Item")
_PATIENCE_SECONDS = 1.0


def progress(items: Sequence[_Item], label: str, console: Console) -> Iterator[_Item]:
    """``items`` in turn; the bar starts once they have taken a second and goes when they end."""
    began = time.monotonic()
    bar: Progress | None = None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - began > _PATIENCE_SECONDS:
                bar = Progress(console=console, transient=True)
                task = bar.add_task(label, total=len(items), completed=done)
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()
