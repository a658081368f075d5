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

    def __init__(self, contention: float = 0.0) -> None:
        self._free: dict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self._contention = contention
        self._debt = 0.0

    def run(self, lane: str, seconds: float, label: str) -> float:
        """Launch work on a stream; when it is done."""
        start = self._free[lane]
        self._free[lane] = end = start + seconds
        if seconds:
            self.spans.append(Span(lane, label, start, end))
        return end

    def beside(self, seconds: float) -> None:
        """Something on another stream uses the device's memory for so long: the next computation is slower.

        Both share the memory's rate; ``contention`` is the part of that time by which computation is delayed.
        """
        self._debt += self._contention * seconds

    def compute(self, seconds: float, label: str) -> float:
        """Launch computation on the compute stream; when it is done."""
        delay, self._debt = min(self._debt, seconds), 0.0
        return self.run("compute", seconds + delay, label)

    def collective(self, lane: str, held: Seconds, label: str) -> float:
        """Launch a collective from a stream, which waits until every link has carried it; when it is done."""
        start = end = self._free[lane]
        for link, seconds in zip(LINKS, held):
            if seconds:
                begin = max(start, self._free[link])
                self._free[link] = begin + seconds
                self.spans.append(Span(link, label, begin, begin + seconds))
                end = max(end, begin + seconds)
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
