"""Plans in which every parameter is cut by itself, into equal chunks along one dim, as ``Shard(dim)`` does.

    rows   0 1 2 | 3 4 5 | 6 . .      7 rows on 3 ranks; a chunk is padded to 3 rows when it is sent

All-gather extensions need this because they pad and index by rows, and it is what an explicit ``Shard(dim)``
means. Where ``dim`` is not 0 the plan counts in the *rank-major* form of a parameter: the chunks of the ranks
one after the other, each contiguous in its own dims. For dim 0 that is the parameter itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ragged_fsdp.fsdp.plan import GroupPlan
from ragged_fsdp.layout import GroupLayout, LocalRange, TensorSpec

__all__ = ["RowPlan", "rank_major", "row_plan"]


@dataclass(frozen=True)
class RowPlan(GroupPlan):
    """Every tensor in equal chunks of rows; a row is one index of the tensor's sharded dim."""

    dims: tuple[int, ...] = ()

    @property
    def same_items(self) -> bool:
        """Never: gradients get a packed layout of their own."""
        return False

    def row_numel(self, index: int) -> int:
        """Elements of a row."""
        shape, dim = self.shapes[index], self.dims[index]
        return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])

    def chunk_rows(self, index: int) -> int:
        """Rows of a chunk, the last ones filled up."""
        return -(-self.shapes[index][self.dims[index]] // self.layout.ranks)

    def local_rows(self, index: int, rank: int) -> tuple[int, int]:
        """The first row of ``rank`` and how many it has."""
        rows, chunk = self.shapes[index][self.dims[index]], self.chunk_rows(index)
        first = min(rows, rank * chunk)
        return first, min(rows, first + chunk) - first

    def tensor_layout(self, index: int) -> GroupLayout:
        """One tensor over the ranks, in its elements."""
        row = self.row_numel(index)
        spec = TensorSpec(self.names[index], math.prod(self.shapes[index]), max(1, row))
        return GroupLayout((spec,), self.layout.ranks, 1, self.chunk_rows(index) * row, (0,), 0)

    def local_range(self, index: int, rank: int) -> LocalRange:
        """The rows of tensor ``index`` on ``rank``, in elements of its rank-major form."""
        first, rows = self.local_rows(index, rank)
        row = self.row_numel(index)
        return LocalRange(0, first * row, rows * row)

    def local_part(self, index: int, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """The chunk of ``rank``, flattened."""
        return whole.narrow(self.dims[index], *self.local_rows(index, rank)).reshape(-1)

    @cached_property
    def description(self) -> str:
        """As for any plan; ranks must agree on the dims too."""
        lines = super().description.splitlines()
        for index, dim in enumerate(self.dims):
            lines[index] += f" Shard({dim})"
        return "\n".join(lines)


def row_plan(
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    dims: Sequence[int],
    ranks: int,
) -> RowPlan:
    """Plan parameters of ``shapes`` that are cut along ``dims``; no search is needed."""
    specs = tuple(TensorSpec(name, math.prod(shape)) for name, shape in zip(names, shapes))
    offsets, end = [], 0
    for spec in specs:
        offsets.append(end)
        end += spec.numel
    layout = GroupLayout(specs, ranks, 1, -(-end // ranks), tuple(offsets), 0)
    fixed = tuple(tuple(shape) for shape in shapes)
    kinds = tuple(str(dtype) for dtype in dtypes)
    return RowPlan(tuple(names), fixed, kinds, (1,) * len(specs), layout, 1, tuple(dims))


def rank_major(tensor: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """A view of ``tensor`` whose first dim are the ranks: chunk r is what ``Shard(dim)`` gives rank r.

    ``dim`` divides evenly; for dim 0 the tensor is rank-major as it is.
    """
    return tensor.unflatten(dim, (ranks, tensor.shape[dim] // ranks)).movedim(dim, 0)
