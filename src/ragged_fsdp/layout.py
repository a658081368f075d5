"""Where the tensors of a group lie in one sharded communication buffer.

A buffer of ``ranks * shard_numel`` elements is cut into equal shards, one per rank. Tensors are
contiguous runs of it; a shard boundary inside a tensor falls between two of its blocks::

    specs     a: 10 elements in blocks of 2     b: 6 in blocks of 3     c: 5, element-wise
    layout    GroupLayout(ranks=3, unit=4, shard_numel=8, offsets=(0, 16, 10), ...)

              rank 0          rank 1          rank 2
              a a a a a a a a|a a c c c c c .|b b b b b b . .
              0               8               16

``b`` could not start at 15, right after ``c``: the boundary at 16 would cut its first block.
Everything is in elements and plain Python integers. The classes are frozen and validate themselves
however they were built, so a layout that exists is a layout that can be used.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

__all__ = ["INT64_MAX", "GroupLayout", "LocalRange", "TensorSpec", "draw"]

INT64_MAX = 2**63 - 1


def _integer(what: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} must be an int, got {value!r}.")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}.")
    if value > INT64_MAX:
        raise ValueError(f"{what} must fit in int64, got {value}.")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a group: ``numel`` elements whose blocks of ``block_numel`` may not be cut."""

    name: str
    numel: int
    block_numel: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"TensorSpec: name must be a str, got {self.name!r}.")
        _integer(f"{self.name}: numel", self.numel, 0)
        _integer(f"{self.name}: block_numel", self.block_numel, 1)
        if self.numel % self.block_numel:
            raise ValueError(
                f"{self.name}: block of {self.block_numel} elements does not divide numel {self.numel}; "
                "use a divisor or pad the parameter."
            )

    @property
    def block_count(self) -> int:
        """Blocks in the tensor."""
        return self.numel // self.block_numel


@dataclass(frozen=True)
class LocalRange:
    """The part of one tensor on one rank: where it lies in the shard and in the flat tensor."""

    shard_start: int
    tensor_start: int
    numel: int


