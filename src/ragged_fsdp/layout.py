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
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

__all__ = [
    "ALIGN_BYTES",
    "GroupLayout",
    "LocalRange",
    "TensorSpec",
    "align_up",
    "as_integer",
    "check_integer",
]

_INT64_MAX = 2**63 - 1
ALIGN_BYTES = 16
"""What begins in a buffer or a message begins at a multiple of it: kernels and NCCL move 16 bytes at once."""


def align_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def as_integer(what: str, value: object) -> int:
    """``value`` as a plain int; numpy integers are welcome, floats and booleans are not."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise TypeError(f"{what} must be an integer, got {value!r}.")


def check_integer(owner: str, what: str, value: object, least: int) -> None:
    """Raise, naming ``owner``, unless ``value`` is a plain int of at least ``least`` that int64 holds."""
    if type(value) is int and least <= value <= _INT64_MAX:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{owner}: {what} must be an int, got {value!r}.")
    if value < least:
        raise ValueError(f"{owner}: {what} must be at least {least}, got {value}.")
    if value > _INT64_MAX:
        raise ValueError(f"{owner}: {what} must fit in int64, got {value}.")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a group: ``numel`` elements whose blocks of ``block_numel`` may not be cut."""

    name: str
    numel: int
    block_numel: int = 1
    tile: tuple[int, int] | None = None
    """Rows and columns of its tiles, if its elements lie in their order; the last block may then be short."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"TensorSpec: name must be a str, got {self.name!r}.")
        check_integer(self.name, "numel", self.numel, 0)
        check_integer(self.name, "block_numel", self.block_numel, 1)
        if self.tile is not None:
            for size in self.tile:
                check_integer(self.name, "tile", size, 1)
        elif self.numel % self.block_numel:
            raise ValueError(
                f"{self.name}: block of {self.block_numel} elements does not divide numel {self.numel}; "
                "use a divisor or pad the parameter."
            )


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
        for name in ("specs", "offsets"):
            if not isinstance(getattr(self, name), Iterable):
                raise TypeError(f"GroupLayout: {name} must be a sequence, got {getattr(self, name)!r}.")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for spec in self.specs:
            if not isinstance(spec, TensorSpec):
                raise TypeError(f"GroupLayout: specs must hold TensorSpecs, got {spec!r} in it.")
        for name, least in (("ranks", 1), ("unit", 1), ("align", 1), ("shard_numel", 0), ("lower_bound", 0)):
            check_integer("GroupLayout", name, getattr(self, name), least)
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
        if self.ranks * self.shard_numel > _INT64_MAX:
            raise ValueError(
                f"GroupLayout: {self.ranks} shards of {self.shard_numel} elements do not fit in int64."
            )

    def _check_names(self) -> None:
        if len(self.offsets) != len(self.specs):
            raise ValueError(
                f"GroupLayout: {len(self.specs)} tensors need as many offsets, got {len(self.offsets)}."
            )
        if len({spec.name for spec in self.specs}) < len(self.specs):
            names = [spec.name for spec in self.specs]
            twice = next(name for place, name in enumerate(names) if name in names[:place])
            raise ValueError(f"{twice}: the name occurs twice in the group; names must be unique.")

    def _check_offsets(self) -> None:
        for spec, start in zip(self.specs, self.offsets):
            check_integer(spec.name, "offset", start, 0)
        kinds = tuple((spec.numel, spec.block_numel) for spec in self.specs)
        fault = _first_fault(kinds, self.offsets, self.ranks, self.shard_numel, self.align)
        if fault is not None:
            index, reason = fault
            raise ValueError(f"{self.specs[index].name}: {reason}")

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
            tile = f" tiles {spec.tile}" if spec.tile else ""
            text.append(f"{len(spec.name)}:{spec.name} {spec.numel} {spec.block_numel} {start}{tile}")
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

    def local_numels(self, index: int) -> tuple[int, ...]:
        """Elements of tensor ``index`` on each rank."""
        spec, start, shard = self.specs[index], self.offsets[index], self.shard_numel
        if not spec.numel:
            return (0,) * self.ranks
        end = start + spec.numel
        first, last = start // shard, (end - 1) // shard
        inside = [spec.numel]
        if first < last:  # a head, whole shards, a tail
            inside = [(first + 1) * shard - start, *[shard] * (last - first - 1), end - last * shard]
        return (*(0,) * first, *inside, *(0,) * (self.ranks - last - 1))

    def local_units(self, index: int) -> tuple[int, ...]:
        """Blocks of tensor ``index`` on each rank; they sum to its block count.

        Where its last block is short, parts of blocks instead, all alike.
        """
        spec = self.specs[index]
        unit = math.gcd(spec.block_numel, spec.numel)
        return tuple(numel // unit for numel in self.local_numels(index))

    def alone(self, index: int, cells: int = 1) -> "GroupLayout":
        """The layout of tensor ``index`` alone, over the same shards, in elements of ``cells`` cells each."""
        spec = self.specs[index]
        if cells == 1 and len(self.specs) == 1:
            return self
        one = TensorSpec(spec.name, spec.numel // cells, max(1, spec.block_numel // cells), spec.tile)
        return GroupLayout(
            (one,), self.ranks, 1, self.shard_numel // cells, (self.offsets[index] // cells,), 0
        )

    def recut(self, ranks: int) -> "GroupLayout":
        """This buffer in ``ranks`` equal shards, a divisor of today's number; their borders may cut blocks.

        Tiles are forgotten: with as many ranks it is where untiled tensors lie.
        """
        specs = tuple(TensorSpec(spec.name, spec.numel) for spec in self.specs)
        return GroupLayout(specs, ranks, 1, self.buffer_numel // ranks, self.offsets, 0)

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


@lru_cache(maxsize=1024)
def _first_fault(
    kinds: tuple[tuple[int, int], ...], offsets: tuple[int, ...], ranks: int, shard: int, align: int
) -> tuple[int, str] | None:
    """The first tensor that breaks a constraint, and how. Cached: the equal layers of a model share it."""
    for index, ((numel, block), start) in enumerate(zip(kinds, offsets)):
        if start % align:
            return index, f"offset {start} is not a multiple of align {align}."
        end = start + numel
        if end > ranks * shard:
            return index, f"elements {start} to {end} leave the buffer of {ranks * shard} elements."
        if numel and (cut := _cut_boundary(start, numel, block, shard)) is not None:
            return index, (
                f"the shard boundary at element {cut} cuts a block: the tensor starts at {start} "
                f"and its blocks have {block} elements."
            )
    order = [index for index in range(len(kinds)) if kinds[index][0]]
    order.sort(key=offsets.__getitem__)
    for index, after in pairwise(order):
        end = offsets[index] + kinds[index][0]
        if end > offsets[after]:
            return after, f"starts at {offsets[after]}, inside the tensor before it, which ends at {end}."
    return None


def _cut_boundary(start: int, numel: int, block: int, shard: int) -> int | None:
    """The first shard boundary inside a block, if any.

    The first boundary inside the tensor decides, and the second if there is one: all others follow.
    """
    first, last = start // shard, (start + numel - 1) // shard
    boundary = (first + 1) * shard
    if last > first and (boundary - start) % block:
        return boundary
    if last > first + 1 and shard % block:
        return boundary + shard
    return None
