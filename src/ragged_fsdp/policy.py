"""Granularity of a parameter: how much of it must stay together on one rank.

A policy answers one question: how many elements make one block of a tensor of a given shape.
It is torch-free and hashable, so that every rank computes the same plan from it. :class:`Tiles` also says in
which order the elements lie, :class:`BlockCodes` what of a parameter travels.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

__all__ = [
    "BlockCodes",
    "Elements",
    "Granularity",
    "Rows",
    "TileKind",
    "Tiles",
    "Whole",
    "parse_codes",
    "parse_granularity",
]


def _positive(what: str, count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{what} must be an int, got {count!r}.")
    if count < 1:
        raise ValueError(f"{what} must be at least 1, got {count}.")


@dataclass(frozen=True)
class Elements:
    """Blocks of ``count`` consecutive elements of the flattened tensor.

    ``Elements(256)`` keeps runs of 256 elements together, as block-wise quantised vectors need. The count
    must divide the tensor's elements; ``fully_shard`` raises and names the parameter otherwise.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _positive("Elements: count", self.count)

    def block_numel(self, shape: Sequence[int]) -> int:
        """Elements in one block of a tensor of ``shape``."""
        return self.count


@dataclass(frozen=True)
class Rows:
    """Blocks of ``count`` consecutive rows; a row is one index of all dims but the last.

    ``Rows(32)`` on a matrix keeps tiles of 32 rows together; on experts stacked as ``(experts, rows,
    columns)``, ``Rows(rows)`` keeps each expert whole. The count must divide the tensor's rows.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _positive("Rows: count", self.count)

    def block_numel(self, shape: Sequence[int]) -> int:
        """Elements in one block of a tensor of ``shape``."""
        return self.count * (shape[-1] if len(shape) > 1 else 1)


@dataclass(frozen=True)
class Whole:
    """The whole tensor is one block: it lives on a single rank, as a matrix optimizer likes it."""

    def block_numel(self, shape: Sequence[int]) -> int:
        """Elements in one block of a tensor of ``shape``."""
        return max(1, math.prod(shape))


@dataclass(frozen=True)
class TileKind:
    """The tiles of one size of a tensor: a part of its rows and columns, stored as column panels.

    A panel is ``tile_columns`` wide and as high as the part, over all leading dims; it is contiguous and
    row-major, so each tile is a run of it.
    """

    start: int
    """Where the first of them begins in the stored order."""
    numel: int
    first_row: int
    rows: int
    first_column: int
    columns: int
    tile_rows: int
    tile_columns: int

    @property
    def tile_numel(self) -> int:
        """Elements of a tile."""
        return self.tile_rows * self.tile_columns

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """The first of these tiles in the stored elements [start, stop), and how many of them there are."""
        first, last = max(start, self.start), min(stop, self.start + self.numel)
        return (first - self.start) // self.tile_numel, max(0, last - first) // self.tile_numel


@dataclass(frozen=True)
class Tiles:
    """Tiles of ``rows`` x ``columns`` over the last two dims, each stored as one run: no tile is cut.

    The elements lie in another order than row-major, a permutation of them: column panels as wide as a
    tile, one after the other. Where the tile does not divide a dim the edge has smaller tiles, which come
    last::

        (5, 5) in tiles of 2 x 2       a a c c e
                                       a a c c e       stored: aaaa bbbb | cccc dddd | ee EE | ff | gg | h
                                       b b d d E
                                       b b d d E
                                       f f g g h

    Leading dims, such as those of fused experts, are a part of a panel: its rows are those of all matrices.
    """

    rows: int = 128
    columns: int = 128

    def __post_init__(self) -> None:
        _positive("Tiles: rows", self.rows)
        _positive("Tiles: columns", self.columns)

    def kinds(self, shape: Sequence[int]) -> tuple[TileKind, ...]:
        """The tiles of a tensor by size, in the stored order: whole ones, right edge, lower edge, corner."""
        return _tile_kinds(self, tuple(shape))

    def panels(self, shape: Sequence[int]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """The stored order of a tensor as boxes (offsets, sizes), one behind the other, each row-major."""
        lead = tuple(shape[:-2])
        return tuple(
            ((*(0,) * len(lead), kind.first_row, column), (*lead, kind.rows, kind.tile_columns))
            for kind in self.kinds(shape)
            for column in range(kind.first_column, kind.first_column + kind.columns, kind.tile_columns)
        )

    def block_numel(self, shape: Sequence[int]) -> int:
        """Elements in one block of a tensor of ``shape``: no multiple of it falls inside a tile.

        That is a tile where the smaller tiles of the edges fill whole ones; otherwise some tiles, so many
        that all edges lie in the last block, which may be shorter than the others.
        """
        return _tiled_block(self, tuple(shape))


@lru_cache(maxsize=4096)
def _tile_kinds(tiles: Tiles, shape: tuple[int, ...]) -> tuple[TileKind, ...]:
    if len(shape) < 2:
        raise ValueError(f"{tiles}: tiles need a tensor of two dims or more, got shape {shape}.")
    if not math.prod(shape):
        return ()
    parts = []
    for size, tile in zip(shape[-2:], (tiles.rows, tiles.columns)):
        tile = min(tile, size)
        whole = size // tile * tile
        parts.append([part for part in ((0, whole, tile), (whole, size - whole, size - whole)) if part[1]])
    kinds: list[TileKind] = []
    start = 0
    for first_row, rows, tile_rows in parts[0]:
        for first_column, columns, tile_columns in parts[1]:
            numel = math.prod(shape[:-2]) * rows * columns
            kind = TileKind(start, numel, first_row, rows, first_column, columns, tile_rows, tile_columns)
            kinds.append(kind)
            start += numel
    return tuple(kinds)


@lru_cache(maxsize=4096)
def _tiled_block(tiles: Tiles, shape: tuple[int, ...]) -> int:
    kinds = _tile_kinds(tiles, shape)
    if not kinds:
        return 1
    tile, whole, numel = kinds[0].tile_numel, kinds[0].numel, math.prod(shape)

    def cut(kind: TileKind) -> bool:
        """Whether a multiple of a whole tile may fall inside one of these."""
        inside_one = kind.start // tile == (kind.start + kind.numel - 1) // tile
        return not inside_one and bool(tile % kind.tile_numel or kind.start % kind.tile_numel)

    if not any(cut(kind) for kind in kinds):
        return tile
    count = whole // tile
    together = (k for k in range(1, count + 1) if count % k == 0 and k * tile >= numel - whole)
    return next(together, 0) * tile or numel


Granularity = Elements | Rows | Whole | Tiles

_CODES = ("int8", "float8_e4m3fn")


@dataclass(frozen=True)
class BlockCodes:
    """A parameter travels, and is computed with, as one byte per element and one fp32 scale per tile.

    Tiles of ``block_shape`` cover the last two dims, which they must divide, unless the parameter is stored
    in these :class:`Tiles`. No tile is cut by sharding, so a rank encodes what it holds without asking the
    others.
    """

    dtype: str = "int8"
    """``int8``: the tile's largest magnitude is 127; ``float8_e4m3fn``: it is 448."""
    block_shape: tuple[int, int] = (128, 128)
    decoded: bool = True
    """Whether the computation gets values; if not, FP8 products (``ragged_fsdp.fp8``) read the codes."""

    def __post_init__(self) -> None:
        if not self.decoded and (self.dtype, self.block_shape) != ("float8_e4m3fn", (128, 128)):
            raise ValueError(
                "BlockCodes: FP8 products compute with float8_e4m3fn codes of 128 x 128, got "
                f"{self.dtype!r} of {self.block_shape}."
            )
        if self.dtype not in _CODES:
            raise ValueError(f"BlockCodes: dtype must be one of {_CODES}, got {self.dtype!r}.")
        if not isinstance(self.block_shape, tuple) or len(self.block_shape) != 2:
            raise ValueError(f"BlockCodes: block_shape must be (rows, columns), got {self.block_shape!r}.")
        for count in self.block_shape:
            _positive("BlockCodes: a size of block_shape", count)

    def check(self, shape: Sequence[int]) -> None:
        """Raise unless tiles cover a tensor of ``shape``."""
        if len(shape) < 2 or any(size % tile for size, tile in zip(shape[-2:], self.block_shape)):
            rows, columns = self.block_shape
            raise ValueError(
                f"tiles of {rows} x {columns} do not cover shape {tuple(shape)}; use tiles that divide "
                "the last two dims."
            )

    @property
    def granularity(self) -> Rows:
        """The granularity that keeps every tile of a row-major parameter on one rank: whole rows of tiles."""
        return Rows(self.block_shape[0])


