"""Which blocks a parameter has, and which of them lie on a rank.

Blocks come from the *global shape* alone. A matrix (leading dims flattened into rows) is tiled; a
vector, or a matrix too small for a tile, is cut into runs of consecutive elements. Both are one
picture: rows of ``cols`` elements, in blocks of ``block_rows`` x ``block_cols``; a run is a row::

    (64, 96), tiles of 32 x 32              (1000,), runs of 256
    +----+----+----+                        +--------------+
    | 0  | 1  | 2  |   grid (2, 3)          |      0       |   cols 256, blocks 1 x 256, grid (4, 1)
    +----+----+----+                        |      1       |
    | 3  | 4  | 5  |                        |      2       |
    +----+----+----+                        |      3    |      (the last run is short)

Tile rows are halved, and tile columns doubled, until they divide the rows of the matrix, so that a
granularity of whole blocks always exists. A rank's part of a parameter is *intact* if it is made of
whole blocks; ``locate_blocks`` finds it for every rank of the mesh at once, so that all ranks agree on
an error. Per-block state (scales) is laid out like the parameter, over the grid instead of elements.
:func:`to_blocks` and :func:`from_blocks` turn local elements into a batch of blocks and back.

The blocks of a parameter that is stored in :class:`~ragged_fsdp.policy.Tiles` are these tiles, one behind the
other. Where its edges have smaller tiles a block is as many neighbours as fill a whole one.
"""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from ragged_fsdp.dtensor.geometry import (
    compute_layout,
    outer_index,
    outer_mesh_dims,
    ragged_mesh_dim,
    regions_of,
    shard_box,
)
from ragged_fsdp.optim.checks import name_patterns
from ragged_fsdp.optim.state import StateForm, wrap_state
from ragged_fsdp.placement import RaggedShard
from ragged_fsdp.policy import Elements, Granularity, Rows, Tiles, Whole
from ragged_fsdp.routes import region_numel
from ragged_fsdp.torch_internals import StridedShard

__all__ = [
    "BlockGrid",
    "LocalBlocks",
    "block_grid",
    "block_policy",
    "blocks_placements",
    "form_over_blocks",
    "from_blocks",
    "grid_of",
    "locate_blocks",
    "require_whole_blocks",
    "state_over_blocks",
    "to_blocks",
]

Shape = tuple[int, ...]
Index = TypeVar("Index", int, Tensor)
_LEAST_BLOCK = 128
"""Smaller tiles would spend too much on scales; such parameters are cut into runs."""


@dataclass(frozen=True)
class BlockGrid:
    """The blocks of one parameter; see the module's picture."""

    shape: Shape
    cols: int
    block_rows: int
    block_cols: int
    tiled: bool
    tile: tuple[int, int] | None = None
    """The tiles in whose order the parameter is stored; its blocks are then runs of that order."""

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows of ``cols`` elements; the last may be short if not ``tiled``."""
        return -(-self.numel // self.cols)

    @property
    def granule_numel(self) -> int:
        """Consecutive elements that hold whole blocks: what a shard must be a multiple of."""
        return self.block_rows * self.cols

    @property
    def granularity(self) -> Granularity:
        """What to answer in ``orig_param_policy`` so that no block is cut."""
        if self.tile is not None:
            return Tiles(*self.tile)
        if self.numel % self.granule_numel:
            return Whole()
        return Rows(self.block_rows) if self.tiled else Elements(self.cols)

    @property
    def grid_shape(self) -> Shape:
        """Shape of per-block state; keeps leading dims where blocks do not straddle them."""
        if self.tiled:
            return (*self.shape[:-2], self.shape[-2] // self.block_rows, -(-self.cols // self.block_cols))
        return (self.rows, 1) if self.tile is None else (self.rows,)


@dataclass(frozen=True)
class LocalBlocks:
    """The whole blocks on one rank: ``numel`` elements in rows of ``cols``, and where they come from.

    Element (r, c) of the local matrix is element ``col_base + c`` of the parameter's row ``source_row(r)``.
    """

    grid: BlockGrid
    numel: int
    cols: int
    first_row: int
    row_base: int
    row_period: int
    row_stride: int
    col_base: int

    @property
    def rows(self) -> int:
        """Rows of the local matrix."""
        return -(-self.numel // self.cols) if self.numel else 0

    @property
    def grid_rows(self) -> int:
        """Rows of blocks on this rank."""
        return -(-self.rows // self.grid.block_rows)

    @property
    def grid_cols(self) -> int:
        """Columns of blocks on this rank."""
        return -(-self.cols // self.grid.block_cols)

    def source_row(self, row: Index) -> Index:
        """Which of the parameter's rows of ``grid.cols`` elements local rows lie in."""
        inner = row + self.first_row
        outer = inner // self.row_period
        return self.row_base + outer * self.row_stride + inner - outer * self.row_period


