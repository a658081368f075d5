"""Streams and links: when work that was launched in some order runs.

A stream does what was launched on it in order, an event is a time, and a link of the network carries one
collective after the other. All that matters for when something runs was launched before it, so one pass in
the order of the launches gives every start and end: there is no queue of future events.

The host has a clock too. Nothing begins before it was launched, and the host is never more than
:data:`QUEUED` kernels ahead of the compute stream.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import NamedTuple

from ragged_fsdp.predict.network import Seconds

__all__ = ["LINKS", "NO_LAUNCHES", "QUEUED", "Launches", "Span", "Streams"]

LINKS = Seconds._fields
"""The links of a GPU: to the others of its node, and its card to everybody else."""


QUEUED = 1024
"""Kernels that wait on a stream before a launch blocks the host, as CUDA's driver has it."""


class Launches(NamedTuple):
    """A number of kernels, and the seconds that the host takes to launch them."""

    kernels: float
    seconds: float


NO_LAUNCHES = Launches(0.0, 0.0)


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
        self.host = 0.0
        """When the host has launched everything so far."""
        self.launching_s = 0.0
        """That it worked for that, without waiting."""
        self._queue: deque[tuple[float, float, float]] = deque()
        """The last kernels of the compute stream: start and end of a lot, and how many it has."""
        self.spans: list[Span] = []
        self._beside: list[tuple[float, float]] = []
        """When something beside the computation reads and writes the device's memory."""
        self._held: list[tuple[float, float]] = []
        """When a collective holds multiprocessors."""

    def launch(self, seconds: float) -> None:
        """Let the host work: what comes next is launched so much later."""
        self.host += seconds
        self.launching_s += seconds

    def run(self, lane: str, seconds: float, label: str) -> float:
        """Launch copies or sums on a stream; when they are done."""
        start = max(self._free[lane], self.host)
        self._free[lane] = end = start + seconds
        if seconds:
            self.spans.append(Span(lane, label, start, end))
            if lane != "compute":
                self._beside.append((start, end))
        return end

    def compute(
        self,
        seconds: float,
        label: str,
        contention: float = 0.0,
        held: float = 0.0,
        launches: Launches = NO_LAUNCHES,
    ) -> float:
        """Launch work on the compute stream; when it is done.

        Both share the memory's rate: ``contention`` is the part of the time of what runs beside it by which
        it is delayed. While a collective holds multiprocessors it takes ``1 + held`` times as long. What is
        launched later is not known here. The work cannot end before its last kernel is launched.
        """
        start = max(self._free["compute"], self.host)
        self._beside = [(begin, until) for begin, until in self._beside if until > start]
        self._held = [(begin, until) for begin, until in self._held if until > start]
        end = self._beside_collectives(start, seconds, held)
        if contention:
            for begin, until in sorted(self._beside):
                end += contention * max(0.0, min(until, end) - max(begin, start))
        self.run("compute", end - start, label)
        launched = self.launched(launches, self.host, start, end)
        self.launching_s += launches.seconds
        self.host, self._free["compute"] = launched, max(end, launched)
        if launches.kernels:
            self._queue.append((start, self._free["compute"], launches.kernels))
            while sum(count for *_, count in self._queue) - self._queue[0][2] >= QUEUED:
                self._queue.popleft()
        return self._free["compute"]

    def launched(self, launches: Launches, begin: float, start: float, end: float) -> float:
        """When the host has launched kernels that it comes to at ``begin`` and that run from ``start``.

        It waits before a kernel until the one :data:`QUEUED` before it has started.
        """
        count, seconds = launches
        done = begin + seconds
        if not count:
            return done
        done = max(done, self._started(QUEUED) + seconds)
        if count <= QUEUED:
            return max(done, self._started(QUEUED - count))
        left = (count - QUEUED) / count
        return max(done, start + left * seconds, start + left * (end - start))

    def _started(self, back: float) -> float:
        """When the kernel ``back`` before the next one on the compute stream began; 0 where there is none."""
        for start, end, count in reversed(self._queue):
            if back <= count:
                return end - back / count * (end - start)
            back -= count
        return 0.0

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

        ``memory_s`` are those for which it reads and writes the device's memory, from its start on its longer
        link: it cannot be faster. It holds multiprocessors for as long as the links carry it, and none for
        copies alone.
        """
        start = end = max(self._free[lane], self.host)
        longest = max(held)
        for link, seconds in zip(LINKS, held):
            copied, memory_s = (memory_s, 0.0) if seconds == longest else (0.0, memory_s)
            if not (lasts := max(seconds, copied)):
                continue
            begin = max(start, self._free[link])
            self._free[link] = until = begin + lasts
            self.spans.append(Span(link, label, begin, until))
            end = max(end, until)
            if copied:
                self._beside.append((begin, begin + copied))
            if seconds:
                self._held.append((until - seconds, until))
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
