"""From parameters and policies to the frozen plan of a group: the one source of where a parameter lies.

The layout is counted in cells. Where all tensors are gathered with one item size a cell is an element, and
the dtype decides only what offsets are multiples of. Where item sizes differ (int8 codes beside bf16 norms) a
cell has their greatest common divisor in bytes, so that one all-gather carries every dtype exactly.

A :class:`ChunkPlan` cuts every parameter by itself, into equal chunks along one dim, as ``Shard(dim)`` does::

    rows   0 1 2 | 3 4 5 | 6 . .      7 rows on 3 ranks; a chunk is padded to 3 rows when it is sent

All-gather extensions need this because they pad and index by rows, and it is what an explicit ``Shard(dim)``
means. Where ``dim`` is not 0 the plan counts in the *rank-major* form of a parameter: the chunks of the ranks
one after the other, each contiguous in its own dims. For dim 0 that is the parameter itself.

Beside tensor and expert parallelism a parameter's *inner* tensors may differ in size (5 rows over 2 ranks: 3
and 2). The group is planned once, for the largest, and every rank uses those offsets: shorter ones end
earlier. So all ranks agree on one placement, whose units are then given per outer shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dtensor import RaggedShard, StridedRaggedShard, placement_from_layout
from ragged_fsdp.dtensor.geometry import shard_box
from ragged_fsdp.layout import ALIGN_BYTES, GroupLayout, LocalRange, TensorSpec
from ragged_fsdp.placement import ragged_dims
from ragged_fsdp.planner import plan_buffers, plan_group, split_trainable
from ragged_fsdp.policy import Tiles
from ragged_fsdp.routes import boxes_between
from ragged_fsdp.torch_internals import StridedShard, local_of

__all__ = [
    "ChunkPlan",
    "GroupPlan",
    "GroupTensors",
    "chunk_placement",
    "chunk_plan",
    "gathered_dtype",
    "inner_of",
    "make_plan",
    "outer_shapes",
    "ragged_placement",
    "rank_major",
    "shrink_to",
    "split_by_blocks",
    "split_frozen",
]

PlacementRule = Callable[[Sequence[Placement]], Any]
"""From the placements that stand after it to the placement of a parameter over the sharding mesh dim."""

_UNIT_CELLS = 128
_SMALL_SHARD_UNITS = 8  # below this many units per shard, padding to 128 cells would show
_SMALL_PART_UNITS = 32  # of a buffer that was split off to be even, it would show sooner


@dataclass(frozen=True)
class GroupPlan:
    """Names, shapes and dtypes of a group and where its tensors lie."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """What tensor or expert parallelism leaves for this data-parallel group to cut."""
    dtypes: tuple[str, ...]
    """What the parameters had when they were planned; later casts do not change the layout."""
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
        part, tile = self.local_range(index, rank), self.tile(index)
        start, stop = part.tensor_start, part.tensor_start + part.numel
        if tile is None:
            return whole.view(-1)[start:stop]
        boxes = boxes_between(Tiles(*tile).panels(whole.shape), start, stop)
        parts = [whole[tuple(slice(o, o + s) for o, s in zip(*box))].reshape(-1) for box in boxes]
        return torch.cat(parts) if parts else whole.new_empty(0)

    def tile(self, index: int) -> tuple[int, int] | None:
        """Rows and columns of the tiles in whose order tensor ``index`` lies; None is row-major."""
        return self.layout.specs[index].tile

    def tensor_layout(self, index: int) -> GroupLayout:
        """The layout of one tensor alone, in its elements."""
        return self.layout.alone(index, 1 if self.same_items else self.item_bytes[index] // self.cell_bytes)

    @cached_property
    def description(self) -> str:
        """One line per tensor and the layout's digest: what ranks must agree on."""
        lines = [
            f"{name} {shape} {dtype} block {spec.block_numel * self.cell_bytes // item}"
            + (f" tiles {spec.tile}" if spec.tile else "")
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
    split_off: bool = False
    """Whether frozen tensors of the group have a buffer of their own."""
    tiles: Sequence[tuple[int, int] | None] = ()
    """The tiles in whose order each lies; none at all is row-major for all."""

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
        tiles = self.tiles or (None,) * len(self.names)
        cells = [item // self.cell_bytes for item in self.item_bytes]
        return tuple(
            TensorSpec(name, math.prod(shape) * count, block * count, tile)
            for name, shape, block, count, tile in zip(self.names, self.shapes, self.blocks, cells, tiles)
        )

    def multiples(self, ranks: int) -> tuple[int, int]:
        """What shard sizes and what offsets must be multiples of: 16 bytes in every dtype there may be."""
        mixed = len(set(self.item_bytes)) > 1
        smallest = self.cell_bytes if mixed else min([self.cell_bytes, *(d.itemsize for d in self.dtypes)])
        align = max(1, ALIGN_BYTES // smallest)
        least = _SMALL_PART_UNITS if self.split_off else _SMALL_SHARD_UNITS
        large = sum(spec.numel for spec in self.specs) >= ranks * _UNIT_CELLS * least
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


def split_frozen(tensors: GroupTensors, ranks: int, trainable: Sequence[bool]) -> list[list[int]]:
    """The tensors of each buffer: all in one, or frozen ones apart if trainable ones would not be even."""
    everything = list(range(len(tensors.names)))
    if ranks == 1 or all(trainable) or not any(trainable):
        return [everything]
    parts = split_trainable(make_plan(tensors, ranks).layout, trainable)
    return [everything] if parts is None else list(parts)


def split_by_blocks(tensors: GroupTensors, ranks: int, *, max_buffers: int) -> list[list[int]]:
    """The tensors of each buffer, if the padding falls with up to ``max_buffers`` instead of one."""
    unit, align = tensors.multiples(ranks)
    layouts = plan_buffers(tensors.specs, ranks, max_buffers=max_buffers, unit=unit, align=align)
    position = {name: index for index, name in enumerate(tensors.names)}
    return [[position[spec.name] for spec in layout.specs] for layout in layouts if layout.specs]


@dataclass(frozen=True)
class ChunkPlan(GroupPlan):
    """Every tensor in equal chunks of rows; a row is one index of the tensor's sharded dim."""

    dims: tuple[int, ...] = ()

    @property
    def same_items(self) -> bool:
        """False also for equal dtypes: gradients get a packed layout of their own."""
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
        """One line per tensor, with the dim that is cut, and the layout's digest; ranks must agree on it."""
        lines = super().description.splitlines()
        for index, dim in enumerate(self.dims):
            lines[index] += f" Shard({dim})"
        return "\n".join(lines)


def chunk_plan(
    names: Sequence[str],
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    dims: Sequence[int],
    ranks: int,
) -> ChunkPlan:
    """Plan parameters of ``shapes`` that are cut along ``dims``; no search is needed."""
    specs = tuple(TensorSpec(name, math.prod(shape)) for name, shape in zip(names, shapes))
    *offsets, end = itertools.accumulate((spec.numel for spec in specs), initial=0)
    layout = GroupLayout(specs, ranks, 1, -(-end // ranks), tuple(offsets), 0)
    fixed = tuple(tuple(shape) for shape in shapes)
    kinds = tuple(str(dtype) for dtype in dtypes)
    return ChunkPlan(tuple(names), fixed, kinds, (1,) * len(specs), layout, 1, tuple(dims))


def rank_major(tensor: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """A view of ``tensor`` whose first dim are the ranks: chunk r is what ``Shard(dim)`` gives rank r.

    ``dim`` divides evenly; for dim 0 the tensor is rank-major as it is.
    """
    return tensor.unflatten(dim, (ranks, tensor.shape[dim] // ranks)).movedim(dim, 0)


def inner_of(param: torch.Tensor) -> torch.Tensor:
    """What data parallelism cuts: a DTensor's local tensor, or the parameter itself."""
    return local_of(param) if isinstance(param, DTensor) else param


def outer_shapes(param: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of the inner tensors of a DTensor, in the order of its outer shards."""
    if not isinstance(param, DTensor):
        return [tuple(param.shape)]
    mesh_shape = tuple(param.device_mesh.shape)
    cut = [isinstance(p, (Shard, RaggedShard)) for p in param.placements]
    # data parallelism will cut it again, which makes the ragged placement of the parameter an outer one
    again = (StridedRaggedShard((0,), (1,)), *param.placements)
    return [
        shard_box(tuple(param.shape), (1, *mesh_shape), (0, *coordinate), again)[1]
        for coordinate in itertools.product(*(range(n if c else 1) for n, c in zip(mesh_shape, cut)))
    ]


def shrink_to(plan: GroupPlan, shapes: Sequence[Sequence[int]]) -> GroupPlan:
    """The plan of the largest inner tensors as it is for this rank's ``shapes``."""
    own = tuple(tuple(shape) for shape in shapes)
    if plan.shapes == own:
        return plan
    specs = tuple(
        TensorSpec(spec.name, math.prod(shape) * (item // plan.cell_bytes), spec.block_numel)
        for spec, shape, item in zip(plan.layout.specs, shapes, plan.item_bytes)
    )
    layout = replace(plan.layout, specs=specs, lower_bound=0)
    return replace(plan, shapes=own, layout=layout)


def ragged_placement(plan: GroupPlan, index: int, param: torch.Tensor) -> PlacementRule:
    """How a planned parameter is placed: ragged, and strided where a later placement cuts the same dims."""
    shapes = outer_shapes(param)

    def ragged(later: Sequence[Placement]) -> Any:
        layout = plan.tensor_layout(index)
        if len(set(shapes)) > 1:
            return _per_outer_shard(layout, shapes)
        inner = inner_of(param).shape
        placement = placement_from_layout(layout, 0, inner)
        twice = any(
            isinstance(p, RaggedShard) or (isinstance(p, Shard) and p.dim % param.ndim < len(placement.dims))
            for p in later
        )
        return placement_from_layout(layout, 0, inner, strided=True) if twice else placement

    return ragged


def _per_outer_shard(layout: GroupLayout, shapes: Sequence[tuple[int, ...]]) -> StridedRaggedShard:
    spec = layout.specs[0]
    rows, common = [], spec.block_numel
    for shape in shapes:
        own = replace(layout, specs=(TensorSpec(spec.name, math.prod(shape), spec.block_numel),))
        counts = own.local_numels(0)
        rows.append(counts)
        common = math.gcd(common, *counts)
    prefix = max((ragged_dims(shape, common) for shape in shapes if math.prod(shape)), key=len)
    return StridedRaggedShard(prefix, rows)


def chunk_placement(param: torch.Tensor, dim: int) -> PlacementRule:
    """How a parameter with an explicit ``Shard(dim)`` is placed.

    Placements apply from left to right, but data parallelism cuts what tensor parallelism left: on the same
    dim that is a stride.
    """

    def placement(later: Sequence[Placement]) -> Any:
        if not isinstance(param, DTensor):
            return Shard(dim)
        sizes = param.device_mesh.shape[param.device_mesh.ndim - len(later) :]
        cuts = [size for p, size in zip(later, sizes) if isinstance(p, Shard) and p.dim % param.ndim == dim]
        split = math.prod(cuts)
        return StridedShard(dim, split_factor=split) if split > 1 else Shard(dim)

    return placement
