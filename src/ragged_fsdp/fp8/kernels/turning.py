# mypy: allow-untyped-defs
"""Kernels that turn matrices of codes, in rows or in tiles, or put tiles into rows.

Bytes become words in registers, and what goes through shared memory are words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragged_fsdp.fp8.groups import BLOCK

__all__ = ["transpose", "untile"]

_WARPS = 4


@triton.jit
def _turn_words(source, in_width, mask, out, out_width, turned_mask):
    """Words of four rows by words of columns, turned byte by byte; pointers to the first row of each four."""
    a = tl.load(source, mask=mask, other=0)
    b = tl.load(source + in_width, mask=mask, other=0)
    c = tl.load(source + 2 * in_width, mask=mask, other=0)
    d = tl.load(source + 3 * in_width, mask=mask, other=0)
    for byte in tl.static_range(4):
        word = ((a >> (8 * byte)) & 0xFF) | (((b >> (8 * byte)) & 0xFF) << 8)
        word = word | (((c >> (8 * byte)) & 0xFF) << 16) | (((d >> (8 * byte)) & 0xFF) << 24)
        tl.store(out + byte * out_width, tl.trans(word), mask=turned_mask)


@triton.jit
def transpose_kernel(words_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``ROWS`` by ``COLUMNS`` bytes of one matrix, turned; both sizes of the matrix are multiples of 4."""
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    in_width, out_width = columns // 4, rows // 4  # in words
    row = tl.program_id(1) * (ROWS // 4) + tl.arange(0, ROWS // 4)  # of words turned: four rows each
    column = tl.program_id(0) * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
    _turn_words(
        words_ptr + matrix // 4 + (row.to(tl.int64) * 4 * in_width)[:, None] + column[None, :],
        in_width,
        (row < out_width)[:, None] & (column < in_width)[None, :],
        out_ptr + matrix // 4 + (column.to(tl.int64) * 4 * out_width)[:, None] + row[None, :],
        out_width,
        (column < in_width)[:, None] & (row < out_width)[None, :],
    )


@triton.jit
def untile_kernel(
    words_ptr,
    out_ptr,
    matrices,
    rows,
    columns,
    TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of bytes from the order of tiles to its rows and columns, or to its columns and rows."""
    tile_row, tile_column, matrix = tl.program_id(1), tl.program_id(0), tl.program_id(2).to(tl.int64)
    whole_rows, whole_columns = rows // ROWS * ROWS, columns // COLUMNS * COLUMNS
    first_row, first_column = tile_row * ROWS, tile_column * COLUMNS
    is_low, is_right = first_row >= whole_rows, first_column >= whole_columns
    # sizes of tiles lie behind each other: whole ones, right edge, lower edge, corner
    # in 64 bits: a matrix may have 2^31 elements
    part_rows = tl.where(is_low, rows - whole_rows, whole_rows).to(tl.int64)
    width = tl.where(is_right, columns - whole_columns, COLUMNS)
    above, left = tl.cast(whole_rows, tl.int64) * columns, part_rows * whole_columns
    start = tl.where(is_low, above, 0) + tl.where(is_right, left, tile_column * COLUMNS * part_rows)
    start *= matrices
    start += (matrix * part_rows + tl.where(is_low, 0, first_row)) * width
    height = tl.minimum(rows - first_row, ROWS)
    source, target = words_ptr + start // 4, out_ptr + matrix * rows * columns // 4
    in_width = width // 4  # in words
    column = tl.arange(0, COLUMNS // 4)
    if TURNED:
        row, out_width = tl.arange(0, ROWS // 4), rows // 4
        mask = (row < height // 4)[:, None] & (column < in_width)[None, :]
        out = target + ((first_column // 4 + column).to(tl.int64) * 4 * out_width)[:, None]
        _turn_words(
            source + (row * 4 * in_width)[:, None] + column[None, :],
            in_width,
            mask,
            out + (first_row // 4 + row)[None, :],
            out_width,
            (column < in_width)[:, None] & (row < height // 4)[None, :],
        )
    else:
        row = tl.arange(0, ROWS)
        mask = (row < height)[:, None] & (column < in_width)[None, :]
        words = tl.load(source + (row * in_width)[:, None] + column[None, :], mask=mask, other=0)
        out = target + ((first_row + row).to(tl.int64) * (columns // 4))[:, None]
        tl.store(out + (first_column // 4 + column)[None, :], words, mask=mask)


def transpose(codes: Tensor) -> Tensor:
    """Matrices (E, N, K) of codes as (E, K, N)."""
    matrices, rows, columns = codes.shape
    out = codes.new_empty((matrices, columns, rows))
    if codes.numel():
        grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK), matrices)
        source, target = codes.view(torch.int32), out.view(torch.int32)
        transpose_kernel[grid](source, target, rows, columns, BLOCK, BLOCK, num_warps=_WARPS)
    return out


def untile(codes: Tensor, shape: Sequence[int], turned: bool) -> Tensor:
    """Matrices of ``shape`` (E, N, K) whose codes lie flat in the order of their tiles; turned (E, K, N)."""
    matrices, rows, columns = shape
    out = codes.new_empty((matrices, columns, rows) if turned else (matrices, rows, columns))
    if codes.numel():
        grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK), matrices)
        source, target = codes.view(torch.int32), out.view(torch.int32)
        untile_kernel[grid](source, target, matrices, rows, columns, turned, BLOCK, BLOCK, num_warps=_WARPS)
    return out
