"""Streams and links: when work that was launched in some order runs.

A stream does what was launched on it in order, an event is a time, and a link of the network carries one
collective after the other. All that matters for when something runs was launched before it, so one pass in
the order of the launches gives every start and end: there is no queue of future events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from ragged_fsdp.predict.network import Seconds

__all__ = ["LINKS", "Span", "Streams"]

LINKS = Seconds._fields
"""The links of a GPU: to the others of its node, and its card to everybody else."""


class Span(NamedTuple):
    """Something that ran: on a stream or on a link."""

    lane: str
    label: str
    start: float
    end: float


class Streams:
    """The lanes of one GPU, in seconds from the start."""

    def __init__(self) -> None:
        self._free: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self._beside: list[tuple[float, float]] = []
        """When something beside the computation reads and writes the device's memory."""
        self._held: list[tuple[float, float]] = []
        """When a collective holds multiprocessors: from its start to its end, but for copies at its start."""

    def run(self, lane: str, seconds: float, label: str) -> float:
        """Launch copies or sums on a stream; when they are done."""
        start = self._free[lane]
        self._free[lane] = end = start + seconds
        if seconds:
            self.spans.append(Span(lane, label, start, end))
            if lane != "compute":
                self._beside.append((start, end))
        return end

    def compute(self, seconds: float, label: str, contention: float = 0.0, held: float = 0.0) -> float:
        """Launch work on the compute stream; when it is done.

        Both share the memory's rate: ``contention`` is the part of the time of what runs beside it by which
        it is delayed. While a collective holds multiprocessors it takes ``1 + held`` times as long. What is
        launched later is not known here.
        """
        start = self._free["compute"]
        self._beside = [(begin, until) for begin, until in self._beside if until > start]
        self._held = [(begin, until) for begin, until in self._held if until > start]
        end = self._beside_collectives(start, seconds, held)
        if contention:
            for begin, until in sorted(self._beside):
                end += contention * max(0.0, min(until, end) - max(begin, start))
        return self.run("compute", end - start, label)

    def _beside_collectives(self, start: float, seconds: float, held: float) -> float:
        """When work is done that advances by ``1 / (1 + held)`` while a collective holds multiprocessors."""
        now, left = start, seconds
        for begin, until in sorted(self._held) if held else ():
            free = max(0.0, begin - now)
            if left <= free or until <= now:
                continue
            now, left = now + free, left - free
            done = min(left, (until - now) / (1 + held))
            now, left = now + done * (1 + held), left - done
        return now + left

    def collective(self, lane: str, held: Seconds, label: str, memory_s: float = 0.0) -> float:
        """Launch a collective from a stream, which waits until every link has carried it; when it is done.

        ``memory_s`` of the time of its longer link it reads and writes the device's memory; then, and on its
        other link from the start, it holds multiprocessors.
        """
        start = end = self._free[lane]
        longest = max(held)
        for link, seconds in zip(LINKS, held):
            if seconds:
                begin = max(start, self._free[link])
                self._free[link] = begin + seconds
                self.spans.append(Span(link, label, begin, begin + seconds))
                end = max(end, begin + seconds)
                copied = memory_s if seconds == longest else 0.0
                if copied:
                    self._beside.append((begin, begin + copied))
                    memory_s = 0.0
                if seconds > copied:
                    self._held.append((begin + copied, begin + seconds))
        self._free[lane] = end
        return end

    def now(self, lane: str) -> float:
        """When what was launched on a stream so far is done."""
        return self._free[lane]

    def wait(self, lane: str, event: float) -> None:
        """Let what is launched on a stream from now on wait for ``event``."""
        self._free[lane] = max(self._free[lane], event)

    def join(self) -> float:
        """Let every lane wait for all others; the time."""
        end = max(self._free.values(), default=0.0)
        for lane in list(self._free):
            self._free[lane] = end
        return end

    def busy(self, lanes: Iterable[str]) -> dict[str, float]:
        """Seconds that each lane worked."""
        total = dict.fromkeys(lanes, 0.0)
        for span in self.spans:
            if span.lane in total:
                total[span.lane] += span.end - span.start
        return total
