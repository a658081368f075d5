"""Who holds which experts: consecutive ones on each rank, any number of them on any number of ranks.

Experts keep their order and their numbers, so that a checkpoint does not know how they were spread::

    5 experts on 3 ranks   even      0 1 | 2 3 | 4
                           by load   0 | 1 2 3 | 4      where 0 has as many rows as 1, 2 and 3 together
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

__all__ = ["ExpertSplit"]


@dataclass(frozen=True)
class ExpertSplit:
    """How many experts each rank holds, in rank order; 0 is allowed."""

    held: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.held or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in self.held):
            raise ValueError(
                f"ExpertSplit: held must be a number of experts for each rank, got {self.held!r}."
            )
        if not sum(self.held):
            raise ValueError(f"ExpertSplit: there must be an expert, got {self.held!r}.")

    @classmethod
    def even(cls, experts: int, ranks: int) -> ExpertSplit:
        """Experts spread as evenly as whole ones can be; the first ranks have one more."""
        if ranks < 1 or experts < 1:
            raise ValueError(f"ExpertSplit.even: expected experts and ranks, got {experts} and {ranks}.")
        each, more = divmod(experts, ranks)
        return cls(tuple(each + (rank < more) for rank in range(ranks)))

    @classmethod
    def by_load(cls, load: Sequence[float], ranks: int) -> ExpertSplit:
        """The split whose busiest rank has the least load; experts stay in their order.

        Found by bisection over the load that a rank may have, each time filling ranks one after the other; so
        every rank of a group finds the same from the same load.
        """
        if ranks < 1 or not load or any(not value >= 0 for value in load):
            raise ValueError(f"ExpertSplit.by_load: expected a load of each expert, got {list(load)!r}.")
        if not any(load):
            return cls.even(len(load), ranks)
        low, high = max(max(load), sum(load) / ranks), float(sum(load))
        for _ in range(60):
            middle = (low + high) / 2
            if len(_filled(load, middle)) <= ranks:
                high = middle
            else:
                low = middle
        held = _filled(load, high)
        return cls(tuple(_spread(held, ranks)))

    @property
    def ranks(self) -> int:
        """Ranks that experts are spread over."""
        return len(self.held)

    @property
    def experts(self) -> int:
        """Experts of all ranks."""
        return sum(self.held)

    @property
    def is_even(self) -> bool:
        """Whether every rank holds as many."""
        return len(set(self.held)) == 1

    @cached_property
    def first(self) -> tuple[int, ...]:
        """The first expert of each rank."""
        return (0, *accumulate(self.held))[:-1]

    def busiest(self, load: Sequence[float]) -> float:
        """The load of the busiest rank, as a multiple of the mean over ranks."""
        total = sum(load)
        sums = [sum(load[start : start + n]) for start, n in zip(self.first, self.held)]
        return max(sums) * self.ranks / total if total else 1.0


def _filled(load: Sequence[float], most: float) -> list[int]:
    """How many experts each rank gets if one after the other takes what it may."""
    held, filled = [0], 0.0
    for value in load:
        if held[-1] and filled + value > most * (1 + 1e-9):
            held.append(0)
            filled = 0.0
        held[-1] += 1
        filled += value
    return held


def _spread(held: list[int], ranks: int) -> list[int]:
    """Give ranks that got nothing an expert of those that have the most, neighbours in order."""
    held = list(held)
    while len(held) < ranks:
        most = max(range(len(held)), key=held.__getitem__)
        if held[most] < 2:
            held.append(0)
            continue
        half = held[most] // 2
        held[most : most + 1] = [held[most] - half, half]
    return held
