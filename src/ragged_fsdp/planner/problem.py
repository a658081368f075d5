"""The planning problem on plain integers: what every part of the search works on."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["Kind", "Problem", "align_up"]

Kind = tuple[int, int]
"""``(numel, block_numel)``: tensors of one kind can be swapped without changing a layout's quality."""


def align_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Problem:
    """Place tensors of ``kinds`` in ``ranks`` equal shards, as small as possible.

    ``step`` divides every shard size (the collective unit and the alignment together); ``align``
    divides every offset. Tensors without elements are left out: they fit anywhere.
    """

    kinds: tuple[Kind, ...]
    ranks: int
    step: int
    align: int

    @classmethod
    def build(
        cls, sizes: Sequence[int], blocks: Sequence[int], ranks: int, unit: int, align: int = 1
    ) -> "Problem":
        """From parallel lists that were already validated; keeps the order of the tensors with elements."""
        kinds = tuple((numel, block) for numel, block in zip(sizes, blocks) if numel)
        return cls(kinds, ranks, math.lcm(unit, align), align)

    @cached_property
    def counts(self) -> dict[Kind, int]:
        """How many tensors of each kind, largest kinds first."""
        return dict(sorted(Counter(self.kinds).items(), key=lambda item: (-item[0][0], -item[0][1])))

    @cached_property
    def tensor_numel(self) -> int:
        return sum(numel for numel, _ in self.kinds)

    @cached_property
    def aligned_numel(self) -> int:
        """What the tensors take at least: each up to the next multiple of the alignment."""
        return sum(count * align_up(numel, self.align) for (numel, _), count in self.counts.items())

    @cached_property
    def volume_shard(self) -> int:
        """The smallest shard size with room for all elements."""
        return align_up(-(-self.aligned_numel // self.ranks), self.step)

    @cached_property
    def largest_shard(self) -> int:
        """A shard size that always works: all tensors one after the other on the first rank."""
        return align_up(self.aligned_numel, self.step)

    @property
    def fits_arrays(self) -> bool:
        """Whether all positions of a search stay far from the end of int64, so that arrays can hold them."""
        return self.aligned_numel < 2**56
