"""Rows that are grouped by expert, cut into tiles: which group and rows a tile has, known on the device.

A tile never holds rows of two groups. How many tiles there are is only known on the device; the table has
room for the most there can be, one per full tile of rows and one more per group, and names no rows in the
tiles that are left over.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BLOCK", "Groups", "columns_of", "empty_quantized", "groups_of", "one_group"]

BLOCK = 128
"""Elements that share a scale: along the contracted dim, and for weights along the other too."""


class Groups(NamedTuple):
    """Tiles of at most 128 rows of one group each."""

    table: Tensor
    """(3, tiles) of int32: the group of a tile, its first row, and the row behind the group's last."""
    starts: Tensor
    """(groups + 1,) of int32: the first tile of each group, and the one behind the last."""

    @property
    def size(self) -> int:
        """How many groups there are."""
        return len(self.starts) - 1

    @property
    def tiles(self) -> int:
        """Entries of the table."""
        return self.table.shape[1]


def groups_of(counts: Tensor, rows: int) -> Groups:
    """``counts[i]`` rows of the i-th group, behind each other; what of ``rows`` is left belongs to none."""
    tiles = rows // BLOCK + len(counts) if rows else 0
    counts = counts.to(torch.int32)
    ends = counts.cumsum(0, dtype=torch.int32)
    per_group = (counts + (BLOCK - 1)).div(BLOCK, rounding_mode="floor")
    starts = torch.nn.functional.pad(per_group.cumsum(0, dtype=torch.int32), (1, 0))
    tile = torch.arange(tiles, device=counts.device, dtype=torch.int32)
    group = torch.searchsorted(starts[1:], tile, right=True, out_int32=True)
    known = group.clamp(max=len(counts) - 1)
    first = (ends - counts)[known] + (tile - starts[known]) * BLOCK
    # a tile that is left over has no rows: its first is made the end of the last group
    first = torch.where(group < len(counts), first, ends[known])
    return Groups(torch.stack((known, first, ends[known])), starts)


@lru_cache(maxsize=64)
def one_group(rows: int, device: torch.device) -> Groups:
    """All rows in one group: a linear layer."""
    tiles = -(-rows // BLOCK)
    first = torch.arange(tiles, dtype=torch.int32, device=device) * BLOCK
    table = torch.stack((torch.zeros_like(first), first, torch.full_like(first, rows)))
    return Groups(table, torch.tensor([0, tiles], dtype=torch.int32, device=device))


def _empty_turned(like: Tensor, tiles: int, columns: int, groups: int) -> Tensor:
    """Room for codes turned, (tiles, columns, 128): the columns of a tile, each with its 128 rows.

    Of several groups a tile is one run, which a group's product reads; of one group a column is, over all
    tiles, as ``scaled_mm`` wants it.
    """
    if groups > 1:
        return like.new_empty((tiles, columns, BLOCK), dtype=torch.float8_e4m3fn)
    whole = like.new_empty((columns, tiles * BLOCK), dtype=torch.float8_e4m3fn)
    return whole.view(columns, tiles, BLOCK).transpose(0, 1)


def empty_quantized(
    values: Tensor, tiles: int, groups: int, rowwise: bool, turned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for what quantising gives of rows (R, K), cut into so many tiles: nothing of what is not wanted.

    Codes (R, K), scales (blocks of K, R), codes turned (tiles, K, 128), their scales (tiles, K).
    """
    rows, columns = values.shape
    blocks = (columns + BLOCK - 1) // BLOCK
    high = tiles if turned else 0
    return (
        values.new_empty((rows, columns) if rowwise else (0, columns), dtype=torch.float8_e4m3fn),
        values.new_empty((blocks, rows) if rowwise else (0, rows), dtype=torch.float32),
        _empty_turned(values, high, columns, groups),
        values.new_empty((high, columns), dtype=torch.float32),
    )


def columns_of(weight: Tensor, scales: Tensor, inner: int, turned: bool) -> int:
    """Columns N of a product with ``weight``; ``scales`` are E.

    It is (E, N, K), or (E, K, N) if turned, or flat in the order of its tiles.
    """
    if weight.dim() == 3:
        return weight.shape[2 if turned else 1]
    return weight.numel() // max(1, scales.shape[0] * inner)
