"""Which matrices a parameter consists of, which contiguous slabs they need, and who stores what of them.

A matrix optimizer sees a parameter as a batch of matrices: a 2-D weight is one, an expert tensor
(experts, rows, columns) is one per expert, and a fused projection is several side by side. What
moves between ranks is a *slab*: the smallest contiguous range of the flattened parameter that
contains whole matrices. Parts stacked along the rows are slabs of their own and may be worked on by
different ranks; parts along the columns, and interleaved ones, share a slab::

    Fused(dim=-2, sizes=(4, 2, 2))     Fused(dim=-1, sizes=(3, 3))    Fused(-1, (3, 3), interleaved=True)

        q q q q q q   slab 0             g g g u u u  one slab,         g u g u g u  one slab,
        q q q q q q                      g g g u u u  two matrices      g u g u g u  two matrices
        k k k k k k   slab 1
        v v v v v v   slab 2

The *region* of a rank (see :mod:`ragged_fsdp.routes`) is what it stores of a parameter seen as (batches,
rows, columns). Plain integers, no torch: the same answer on every rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ragged_fsdp.routes import BoxPart, Region, Shared, region_numel, shared_boxes, starts_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Ends",
    "Flattened",
    "Fused",
    "MatrixLayout",
    "MatrixRule",
    "Slab",
    "Spot",
    "SubMatrix",
    "continued",
    "matrix_shape",
    "slabs_of",
]


@dataclass(frozen=True)
class Fused:
    """Several projections in one weight: each part is a matrix of its own.

    Args:
        dim: -2 for parts stacked along the rows of each matrix, -1 along its columns.
        sizes: rows or columns of each part; they add up to the size of ``dim``.
        interleaved: the parts alternate index by index (all sizes equal) instead of following each
            other.
    """

    dim: int
    sizes: tuple[int, ...]
    interleaved: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if self.dim not in (-2, -1):
            raise ValueError(f"Fused: dim must be -2 (rows) or -1 (columns), got {self.dim}.")
        if not self.sizes or any(size < 1 for size in self.sizes):
            raise ValueError(f"Fused: sizes must be positive, got {self.sizes}.")
        if self.interleaved and len(set(self.sizes)) != 1:
            raise ValueError(f"Fused: interleaved parts must be equally large, got {self.sizes}.")


@dataclass(frozen=True)
class Flattened:
    """A tensor of more than two dims as one matrix (shape[0], everything else), as for convolutions."""


MatrixRule = Fused | Flattened | None


@dataclass(frozen=True)
class SubMatrix:
    """A matrix inside a slab: ``slab[row::row_step][:rows, column::column_step][:, :columns]``."""

    row: int
    row_step: int
    rows: int
    column: int
    column_step: int
    columns: int


@dataclass(frozen=True)
class Slab:
    """A contiguous range of the flattened parameter, seen as (rows, columns), with its matrices.

    ``batch`` and ``first_row`` locate it in the parameter seen as (batches, rows, columns).
    """

    batch: int
    first_row: int
    rows: int
    columns: int
    matrices: tuple[SubMatrix, ...]

    @property
    def numel(self) -> int:
        """Elements of the slab."""
        return self.rows * self.columns


def matrix_shape(shape: Sequence[int], rule: MatrixRule) -> tuple[int, int, int]:
    """The parameter as (batches, rows, columns)."""
    if len(shape) < 2:
        raise ValueError(f"shape {tuple(shape)} has no matrix: at least two dims are needed.")
    if isinstance(rule, Flattened):
        return 1, shape[0], math.prod(shape[1:])
    return math.prod(shape[:-2]), shape[-2], shape[-1]


def slabs_of(shape: Sequence[int], rule: MatrixRule) -> tuple[Slab, ...]:
    """The slabs of a parameter of this shape, in the order of its elements."""
    batches, rows, columns = matrix_shape(shape, rule)
    if not isinstance(rule, Fused):
        whole = SubMatrix(0, 1, rows, 0, 1, columns)
        return tuple(Slab(b, 0, rows, columns, (whole,)) for b in range(batches))
    if sum(rule.sizes) != shape[rule.dim]:
        raise ValueError(
            f"the sizes {rule.sizes} of the fused parts add up to {sum(rule.sizes)}, "
            f"dim {rule.dim} of shape {tuple(shape)} has {shape[rule.dim]}."
        )
    step, starts = 1, starts_of(rule.sizes)
    if rule.interleaved:
        step, starts = len(starts), tuple(range(len(starts)))
    parts = tuple(zip(starts, rule.sizes))
    if rule.dim == -1:
        matrices = tuple(SubMatrix(0, 1, rows, start, step, size) for start, size in parts)
    elif rule.interleaved:
        matrices = tuple(SubMatrix(start, step, size, 0, 1, columns) for start, size in parts)
    else:
        return tuple(
            Slab(b, start, size, columns, (SubMatrix(0, 1, size, 0, 1, columns),))
            for b in range(batches)
            for start, size in parts
        )
    return tuple(Slab(b, 0, rows, columns, matrices) for b in range(batches))


class Spot(NamedTuple):
    """Elements of a flat tensor: ``rows`` runs of ``run`` neighbours, ``stride`` apart."""

    start: int
    rows: int
    run: int
    stride: int

    @property
    def numel(self) -> int:
        """Elements of all runs."""
        return self.rows * self.run

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other."""
        return self.rows == 1 or self.stride == self.run

    def view(self, tensor: Tensor) -> Tensor:
        """These elements of a contiguous tensor, as a tensor of shape (rows, run)."""
        return tensor.as_strided(
            (self.rows, self.run), (self.stride, 1), tensor.storage_offset() + self.start
        )


