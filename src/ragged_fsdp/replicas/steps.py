"""What a replica is told of a step: whose gradients were averaged, who left and who came."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Averaged", "Change"]


@dataclass(frozen=True)
class Averaged:
    """What the gradients are after ``Replicas.average``."""

    step: int
    replicas: tuple[int, ...]
    """Whose gradients are in the mean."""
    attempts: int
    """How often it was averaged: more than once if a replica died in the middle."""


@dataclass(frozen=True)
class Change:
    """Who left and who came between two steps of this replica."""

    step: int
    members: tuple[int, ...]
    left: tuple[int, ...]
    came: tuple[int, ...]
    waited_s: float
    """From the end of this replica's backward to the average."""
    copied_bytes: int = 0
    """What this rank copied from a peer, if it was the one that came or fell behind."""
    copied_s: float = 0.0

    def __str__(self) -> str:
        parts = [f"step {self.step}: replicas {list(self.members)}"]
        parts += [f"left: {list(self.left)}"] if self.left else []
        parts += [f"came: {list(self.came)}"] if self.came else []
        parts.append(f"waited {self.waited_s:.2f} s")
        if self.copied_s:
            parts.append(f"copied {self.copied_bytes:,} bytes in {self.copied_s:.2f} s")
        return ", ".join(parts)
