"""Granularity of a parameter: how much of it must stay together on one rank.

A policy answers one question: how many elements make one block of a tensor of a given shape.
It is torch-free and hashable, so that every rank computes the same plan from it. :class:`BlockCodes` says
what of a parameter travels.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BlockCodes", "Elements", "Granularity", "Rows", "Whole", "parse_codes", "parse_granularity"]


def _positive(kind: str, count: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{kind}: count must be an int, got {count!r}.")
    if count < 1:
        raise ValueError(f"{kind}: count must be at least 1, got {count}.")


@dataclass(frozen=True)
class Elements:
    """Blocks of ``count`` consecutive elements of the flattened tensor.

    ``Elements(256)`` keeps runs of 256 elements together, as block-wise quantised vectors need. The count
    must divide the tensor's elements; ``fully_shard`` raises and names the parameter otherwise.
    """

    count: int = 1

    def __post_init__(self) -> None:
        _positive("Elements", self.count)

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
        _positive("Rows", self.count)

    def block_numel(self, shape: Sequence[int]) -> int:
        """Elements in one block of a tensor of ``shape``."""
        return self.count * (shape[-1] if len(shape) > 1 else 1)


@dataclass(frozen=True)
class Whole:
    """The whole tensor is one block: it lives on a single rank, as a matrix optimizer likes it."""

    def block_numel(self, shape: Sequence[int]) -> int:
        """Elements in one block of a tensor of ``shape``."""
        return max(1, math.prod(shape))


Granularity = Elements | Rows | Whole

_CODES = ("int8", "float8_e4m3fn")


@dataclass(frozen=True)
class BlockCodes:
    """A parameter travels, and is computed with, as one byte per element and one fp32 scale per tile.

    Tiles of ``block_shape`` cover the last two dims, which they must divide. No tile is cut by sharding, so a
    rank encodes what it holds without asking the others.
    """

    dtype: str = "int8"
    """``int8``: the tile's largest magnitude is 127; ``float8_e4m3fn``: it is 448."""
    block_shape: tuple[int, int] = (128, 128)

    def __post_init__(self) -> None:
        if self.dtype not in _CODES:
            raise ValueError(f"BlockCodes: dtype must be one of {_CODES}, got {self.dtype!r}.")
        if not isinstance(self.block_shape, tuple) or len(self.block_shape) != 2:
            raise ValueError(f"BlockCodes: block_shape must be (rows, columns), got {self.block_shape!r}.")
        for count in self.block_shape:
            _positive("BlockCodes", count)

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
        """The granularity that keeps every tile on one rank: whole rows of tiles."""
        return Rows(self.block_shape[0])


_TEXT = re.compile(r"(?P<before>\d*)(?P<unit>rows?|elements?|whole)(?::(?P<after>\d+))?")


def parse_granularity(text: str) -> Granularity:
    """A granularity as commands and settings write it: ``32rows`` or ``rows:32``, ``256elements``, ``whole``.

    Raises:
        ValueError: for any other text, with what was expected.
    """
    match = _TEXT.fullmatch(text)
    counts = [count for count in (match["before"], match["after"]) if count] if match else []
    if (
        match is None
        or len(counts) > 1
        or (match["unit"] == "whole" and counts)
        or (counts and not int(counts[0]))
    ):
        raise ValueError(
            f"granularity {text!r}: expected 32rows or rows:32, 256elements or elements:256, or whole."
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
