"""From parameters and policies to the frozen plan of a group.

The layout is counted in cells. Where all tensors are gathered with one item size a cell is an element,
and the plan does not depend on the dtype. Where they differ (int8 codes beside bf16 norms) a cell is
the greatest common divisor of the item sizes, so that one all-gather carries every dtype byte-exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ragged_fsdp.layout import GroupLayout, LocalRange, TensorSpec
from ragged_fsdp.planner import plan_buffers, plan_group

__all__ = ["GroupPlan", "GroupTensors", "gathered_dtype", "make_plan", "split_by_blocks"]

_ALIGN_BYTES = 16
_UNIT_CELLS = 128
_SMALL_SHARD_UNITS = 8  # below this many units per shard, padding to 128 cells would show


@dataclass(frozen=True)
class GroupPlan:
    """Names, shapes and dtypes of a group and where its tensors lie."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the tensors as this data-parallel group sees them: after tensor or expert parallelism."""
    dtypes: tuple[str, ...]
    """Of the parameters when they were planned; later casts do not change the layout."""
    item_bytes: tuple[int, ...]
    """Bytes of one gathered element of each tensor."""
    layout: GroupLayout
    cell_bytes: int

    @property
    def same_items(self) -> bool:
        """Whether a cell is an element of every tensor."""
        return len(set(self.item_bytes)) <= 1

    def local_range(self, index: int, rank: int) -> LocalRange:
        """The part of tensor ``index`` on ``rank``, in elements; the shard start stays in cells."""
        part = self.layout.local_range(index, rank)
        if self.same_items:
            return part
        cells = self.item_bytes[index] // self.cell_bytes
        return LocalRange(part.shard_start, part.tensor_start // cells, part.numel // cells)

    def local_part(self, index: int, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """The flat part on ``rank`` of tensor ``index``, given all of it."""
        part = self.local_range(index, rank)
        return whole.view(-1)[part.tensor_start : part.tensor_start + part.numel]

    def tensor_layout(self, index: int) -> GroupLayout:
        """The layout of one tensor alone, in its elements."""
        cells = 1 if self.same_items else self.item_bytes[index] // self.cell_bytes
        spec = self.layout.specs[index]
        return GroupLayout(
            (TensorSpec(spec.name, spec.numel // cells, max(1, spec.block_numel // cells)),),
            self.layout.ranks,
            1,
            self.layout.shard_numel // cells,
            (self.layout.offsets[index] // cells,),
            0,
        )

    @cached_property
    def description(self) -> str:
        """One line per tensor and the layout's digest: what ranks must agree on."""
        lines = [
            f"{name} {shape} {dtype} block {spec.block_numel * self.cell_bytes // item}"
            for name, shape, dtype, item, spec in zip(
                self.names, self.shapes, self.dtypes, self.item_bytes, self.layout.specs
            )
        ]
        return "\n".join(
            [*lines, f"layout {self.layout.ranks} x {self.layout.shard_numel} {self.layout.digest}"]
        )


def gathered_dtype(dtype: torch.dtype, param_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a parameter is gathered in: the policy's, except for integers and one-byte floats."""
    if param_dtype is None or not dtype.is_floating_point or dtype.itemsize == 1:
        return dtype
    return param_dtype


@dataclass(frozen=True)
class GroupTensors:
    """The tensors of a group before they are planned; ``blocks`` are elements that may not be cut apart."""

    names: Sequence[str]
    shapes: Sequence[Sequence[int]]
    blocks: Sequence[int]
    dtypes: Sequence[torch.dtype]
    param_dtype: torch.dtype | None

    @cached_property
    def item_bytes(self) -> tuple[int, ...]:
        """Bytes of one gathered element of each tensor."""
        return tuple(gathered_dtype(dtype, self.param_dtype).itemsize for dtype in self.dtypes)

    @cached_property
    def cell_bytes(self) -> int:
        """Bytes of a cell of their buffer."""
        return math.gcd(*self.item_bytes) if self.item_bytes else 1

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors in cells."""
        return tuple(
            TensorSpec(name, math.prod(shape) * (item // self.cell_bytes), block * (item // self.cell_bytes))
            for name, shape, block, item in zip(self.names, self.shapes, self.blocks, self.item_bytes)
        )

    def multiples(self, ranks: int) -> tuple[int, int]:
        """What shard sizes and what offsets must be multiples of: 16 bytes in every dtype there may be."""
        mixed = len(set(self.item_bytes)) > 1
        smallest = self.cell_bytes if mixed else min([self.cell_bytes, *(d.itemsize for d in self.dtypes)])
        align = max(1, _ALIGN_BYTES // smallest)
        large = sum(spec.numel for spec in self.specs) >= ranks * _UNIT_CELLS * _SMALL_SHARD_UNITS
        return max(_UNIT_CELLS if large else 1, align), align


def make_plan(tensors: GroupTensors, ranks: int) -> GroupPlan:
    """Plan a group in one buffer."""
    unit, align = tensors.multiples(ranks)
    return GroupPlan(
        tuple(tensors.names),
        tuple(tuple(s) for s in tensors.shapes),
        tuple(str(d) for d in tensors.dtypes),
        tensors.item_bytes,
        plan_group(tensors.specs, ranks, unit=unit, align=align),
        tensors.cell_bytes,
    )


def split_by_blocks(tensors: GroupTensors, ranks: int, *, max_buffers: int) -> list[list[int]]:
    """The tensors of each buffer, if the padding falls with up to ``max_buffers`` instead of one."""
    unit, align = tensors.multiples(ranks)
    layouts = plan_buffers(tensors.specs, ranks, max_buffers=max_buffers, unit=unit, align=align)
    position = {name: index for index, name in enumerate(tensors.names)}
    return [[position[spec.name] for spec in layout.specs] for layout in layouts if layout.specs]