Ends = tuple[Spot, Spot]
"""Where elements lie in two flat tensors: the near end, in a rank's own tensor, and the far end."""


@dataclass(frozen=True, eq=False)
class MatrixLayout:
    """The matrices of a parameter and who stores what of them: one object for all layers that are alike.

    ``regions`` and ``replicas`` have one entry per rank of the exchange group: what it stores of the
    parameter seen as (batches, rows, columns), and to which copy of the parameter that belongs.
    """

    shape: tuple[int, ...]
    rule: MatrixRule
    regions: tuple[Region, ...]
    replicas: tuple[int, ...]

    def __post_init__(self) -> None:
        """Each replica must hold every element once; overlaps would show as a wrong total."""
        if len(self.regions) != len(self.replicas) or not self.regions:
            raise ValueError(f"{len(self.regions)} regions for {len(self.replicas)} ranks.")
        whole = self.batches_rows_columns
        stored: dict[int, int] = {}
        for replica, region in zip(self.replicas, self.regions):
            if any(o < 0 or o + s > n for box in region for o, s, n in zip(*box, whole)):
                raise ValueError(f"the region {region} is not within {whole}.")
            stored[replica] = stored.get(replica, 0) + region_numel(region)
        if set(stored.values()) != {math.prod(whole)}:
            raise ValueError(
                f"the ranks of each replica must hold its {math.prod(whole)} elements once, they hold "
                f"{sorted(stored.values())}."
            )

    @cached_property
    def batches_rows_columns(self) -> tuple[int, int, int]:
        """The parameter as a batch of matrices."""
        return matrix_shape(self.shape, self.rule)

    @cached_property
    def slabs(self) -> tuple[Slab, ...]:
        """The slabs of the parameter, in the order of its elements."""
        return slabs_of(self.shape, self.rule)

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks if they know the same matrices and regions."""
        text = repr((self.shape, self.rule, self.regions, self.replicas))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """For each slab, the ranks that store most of it: several with replicas and even cuts."""
        most = [0] * len(self.slabs)
        ranks: list[list[int]] = [[] for _ in self.slabs]
        per_batch = len(self.slabs) // max(1, self.batches_rows_columns[0])
        for rank, region in enumerate(self.regions):
            if not region:
                continue
            (first, *_), _ = region[0]
            (last, *_), (batches, *_) = region[-1]
            for index in range(first * per_batch, (last + batches) * per_batch):
                held = sum(near.numel for near, _ in self.shared(index, rank))
                if held > most[index]:
                    most[index], ranks[index] = held, [rank]
                elif held and held == most[index]:
                    ranks[index].append(rank)
        return tuple(map(tuple, ranks))

    def shared(self, slab: int, rank: int) -> tuple[Ends, ...]:
        """What ``rank`` stores of a slab, in the order in which it is packed: where in its flat local
        tensor, and where in the slab."""
        known = self._shared.get((slab, rank))
        if known is None:
            it = self.slabs[slab]
            box = ((it.batch, it.first_row, 0), (1, it.rows, it.columns))
            known = self._shared[slab, rank] = _joined(shared_boxes(self.regions[rank], (box,)))
        return known

    @cached_property
    def _shared(self) -> dict[tuple[int, int], tuple[Ends, ...]]:
        return {}


def _joined(shared: Sequence[Shared]) -> tuple[Ends, ...]:
    """The ends of shared boxes; what goes on at both ends is one."""
    found: list[Ends] = []
    for both in shared:
        ends = _ends(both)
        longer = continued(found[-1], ends) if found else None
        if longer is not None:
            found[-1] = longer
        else:
            found.append(ends)
    return tuple(found)


def continued(ends: Ends, following: Ends) -> Ends | None:
    """Both as one, if the second is a run that goes on where the first ends, near and far; else None."""
    for spot, other in zip(ends, following):
        if not spot.rows == other.rows == 1 or spot.start + spot.run != other.start:
            return None
    run = ends[0].run + following[0].run
    return Spot(ends[0].start, 1, run, run), Spot(ends[1].start, 1, run, run)


def _ends(shared: Shared) -> Ends:
    starts = shared.source.run_start, shared.target.run_start
    if starts[0] is not None and starts[1] is not None:
        numel = shared.source.numel
        return Spot(starts[0], 1, numel, numel), Spot(starts[1], 1, numel, numel)
    return _rows_of(shared.source), _rows_of(shared.target)


def _rows_of(part: BoxPart) -> Spot:
    """A part of a single matrix, row by row."""
    (batch, row, column), (_, block_rows, stride) = part.offsets, part.block_sizes
    start = part.block_start + (batch * block_rows + row) * stride + column
    return Spot(start, part.sizes[1], part.sizes[2], stride)
