"""The roll that replicas call in each step: who contributes, and whether all have one model and one past.

Each adds its column to a table of zeros, in the first all-reduce of an average::

    replica            0   1   2   3 ...
    contributes        1   0   1   0
    its past           p       p              stands for all steps so far and whose gradients were in them
    its model          m       m              and how it is trained
    options            o       o              of the optimizer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MOST_REPLICAS", "Roll", "Says", "SplitError", "as_number", "column"]

MOST_REPLICAS = 1024
_LETTERS = 10


class SplitError(RuntimeError):
    """This replica took steps that the others did not, because each side took the other for dead."""


class Says(NamedTuple):
    """What a replica says of itself; equal numbers stand for what is equal."""

    past: int
    model: int
    options: int


def as_number(digest: str) -> int:
    """A hash in hexadecimal digits as a number that is small enough for the sum over all replicas."""
    return int(digest[:_LETTERS], 16)


def column(replica: int, says: Says) -> Tensor:
    """The table with what one replica says."""
    table = torch.zeros(1 + len(says), MOST_REPLICAS, dtype=torch.int64)
    table[:, replica] = torch.tensor([1, *says])
    return table


@dataclass(frozen=True)
class Roll:
    """What came of the roll. Those that are not like the most of them end; the others go on without."""

    counts: tuple[int, ...]
    """How often each number was there."""
    said: dict[int, Says]
    """By each replica whose number was there once."""
    kept: Says | None
    """What most of them say, and of equal sides that with the lowest number; None if there are none."""

    @classmethod
    def of(cls, table: Tensor) -> Roll:
        """From the sum of the columns of all that contribute."""
        counts, *told = table.tolist()
        said = {index: Says(*(row[index] for row in told)) for index, n in enumerate(counts) if n == 1}
        says = list(said.values())
        kept = max(says, key=lambda one: (says.count(one), -says.index(one)), default=None)
        return cls(tuple(counts), said, kept)

    @property
    def contributors(self) -> tuple[int, ...]:
        """Whose gradients will be in the mean."""
        return tuple(index for index, count in enumerate(self.counts) if count)

    @property
    def agree(self) -> bool:
        """Whether all that contribute say the same, under one number each."""
        return len(set(self.said.values())) <= 1 and len(self.said) == len(self.contributors)

    @property
    def by(self) -> list[int]:
        """Who says what is kept."""
        return [index for index, says in self.said.items() if says == self.kept]