@dataclass(frozen=True)
class GroupLayout:
    """Offsets of the tensors of a group in a buffer of ``ranks`` equal shards, proven valid.

    ``offsets`` follow the order of ``specs``, not the order in the buffer. ``lower_bound`` is a shard
    size no layout of the group can go under; it equals ``shard_numel`` where the layout is known to be
    optimal. Shard size and offsets are multiples of ``align``; the shard size is one of ``unit`` too.
    """

    specs: tuple[TensorSpec, ...]
    ranks: int
    unit: int
    shard_numel: int
    offsets: tuple[int, ...]
    lower_bound: int
    align: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "specs", tuple(self.specs))
        object.__setattr__(self, "offsets", tuple(self.offsets))
        for name, least in (("ranks", 1), ("unit", 1), ("align", 1), ("shard_numel", 0), ("lower_bound", 0)):
            _integer(f"GroupLayout: {name}", getattr(self, name), least)
        self._check_shard()
        self._check_names()
        self._check_offsets()

    def _check_shard(self) -> None:
        for name in ("unit", "align"):
            if self.shard_numel % getattr(self, name):
                raise ValueError(
                    f"GroupLayout: shard_numel {self.shard_numel} is not a multiple of "
                    f"{name} {getattr(self, name)}."
                )
        if self.lower_bound > self.shard_numel:
            raise ValueError(
                f"GroupLayout: lower_bound {self.lower_bound} exceeds shard_numel {self.shard_numel}."
            )
        if self.ranks * self.shard_numel > INT64_MAX:
            raise ValueError(
                f"GroupLayout: {self.ranks} shards of {self.shard_numel} elements do not fit in int64."
            )

    def _check_names(self) -> None:
        if len(self.offsets) != len(self.specs):
            raise ValueError(
                f"GroupLayout: {len(self.specs)} tensors need as many offsets, got {len(self.offsets)}."
            )
        seen: set[str] = set()
        for spec in self.specs:
            if spec.name in seen:
                raise ValueError(f"{spec.name}: the name occurs twice in the group; names must be unique.")
            seen.add(spec.name)

    def _check_offsets(self) -> None:
        for spec, start in zip(self.specs, self.offsets):
            _integer(f"{spec.name}: offset", start, 0)
            if start % self.align:
                raise ValueError(f"{spec.name}: offset {start} is not a multiple of align {self.align}.")
            if start + spec.numel > self.buffer_numel:
                raise ValueError(
                    f"{spec.name}: elements {start} to {start + spec.numel} leave the buffer of "
                    f"{self.buffer_numel} elements."
                )
            self._check_blocks(spec, start)
        placed = [(start, spec) for spec, start in zip(self.specs, self.offsets) if spec.numel]
        placed.sort(key=lambda item: item[0])
        for (start, spec), (next_start, next_spec) in pairwise(placed):
            if start + spec.numel > next_start:
                raise ValueError(
                    f"{spec.name} and {next_spec.name} overlap: the first ends at {start + spec.numel}, "
                    f"the second starts at {next_start}."
                )

    def _check_blocks(self, spec: TensorSpec, start: int) -> None:
        """The first boundary inside decides; the second only if a whole shard lies inside."""
        if not spec.numel:
            return
        boundary = (start // self.shard_numel + 1) * self.shard_numel
        inside = (start + spec.numel - 1) // self.shard_numel - start // self.shard_numel
        cut = inside >= 1 and (boundary - start) % spec.block_numel
        if inside >= 2 and self.shard_numel % spec.block_numel:
            cut, boundary = True, boundary if cut else boundary + self.shard_numel
        if cut:
            raise ValueError(
                f"{spec.name}: the shard boundary at element {boundary} cuts a block: the tensor starts at "
                f"{start} and its blocks have {spec.block_numel} elements."
            )

    @property
    def buffer_numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.ranks * self.shard_numel

    @cached_property
    def tensor_numel(self) -> int:
        """Elements of all tensors."""
        return sum(spec.numel for spec in self.specs)

    @property
    def padding_numel(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.buffer_numel - self.tensor_numel

    @property
    def padding_ratio(self) -> float:
        """Padding relative to the tensors; 0.0 for a group without elements."""
        return self.padding_numel / self.tensor_numel if self.tensor_numel else 0.0

    @property
    def proven_optimal(self) -> bool:
        """Whether no layout of this group can have a smaller shard."""
        return self.shard_numel == self.lower_bound

    @property
    def gap_ratio(self) -> float:
        """How far the shard can be above the optimum, relative to the lower bound."""
        return self.shard_numel / self.lower_bound - 1.0 if self.lower_bound else 0.0

    @cached_property
    def digest(self) -> str:
        """Hex digest of everything in the layout; ranks that agree on it agree on the layout."""
        text = [f"ragged_fsdp.layout/1 {self.ranks} {self.unit} {self.align} {self.shard_numel}"]
        text.append(str(self.lower_bound))
        for spec, start in zip(self.specs, self.offsets):
            text.append(f"{len(spec.name)}:{spec.name} {spec.numel} {spec.block_numel} {start}")
        return hashlib.sha256("\n".join(text).encode()).hexdigest()

    def local_range(self, index: int, rank: int) -> LocalRange:
        """The part of tensor ``index`` on ``rank``; ``numel`` is 0 where it has none.

        ``tensor_start`` is then 0 on the ranks before the tensor and its numel on those after it.
        """
        spec, start = self.specs[index], self.offsets[index]
        if not 0 <= rank < self.ranks:
            raise IndexError(f"rank must be in [0, {self.ranks}), got {rank}.")
        shard_first = rank * self.shard_numel
        first = max(start, shard_first)
        end = min(start + spec.numel, shard_first + self.shard_numel)
        if first >= end:
            return LocalRange(0, 0 if shard_first <= start else spec.numel, 0)
        return LocalRange(first - shard_first, first - start, end - first)

    def local_units(self, index: int) -> tuple[int, ...]:
        """Blocks of tensor ``index`` on each rank; they sum to its block count."""
        spec, start = self.specs[index], self.offsets[index]
        if not spec.numel:
            return (0,) * self.ranks
        first, last = start // self.shard_numel, (start + spec.numel - 1) // self.shard_numel
        inside = [self.local_range(index, rank).numel // spec.block_numel for rank in range(first, last + 1)]
        return (0,) * first + tuple(inside) + (0,) * (self.ranks - last - 1)

    def runs(self) -> list[tuple[int, int, int | None]]:
        """The buffer in order as ``(start, end, tensor index)``; padding has index None."""
        filled: list[tuple[int, int, int | None]] = []
        position = 0
        order = sorted(range(len(self.specs)), key=lambda i: (self.offsets[i], i))
        for index in order:
            start, numel = self.offsets[index], self.specs[index].numel
            if not numel:
                continue
            if start > position:
                filled.append((position, start, None))
            filled.append((start, start + numel, index))
            position = start + numel
        if position < self.buffer_numel:
            filled.append((position, self.buffer_numel, None))
        return filled


def draw(layout: GroupLayout, letters: Sequence[str]) -> str:
    """The buffer element by element, shards divided by ``|`` and padding as dots (small layouts only)."""
    cells = ["."] * layout.buffer_numel
    for start, end, index in layout.runs():
        if index is not None:
            cells[start:end] = letters[index] * (end - start)
    shard = max(1, layout.shard_numel)
    rows = [" ".join(cells[first : first + shard]) for first in range(0, len(cells), shard)]
    return "|".join(rows)
