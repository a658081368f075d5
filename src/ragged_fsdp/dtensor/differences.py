"""Where ranks that should say the same differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

__all__ = ["first_difference"]


def first_difference(texts: Sequence[Sequence[str]], ranks: Sequence[int]) -> str:
    """The first line that a rank has and the first one has not, and what that has instead."""
    for rank, lines in zip(ranks, texts):
        for ours, theirs in zip_longest(texts[0], lines, fillvalue="nothing"):
            if ours != theirs:
                return f"rank {ranks[0]} has '{ours}', rank {rank} has '{theirs}'"
    return "no line differs"