_TEXT = re.compile(r"(?P<before>\d*)(?P<unit>rows?|elements?|whole)(?::(?P<after>\d+))?")
_TILES_TEXT = re.compile(r"tiles(?::(?P<rows>\d+)x(?P<columns>\d+))?")


def parse_granularity(text: str) -> Granularity:
    """A granularity as text: ``32rows`` or ``rows:32``, ``256elements``, ``tiles:128x128``, ``whole``.

    Raises:
        ValueError: for any other text, with what was expected.
    """
    tiles = _TILES_TEXT.fullmatch(text)
    if tiles is not None and "0" not in (tiles["rows"], tiles["columns"]):
        return Tiles(int(tiles["rows"] or 128), int(tiles["columns"] or 128))
    match = _TEXT.fullmatch(text)
    counts = [count for count in (match["before"], match["after"]) if count] if match else []
    if (
        match is None
        or len(counts) > 1
        or (match["unit"] == "whole" and counts)
        or (counts and not int(counts[0]))
    ):
        raise ValueError(
            f"granularity {text!r}: expected 32rows or rows:32, 256elements or elements:256, tiles:128x128, "
            "or whole."
        )
    if match["unit"] == "whole":
        return Whole()
    return (Rows if match["unit"].startswith("row") else Elements)(int(counts[0]) if counts else 1)


_CODES_TEXT = re.compile(r"(?P<dtype>\w+?)(?::(?P<rows>\d+)x(?P<columns>\d+))?")


def parse_codes(text: str) -> BlockCodes:
    """Codes as settings write them: ``int8``, ``int8:64x64``, ``float8_e4m3fn:128x128``.

    Raises:
        ValueError: for any other text, with what was expected.
    """
    match = _CODES_TEXT.fullmatch(text)
    if match is None or match["dtype"] not in _CODES or "0" in (match["rows"], match["columns"]):
        raise ValueError(f"codes {text!r}: expected one of {_CODES}, and a tile such as int8:64x64.")
    tile = (int(match["rows"]), int(match["columns"])) if match["rows"] else (128, 128)
    return BlockCodes(match["dtype"], tile)
