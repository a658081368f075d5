"""Which matrices a parameter consists of, and which contiguous slabs of it they need.

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

Plain integers, no torch: the same answer on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Flattened", "Fused", "MatrixRule", "Slab", "SubMatrix", "matrix_shape", "slabs_of"]


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
    starts = [sum(rule.sizes[:i]) for i in range(len(rule.sizes))]
    if rule.dim == -2 and not rule.interleaved:
        return tuple(
            Slab(b, start, size, columns, (SubMatrix(0, 1, size, 0, 1, columns),))
            for b in range(batches)
            for start, size in zip(starts, rule.sizes)
        )
    parts = _column_parts(rule, starts, rows) if rule.dim == -1 else _alternating_rows(rule, columns)
    return tuple(Slab(b, 0, rows, columns, parts) for b in range(batches))


def _column_parts(rule: Fused, starts: list[int], rows: int) -> tuple[SubMatrix, ...]:
    if rule.interleaved:
        step = len(rule.sizes)
        return tuple(SubMatrix(0, 1, rows, i, step, size) for i, size in enumerate(rule.sizes))
    return tuple(SubMatrix(0, 1, rows, start, 1, size) for start, size in zip(starts, rule.sizes))


def _alternating_rows(rule: Fused, columns: int) -> tuple[SubMatrix, ...]:
    step = len(rule.sizes)
    return tuple(SubMatrix(i, step, size, 0, 1, columns) for i, size in enumerate(rule.sizes))
