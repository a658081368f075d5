# mypy: allow-untyped-defs
"""Kernels that quantise rows in both orientations, and make the table of the groups' tiles.

A program reads a tile of 128 rows and 128 columns and writes it twice: as it lies with a scale for
each row, and turned, with a scale for each column. The turned tiles of a group lie behind each other, so a
group begins at a multiple of 128 there, and what is behind its last row are zeros.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragged_fsdp.block_codes import LARGEST, SMALLEST_SCALE
from ragged_fsdp.fp8.groups import BLOCK, Groups, empty_quantized
from ragged_fsdp.fsdp.gather.codes_triton import nearest_float8

__all__ = ["groups_of", "quantize"]

_QUANTIZE_WARPS, _QUANTIZE_REGISTERS = 8, 64

_BLOCK = tl.constexpr(BLOCK)
_LARGEST, _SMALLEST = tl.constexpr(LARGEST["float8_e4m3fn"]), tl.constexpr(SMALLEST_SCALE)
_INFINITY = tl.constexpr(0x7F800000)
# Codes come in whole words of which every bit is written. Triton's own cast makes pairs: where one of them
# was widened to a word, LLVM (Triton 3.6) left the upper half undefined, ptxas (12.8) put another register
# there, and turned codes had its bits. The instruction saturates, and a nan stays one.
_FOUR_CODES = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)
_TWO_CODES = tl.constexpr("{ .reg .b16 two; cvt.rn.satfinite.e4m3x2.f32 two, $2, $1; cvt.u32.u16 $0, two; }")


@triton.jit
def _scale_and_inverse(largest):
    """The scale of a block and what values are multiplied by, from the largest magnitude as an integer.

    No part of a usable scale's reciprocal is denormal, so one step after the approximation rounds it right.
    """
    scale = largest.to(tl.float32, bitcast=True) * (1.0 / _LARGEST)
    near = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], tl.float32, True, 1)
    inverse = tl.fma(near, tl.fma(-scale, near, 1.0), near)
    unusable = scale <= _SMALLEST
    scale = tl.where(scale == float("inf"), float("nan"), scale)
    return tl.where(unusable, 0.0, scale), tl.where(unusable, 0.0, inverse)


@triton.jit
def _emulated(normal):
    return nearest_float8(tl.clamp(normal, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _codes(values, inverse, HARDWARE: tl.constexpr):
    """Codes of values, four at once."""
    normal = values * inverse
    if HARDWARE:
        return tl.inline_asm_elementwise(_FOUR_CODES, "=r,f,f,f,f", [normal], tl.uint8, True, 4)
    return _emulated(normal)


@triton.jit
def _code_pairs(low, high, inverse, HARDWARE: tl.constexpr):
    """Words of two codes, that of ``low`` in the lowest byte."""
    low, high = low * inverse, high * inverse
    if HARDWARE:
        return tl.inline_asm_elementwise(_TWO_CODES, "=r,f,f", [low, high], tl.int32, True, 1)
    return _emulated(low).to(tl.int32) | (_emulated(high).to(tl.int32) << 8)


@triton.jit
def _every_fourth(values_ptr, first, end, column, columns, offset):
    """Every fourth row of a tile of 128, from ``first + offset`` on: which, their mask, places, values."""
    row = first + offset + tl.arange(0, _BLOCK // 4) * 4
    mask = (row < end)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    return row, mask, place, tl.load(values_ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def quantize_kernel(
    values_ptr,  # (rows, columns)
    codes_ptr,  # (rows, columns)
    scales_ptr,  # (column blocks, rows)
    turned_ptr,  # (tiles, columns, 32) words of four codes
    turned_scales_ptr,  # (tiles, columns)
    table_ptr,  # (3, tiles): group, first row, behind the last row
    seen_ptr,  # becomes one where a block is not finite
    rows,
    columns,
    tiles,
    tile_words,  # from a tile to the next, and from a column to the next
    column_words,
    ROWWISE: tl.constexpr,
    TURNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    NOTES: tl.constexpr,
):
    """One tile of 128 rows of a group and 128 columns, in both orientations.

    Rows are read in four parts, every fourth row in each, so that four codes of a column make a word: through
    shared memory, where the tile is turned, go words. Between the orientations only the largest magnitudes of
    columns stay in registers; the second reads the tile again, from the cache.
    """
    tile, block = tl.program_id(1), tl.program_id(0)
    first, end = tl.load(table_ptr + tiles + tile), tl.load(table_ptr + 2 * tiles + tile)
    if first >= end:
        return
    column = block * _BLOCK + tl.arange(0, _BLOCK)
    largest = tl.zeros((_BLOCK // 4, _BLOCK), tl.int32)
    for part in tl.static_range(4):
        row, mask, place, values = _every_fourth(values_ptr, first, end, column, columns, part)
        magnitudes = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # a nan outranks every number
        largest = tl.maximum(largest, magnitudes)
        if ROWWISE:
            scale, inverse = _scale_and_inverse(tl.max(magnitudes, axis=1))
            tl.store(scales_ptr + block.to(tl.int64) * rows + row, scale, mask=row < end)
            tl.store(codes_ptr + place, _codes(values, inverse[:, None], HARDWARE), mask=mask)
    largest = tl.max(largest, axis=0)
    if TURNED:
        scale, inverse = _scale_and_inverse(largest)
        tl.store(turned_scales_ptr + tile.to(tl.int64) * columns + column, scale, mask=column < columns)
        word = tl.zeros((_BLOCK // 4, _BLOCK), tl.int32)
        for part in tl.static_range(0, 4, 2):
            _, _, _, low = _every_fourth(values_ptr, first, end, column, columns, part)
            _, _, _, high = _every_fourth(values_ptr, first, end, column, columns, part + 1)
            word |= _code_pairs(low, high, inverse[None, :], HARDWARE) << (8 * part)
        out = turned_ptr + tile.to(tl.int64) * tile_words + tl.arange(0, _BLOCK // 4)[None, :]
        out += column.to(tl.int64)[:, None] * column_words
        tl.store(out, tl.trans(word), mask=(column < columns)[:, None])
    if NOTES:  # noqa: SIM102  (known when it is compiled, unlike the other)
        if tl.max(largest, axis=0) >= _INFINITY:
            tl.store(seen_ptr, 1)


@triton.jit
def groups_kernel(counts_ptr, table_ptr, starts_ptr, groups, tiles, GROUPS: tl.constexpr):
    """One tile of the table, found among all groups; the first program also writes where groups start."""
    tile, group = tl.program_id(0), tl.arange(0, GROUPS)
    counts = tl.load(counts_ptr + group, mask=group < groups, other=0).to(tl.int32)
    tile_ends, row_ends = tl.cumsum((counts + _BLOCK - 1) // _BLOCK, axis=0), tl.cumsum(counts, axis=0)
    own = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    known = tl.minimum(own, groups - 1)
    here = group == known
    end = tl.sum(tl.where(here, row_ends, 0), axis=0)
    count = tl.sum(tl.where(here, counts, 0), axis=0)
    start = tl.sum(tl.where(here, tile_ends, 0), axis=0) - (count + _BLOCK - 1) // _BLOCK
    first = tl.where(own < groups, end - count + (tile - start) * _BLOCK, end)
    tl.store(table_ptr + tile, known)
    tl.store(table_ptr + tiles + tile, first)
    tl.store(table_ptr + 2 * tiles + tile, end)
    if tile == 0:
        tl.store(starts_ptr, 0)
        tl.store(starts_ptr + 1 + group, tile_ends, mask=group < groups)


def quantize(
    values: Tensor, groups: Groups, seen: Tensor | None, *, rowwise: bool = True, turned: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The codes and scales of ``emulation.quantize``, in one kernel."""
    rows, columns = values.shape
    tiles = groups.tiles
    made = empty_quantized(values, tiles, groups.size, rowwise, turned)
    codes, scales, turned_codes, turned_scales = made
    if tiles and columns:
        quantize_kernel[(triton.cdiv(columns, BLOCK), tiles)](
            values.contiguous(),
            codes.view(torch.uint8),
            scales,
            turned_codes.view(torch.int32) if turned else turned_scales,
            turned_scales,
            groups.table,
            groups.table if seen is None else seen,
            rows,
            columns,
            tiles,
            turned_codes.stride(0) // 4,
            turned_codes.stride(1) // 4,
            rowwise,
            turned,
            values.is_cuda,
            seen is not None,
            num_warps=_QUANTIZE_WARPS,
            maxnreg=_QUANTIZE_REGISTERS,
            enable_fp_fusion=False,
        )
    return made


def groups_of(counts: Tensor, rows: int) -> Groups:
    """The groups of ``groups.groups_of``, in one kernel."""
    size = len(counts)
    tiles = rows // BLOCK + size if rows else 0
    table = counts.new_empty((3, tiles), dtype=torch.int32)
    starts = counts.new_zeros(size + 1, dtype=torch.int32)
    if tiles:
        groups_kernel[(tiles,)](counts, table, starts, size, tiles, triton.next_power_of_2(size))
    return Groups(table, starts)