def _power_of_two(what: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
        raise ValueError(f"{what} must be a power of two, got {value!r}.")


def grid_of(name: str, param: Tensor, block_shape: tuple[int, int] | None, run: int = 256) -> BlockGrid:
    """The blocks of a parameter; raises, naming it, if it is stored in tiles and these are others."""
    grid = block_grid(tuple(param.shape), block_shape, run)
    tile = next((p.tile for p in getattr(param, "placements", ()) if getattr(p, "tile", None)), None)
    if tile is None:
        return grid
    if block_shape != tile:
        raise ValueError(
            f"{name}: is stored in {Tiles(*tile)}, which are its blocks; got block_shape={block_shape}. Pass "
            f"block_shape={tile}, or exclude the parameter."
        )
    return tile_grid(tuple(param.shape), tile)


def tile_grid(shape: Shape, tile: tuple[int, int]) -> BlockGrid:
    """The blocks of a parameter that is stored in tiles: these where there are no others at its edges."""
    rows, cols = (min(size, most) for size, most in zip(shape[-2:], tile))
    if 0 not in shape and not (shape[-2] % rows or shape[-1] % cols):
        return BlockGrid(shape, shape[-1], rows, cols, tiled=True, tile=tile)
    return BlockGrid(shape, max(1, rows * cols), 1, max(1, rows * cols), tiled=False, tile=tile)


@lru_cache(maxsize=4096)
def block_grid(shape: Shape, block_shape: tuple[int, int] | None = (32, 32), run: int = 256) -> BlockGrid:
    """The blocks of a parameter of this global shape; without a block shape, runs of elements."""
    if block_shape is None:
        _power_of_two("run", run)
        return BlockGrid(shape, run, 1, run, tiled=False)
    if not isinstance(block_shape, tuple) or len(block_shape) != 2:
        raise ValueError(f"block_shape must be two powers of two, got {block_shape!r}.")
    for what, value in (*(("block_shape", b) for b in block_shape), ("run", run)):
        _power_of_two(what, value)
    block_rows, block_cols = block_shape
    if len(shape) >= 2 and 0 not in shape:
        while shape[-2] % block_rows:
            block_rows, block_cols = block_rows // 2, block_cols * 2
        if block_rows * min(block_cols, shape[-1]) >= min(_LEAST_BLOCK, block_shape[0] * block_shape[1]):
            return BlockGrid(shape, shape[-1], block_rows, block_cols, tiled=True)
    return BlockGrid(shape, run, 1, run, tiled=False)


def block_policy(
    block_shape: tuple[int, int] | None = (32, 32),
    run: int = 256,
    min_numel: int = 4096,
    exclude: str | Sequence[str] = (),
) -> Callable[[str, Tensor], Granularity | None]:
    """An ``orig_param_policy`` for ``fully_shard`` under which no block of these optimizers is cut.

    Pass what the optimizer gets. Parameters under ``min_numel`` elements, and those whose name in the module
    that is sharded matches a shell pattern of ``exclude``, stay element-wise.
    """

    patterns = name_patterns(exclude)

    def policy(name: str, param: Tensor) -> Granularity | None:
        if param.numel() < min_numel or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return None
        shape = None if block_shape is None else tuple(block_shape)
        return block_grid(tuple(param.shape), shape, run).granularity  # type: ignore[arg-type]

    return policy


@lru_cache(maxsize=4096)
def locate_blocks(
    grid: BlockGrid, mesh_shape: Shape, placements: tuple[Placement, ...]
) -> tuple[LocalBlocks | None, ...]:
    """The blocks on every rank of the mesh, in row-major order; None where a block is cut."""
    return tuple(
        _blocks_at(grid, mesh_shape, coordinate, placements)
        for coordinate in itertools.product(*map(range, mesh_shape))
    )


def whole_blocks(grid: BlockGrid) -> LocalBlocks:
    """The blocks of a parameter that is not distributed."""
    return _blocks_of(grid, (0,) * len(grid.shape), grid.shape, 0, grid.numel)  # type: ignore[return-value]


def _blocks_at(
    grid: BlockGrid, mesh_shape: Shape, coordinate: Shape, placements: tuple[Placement, ...]
) -> LocalBlocks | None:
    if grid.tile is not None:
        return _tiles_at(grid, mesh_shape, coordinate, placements)
    return _blocks_of(grid, *_piece_at(grid.shape, mesh_shape, coordinate, placements))


def _piece_at(
    shape: Shape, mesh_shape: Shape, coordinate: Shape, placements: tuple[Placement, ...]
) -> tuple[Shape, Shape, int, int]:
    """What the rank at ``coordinate`` holds: elements [start, stop) of a box, given by offset and size."""
    if ragged_mesh_dim(placements) is not None:
        layout = compute_layout(shape, mesh_shape, coordinate, placements)
        return layout.inner_offset, layout.inner_shape, layout.start, layout.stop
    offset, size = shard_box(shape, mesh_shape, coordinate, placements)
    return offset, size, 0, math.prod(size)


def _tiles_at(
    grid: BlockGrid, mesh_shape: Shape, coordinate: Shape, placements: tuple[Placement, ...]
) -> LocalBlocks | None:
    """The blocks of a parameter stored in tiles, as rows of the stored order."""
    assert grid.tile is not None
    _, size, start, stop = _piece_at(grid.shape, mesh_shape, coordinate, placements)
    cols = grid.block_cols
    if start == stop:
        return LocalBlocks(grid, 0, cols, 0, 0, 1, 0, 0)
    kinds, block = Tiles(*grid.tile).kinds(size), grid.block_rows * cols
    alike = kinds[0].tile_rows * kinds[0].tile_columns == block and (len(kinds) == 1) is grid.tiled
    if not alike or start % block or (stop % block and (grid.tiled or stop != grid.numel)):
        return None
    rows = math.prod(size) // cols
    outer = outer_index(mesh_shape, coordinate, placements)
    if outer and not grid.tiled:
        return None
    return LocalBlocks(grid, stop - start, cols, start // cols, outer * rows, rows + 1, 0, 0)


def _blocks_of(grid: BlockGrid, offset: Shape, size: Shape, start: int, stop: int) -> LocalBlocks | None:
    """The blocks in elements [start, stop) of the flattened box, or None if one is cut."""
    if start == stop:
        return LocalBlocks(grid, 0, grid.cols, 0, 0, 1, 0, 0)
    if not grid.tiled:
        if size[1:] != grid.shape[1:]:
            return None  # the box is not one stretch of the flattened parameter
        base = offset[0] * math.prod(grid.shape[1:]) if offset else 0
        first, end = base + start, base + stop
        if first % grid.cols or (end % grid.cols and end != grid.numel):
            return None
        return LocalBlocks(grid, stop - start, grid.cols, first // grid.cols, 0, grid.rows, 0, 0)
    cols, left = size[-1], offset[-1]
    if left % grid.block_cols or (cols % grid.block_cols and left + cols != grid.cols):
        return None
    step = grid.block_rows * cols
    if any(value % grid.block_rows for value in (size[-2], offset[-2])) or start % step or stop % step:
        return None
    if len(size) > 3 and size[1:-1] != grid.shape[1:-1]:
        return None
    outer = offset[0] if len(size) > 2 else 0
    matrix_rows = math.prod(grid.shape[1:-1]) if len(size) > 2 else grid.rows
    inner_rows = math.prod(size[1:-1]) if len(size) > 2 else grid.rows
    row_base = outer * matrix_rows + offset[-2]
    return LocalBlocks(grid, stop - start, cols, start // cols, row_base, inner_rows, matrix_rows, left)


@lru_cache(maxsize=4096)
def blocks_placements(
    grid: BlockGrid, mesh_shape: Shape, placements: tuple[Placement, ...]
) -> tuple[Placement, ...] | None:
    """Placements under which a tensor over the grid lies where its blocks do; None if there are none."""
    if grid.tile is not None:
        return _tiles_placements(grid, mesh_shape, placements)
    parts = [part for part in locate_blocks(grid, mesh_shape, placements) if part is not None]
    if len(parts) < math.prod(mesh_shape):
        return None
    rows, outer = range(len(grid.grid_shape) - 1), outer_mesh_dims(placements)
    candidates = [
        tuple(  # units are relative: rows of blocks divide like elements, and outer ones are rows of dim 0
            type(p)(rows, p.local_units) if isinstance(p, RaggedShard) and d not in outer else p
            for d, p in enumerate(placements)
        )
    ]
    cut = [d for d, p in enumerate(placements) if isinstance(p, (Shard, StridedShard, RaggedShard))]
    if len(cut) == 1:
        stride = math.prod(mesh_shape[cut[0] + 1 :])
        units = tuple(part.grid_rows for part in parts[: stride * mesh_shape[cut[0]] : stride])
        ragged = RaggedShard(rows, units if sum(units) else (1,) * len(units))
        candidates.append(tuple(ragged if d == cut[0] else p for d, p in enumerate(placements)))
    return next((c for c in candidates if _is_place_of(parts, grid.grid_shape, mesh_shape, c)), None)


def _is_place_of(
    parts: Sequence[LocalBlocks], shape: Shape, mesh_shape: Shape, candidate: tuple[Placement, ...]
) -> bool:
    """Whether ``candidate`` over a grid of this shape puts on every rank exactly its part of the blocks."""
    if any(isinstance(p, (Shard, StridedShard)) and p.dim >= len(shape) for p in candidate):
        return False
    region_at = regions_of(shape, mesh_shape, candidate)
    for coordinate, part in zip(itertools.product(*map(range, mesh_shape)), parts):
        try:
            region = region_at(coordinate)
        except ValueError:  # the grid cannot be cut like that
            return False
        if region_numel(region) != part.grid_rows * part.grid_cols:
            return False
        if part.numel:
            (*outer, col), row = region[0][0], 0  # of the first block
            for size, place in zip(shape, outer):
                row = row * size + place
            grid = part.grid
            if (row, col) != (part.source_row(0) // grid.block_rows, part.col_base // grid.block_cols):
                return False
    return True


def _tiles_placements(
    grid: BlockGrid, mesh_shape: Shape, placements: tuple[Placement, ...]
) -> tuple[Placement, ...] | None:
    """Placements over the grid of a parameter in tiles, which is stored column by column, as panels are."""
    mesh_dim = ragged_mesh_dim(placements)
    parts = locate_blocks(grid, mesh_shape, placements)
    if mesh_dim is None or None in parts:
        return None
    counts = [part.grid_rows if part is not None else 0 for part in parts]
    stride = math.prod(mesh_shape[mesh_dim + 1 :])
    units = tuple(counts[index * stride] for index in range(mesh_shape[mesh_dim]))
    if any(count != units[place // stride % mesh_shape[mesh_dim]] for place, count in enumerate(counts)):
        return None  # other outer shards have other units
    units = units if sum(units) else (1,) * len(units)
    if grid.tiled:
        kind: Any = type(placements[mesh_dim])
        ragged = kind(range(len(grid.shape)), units, (1, 1))
    elif outer_mesh_dims(placements):
        return None
    else:
        ragged = RaggedShard((0,), units)
    return tuple(ragged if d == mesh_dim else p for d, p in enumerate(placements))


def state_over_blocks(param: Tensor, grid: BlockGrid, local: Tensor) -> Tensor:
    """``local``, (blocks on this rank, *rest) values, laid out like the blocks of the parameter."""
    rest = tuple(local.shape[1:])
    if not isinstance(param, DTensor):
        return local.view(*grid.grid_shape, *rest)
    form = form_over_blocks(param, grid, None, rest)
    assert form.placements is not None  # require_whole_blocks has refused the others
    return wrap_state(param, local, form.shape, form.placements)


def form_over_blocks(
    param: Tensor, grid: BlockGrid, dtype: torch.dtype | None = None, rest: tuple[int, ...] = ()
) -> StateForm:
    """The form of state with ``rest`` values per block of a parameter.

    Several values for each tile of a parameter that is stored in tiles are a list of its blocks, as stored.
    """
    placements = None
    if isinstance(param, DTensor):
        placements = blocks_placements(grid, param.device_mesh.shape, param.placements)
    if grid.tile is None or not grid.tiled or not rest:
        return StateForm((*grid.grid_shape, *rest), placements, dtype)
    listed = (RaggedShard((0,), p.local_units) if isinstance(p, RaggedShard) else p for p in placements or ())
    return StateForm((math.prod(grid.grid_shape), *rest), tuple(listed), dtype)


def require_whole_blocks(name: str, param: Tensor, grid: BlockGrid) -> LocalBlocks:
    """The blocks on this rank; raises alike on every rank if the sharding cuts one anywhere."""
    if not isinstance(param, DTensor):
        return whole_blocks(grid)
    mesh_shape = param.device_mesh.shape
    parts = locate_blocks(grid, mesh_shape, param.placements)
    block = f"{grid.block_rows} x {grid.block_cols} blocks" if grid.tiled else f"runs of {grid.cols} elements"
    if None in parts:
        raise ValueError(
            f"{name}: the sharding {param.placements} of shape {grid.shape} cuts {block}; let the "
            f"orig_param_policy of fully_shard answer {grid.granularity} for it (block_policy does), or "
            "exclude the parameter."
        )
    if blocks_placements(grid, mesh_shape, param.placements) is None:
        raise ValueError(
            f"{name}: the {block} of shape {grid.shape} under {param.placements} are whole, but "
            f"no placement describes them; shard it with a granularity of {grid.granularity}, or exclude it."
        )
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name}: this rank is not in the parameter's mesh {param.device_mesh}.")
    index = 0
    for size, place in zip(mesh_shape, coordinate):
        index = index * size + place
    part = parts[index]
    assert part is not None
    return part


def to_blocks(flat: Tensor, blocks: LocalBlocks, fill: int = 0) -> Tensor:
    """The local elements as (count, block_numel), short blocks padded with ``fill``."""
    grid, rows = blocks.grid, blocks.rows
    matrix = F.pad(flat, (0, rows * blocks.cols - flat.numel()), value=fill).view(rows, blocks.cols)
    matrix = F.pad(matrix, (0, blocks.grid_cols * grid.block_cols - blocks.cols), value=fill)
    tiles = matrix.view(blocks.grid_rows, grid.block_rows, blocks.grid_cols, grid.block_cols)
    return tiles.transpose(1, 2).reshape(-1, grid.block_rows * grid.block_cols)


def from_blocks(tiles: Tensor, blocks: LocalBlocks) -> Tensor:
    """The inverse of :func:`to_blocks`: the flat local elements."""
    grid = blocks.grid
    matrix = tiles.view(blocks.grid_rows, blocks.grid_cols, grid.block_rows, grid.block_cols)
    matrix = matrix.transpose(1, 2).reshape(blocks.rows, blocks.grid_cols * grid.block_cols)
    return matrix[:, : blocks.cols].reshape(-1)[: blocks.numel]
