"""What random trials have in common: draws from a seed, which an error tells."""

from __future__ import annotations

import random
from typing import Any

from rank_pool import Rank

__all__ = ["Trial"]


class Trial:
    """All that a seed decides; the same on every rank. Subclasses have ``_run``."""

    def __init__(self, rank: Rank, seed: int) -> None:
        self.rank, self.seed = rank, seed
        self.draw = random.Random(seed)
        self.notes: list[str] = []

    def __str__(self) -> str:
        return f"seed {self.seed} on {self.rank.world_size} ranks: {', '.join(self.notes)}"

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def choose(self, what: str, *values: Any) -> Any:
        value = self.draw.choice(values)
        self.notes.append(f"{what}={getattr(value, '__name__', value)}")
        return value

    def run(self) -> None:
        """Raise, with all that was drawn in a note, on any number that is not as it should be."""
        try:
            self._run()
        except BaseException as error:
            error.add_note(str(self))
            raise
