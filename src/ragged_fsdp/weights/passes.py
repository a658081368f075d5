"""One pass over a stream: it gathers ahead of its consumer, and ends on all ranks where it ends on one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from ragged_fsdp.weights.buckets import Bucket

__all__ = ["Pass", "Passing"]


class Passing(Protocol):
    """What a pass needs of its stream."""

    @property
    def gathers(self) -> int: ...

    def look(self) -> None: ...

    def prepare(self, index: int, /) -> Callable[[], Callable[[], list[Any]]]: ...

    def agree(self, *, going_on: bool) -> bool: ...

    def ended(self, *, complete: bool) -> None: ...


class Pass:
    """One pass; ends on all ranks where it ends on one.

    The ranks tell each other once before each launch, and a rank that ends before the last launch tells once
    more: so every rank takes part in the same exchanges.
    """

    def __init__(self, of: Passing) -> None:
        self._of = of
        self._launched = 0
        self._ahead: Callable[[], list[Any]] | None = None
        """Finishes the gather under way."""
        self._ready: list[Any] = []
        self._over = False

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if not self._ready:
            if self._launched == 0 or self._ahead is None:
                self._launch()
            if self._ahead is None:
                self._end(complete=True)
                raise StopIteration
            finish, self._ahead = self._ahead, None
            self._ready = finish()
            for bucket in self._ready:
                if isinstance(bucket, Bucket):
                    bucket.on_use = _weakly(self._launch)
        return self._ready.pop(0)

    def _launch(self) -> None:
        """Start the next gather, unless it is under way or there is none, once all ranks want it."""
        of = self._of
        if self._over or self._ahead is not None or self._ready or self._launched == of.gathers:
            return
        index = self._launched
        try:
            if index == 0:
                of.look()
            start = of.prepare(index)
        except BaseException:
            self.close()
            raise
        self._launched += 1
        if not of.agree(going_on=True):
            self._end(complete=False)
            raise RuntimeError(
                f"the stream ended before bucket {index + 1} of {of.gathers}: "
                "its consumer has stopped or failed on another rank"
            )
        self._ahead = start()

    def close(self) -> None:
        """End the pass on this rank, and with it on the others, unless it is at its end."""
        if self._over:
            return
        if self._launched < self._of.gathers and dist.is_initialized():
            self._of.agree(going_on=False)
        self._end(complete=False)  # of the last bucket, too, nobody knows whether the consumer took it

    def _end(self, *, complete: bool) -> None:
        self._over = True
        if self._ahead is not None:
            self._ahead()  # memory that a collective still writes must not go back
            self._ahead = None
        self._of.ended(complete=complete)

    def __enter__(self) -> Pass:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """The method, while its object lives: a bucket that a loop left behind must not keep the pass open."""
    weak = weakref.WeakMethod(method)

    def call() -> None:
        alive = weak()
        if alive is not None:
            alive()

    return call
