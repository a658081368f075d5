# mypy: allow-untyped-defs
"""Triton kernels of the FP8 products: quantising in both orientations, transposing codes, grouped products.

All work on rows that are grouped by expert, in tiles that a table names
(:class:`~ragged_fsdp.fp8.groups.Groups`); a linear layer is one group. None asks the device for the sizes
of the groups.

*Quantising* reads a tile of 128 rows and 128 columns and writes it twice: as it lies with a scale for
each row, and turned, with a scale for each column. The turned tiles of a group lie behind each other, so a
group begins at a multiple of 128 there, and what is behind its last row are zeros.

*Products* take one block of 128 of the contracted dim at a time: the tensor cores add it up, then it is
scaled and added to an fp32 sum in registers. Their additions inside a block keep fewer bits than fp32; that
is all that sets the results apart from ``emulation``.

A matrix whose contracted dim comes first is turned on the way to the tensor cores (*lying*), or as a whole
before (*transposing*): either way bytes become words in registers, and what goes through shared memory are
words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ragged_fsdp.block_codes import LARGEST, SMALLEST_SCALE
from ragged_fsdp.fp8.groups import BLOCK, Groups, columns_of, empty_turned
from ragged_fsdp.fsdp.gather.codes_triton import nearest_float8

__all__ = [
    "LYING_PRODUCT",
    "PRODUCT",
    "WEIGHT_GRADIENT",
    "Config",
    "groups_of",
    "lying_product",
    "product",
    "quantize",
    "transpose",
    "untile",
    "weight_gradient",
]


class Config(NamedTuple):
    """How a product is cut and run."""

    rows: int
    """Of a program's tile of the output."""
    columns: int
    warps: int
    stages: int
    """Blocks of the contracted dim that are loaded ahead."""
    parts: int = 1
    """Tiles beside each other that a program computes: they share its rows."""
    each: int = 16
    """Groups whose gradients a program computes."""
    registers: int = 0
    """The most of a thread; 0 leaves it to the compiler."""
    together: int = 8
    """Tiles of rows that share columns while those are in the cache."""


PRODUCT = Config(64, 128, 4, 3)
LYING_PRODUCT = Config(64, 128, 4, 3)
WEIGHT_GRADIENT = Config(64, 128, 4, 3, together=16)
_QUANTIZE_WARPS, _QUANTIZE_REGISTERS = 8, 64
_TURN_ROWS, _TURN_COLUMNS, _TURN_WARPS = 128, 128, 4

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


@triton.jit
def product_kernel(
    a_desc,  # (rows, inner) codes
    b_desc,  # codes: (groups * columns, inner), or panels (panels * groups * columns, 128)
    edge_desc,  # the last panel, narrower than the others: (groups * columns, inner % 128)
    c_ptr,  # (rows, columns of the matrix)
    a_scales_ptr,  # (inner blocks, rows)
    b_scales_ptr,  # (groups, column blocks, inner blocks)
    table_ptr,  # (3, tiles of 128 rows)
    rows,
    columns,
    inner,
    low,  # the columns from low to high are computed, and are those that b_desc has
    high,
    panel_rows,
    tiles,  # of ROWS rows
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    PANELS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Rows of a group times its matrix, transposed: ``ROWS`` by ``PARTS`` times ``COLUMNS``.

    A matrix in the order of tiles is read as it lies: a block of its contracted dim is a panel.
    """
    program = tl.program_id(0)
    column_tiles = tl.cdiv(high - low, COLUMNS * PARTS)
    band = program // (TOGETHER * column_tiles)
    height = tl.minimum(tiles - band * TOGETHER, TOGETHER)
    tile = band * TOGETHER + (program % (TOGETHER * column_tiles)) % height
    first_column = low + (program % (TOGETHER * column_tiles)) // height * (COLUMNS * PARTS)
    entries: tl.constexpr = _BLOCK // ROWS  # tiles of a row of the table
    entry = table_ptr + tile // entries
    group = tl.load(entry)
    first = tl.load(entry + tiles // entries) + tile % entries * ROWS
    end = tl.load(entry + 2 * (tiles // entries))
    if first >= end:
        return
    blocks = tl.cdiv(inner, _BLOCK)
    row = first + tl.arange(0, ROWS)
    in_group = row < end
    b_row = group * (high - low) + first_column - low
    b_scale = b_scales_ptr + (group * tl.cdiv(columns, _BLOCK) + first_column // _BLOCK) * blocks
    # a tile behind the last column has no scale of its own: it reads another, and its sums are not stored
    b_next = tl.where(first_column + COLUMNS < high, COLUMNS // _BLOCK * blocks, 0)
    a_scales = a_scales_ptr + row
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if PARTS == 2:
        more = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.range(0, inner // _BLOCK if EDGE else blocks, num_stages=STAGES):
        a = a_desc.load([first, block * _BLOCK])
        b_block = b_row + block * panel_rows if PANELS else b_row
        b_inner = 0 if PANELS else block * _BLOCK
        a_scale = tl.load(a_scales, mask=in_group, other=0.0)
        b = b_desc.load([b_block, b_inner])
        sums += tl.dot(a, b.T) * (a_scale * tl.load(b_scale))[:, None]
        if PARTS == 2:
            b = b_desc.load([b_block + COLUMNS, b_inner])
            more += tl.dot(a, b.T) * (a_scale * tl.load(b_scale + b_next))[:, None]
        a_scales += rows
        b_scale += 1
    if EDGE:
        a = a_desc.load([first, inner // _BLOCK * _BLOCK])
        a_scale = tl.load(a_scales, mask=in_group, other=0.0)
        b = edge_desc.load([b_row, 0])
        sums += tl.dot(a, b.T) * (a_scale * tl.load(b_scale))[:, None]
        if PARTS == 2:
            b = edge_desc.load([b_row + COLUMNS, 0])
            more += tl.dot(a, b.T) * (a_scale * tl.load(b_scale + b_next))[:, None]
    column = first_column + tl.arange(0, COLUMNS)
    place = c_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(place, sums.to(c_ptr.dtype.element_ty), mask=in_group[:, None] & (column < high)[None, :])
    if PARTS == 2:
        in_columns = column + COLUMNS < high
        tl.store(
            place + COLUMNS, more.to(c_ptr.dtype.element_ty), mask=in_group[:, None] & in_columns[None, :]
        )


@triton.jit
def _turned_tile(w_desc, group, four, column, COLUMNS: tl.constexpr):
    """128 rows, which are contracted, by ``COLUMNS``, the columns in another order.

    Rows come in four parts, every fourth row in each: four codes of a column become a word, and words are
    what is stored for the tensor cores. A thread has 16 columns that lie behind each other; they become
    columns that are apart, so that threads beside each other store to columns beside each other.
    """
    a = w_desc.load([group, four, 0, column]).reshape(_BLOCK // 4, COLUMNS)
    b = w_desc.load([group, four, 1, column]).reshape(_BLOCK // 4, COLUMNS)
    c = w_desc.load([group, four, 2, column]).reshape(_BLOCK // 4, COLUMNS)
    d = w_desc.load([group, four, 3, column]).reshape(_BLOCK // 4, COLUMNS)
    whole = tl.join(tl.join(a, c), tl.join(b, d)).reshape(_BLOCK // 4, COLUMNS // 16, 16, 4)
    return whole.permute(0, 3, 2, 1).reshape(_BLOCK, COLUMNS).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _as_they_lay(sums, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns in their order again."""
    return sums.reshape(ROWS, 16, COLUMNS // 16).permute(0, 2, 1).reshape(ROWS, COLUMNS)


@triton.jit
def lying_product_kernel(
    a_desc,  # (rows, inner) codes
    w_desc,  # bytes: (groups, inner / 4, 4, columns), or panels (panels * groups, whole inner / 4, 4, 128)
    edge_desc,  # what is below whole tiles: (panels * groups, inner % 128 / 4, 4, 128)
    c_ptr,  # (rows, columns of the matrix)
    a_scales_ptr,  # (inner blocks, rows)
    w_scales_ptr,  # (groups, inner blocks, column blocks)
    table_ptr,  # (3, tiles of 128 rows)
    rows,
    columns,
    inner,
    low,  # the columns from low to high are computed, and are those that w_desc has
    high,
    panel_matrices,
    tiles,  # of ROWS rows
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    PANELS: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Rows of a group times its matrix as it lies, contracted dim first: ``ROWS`` by ``COLUMNS``.

    A matrix in the order of tiles is read as it lies too: the columns of a program are in one panel.
    """
    program = tl.program_id(0)
    column_tiles = tl.cdiv(high - low, COLUMNS)
    band = program // (TOGETHER * column_tiles)
    height = tl.minimum(tiles - band * TOGETHER, TOGETHER)
    tile = band * TOGETHER + (program % (TOGETHER * column_tiles)) % height
    column_tile = (program % (TOGETHER * column_tiles)) // height
    entries: tl.constexpr = _BLOCK // ROWS  # tiles of a row of the table
    entry = table_ptr + tile // entries
    group = tl.load(entry)
    first = tl.load(entry + tiles // entries) + tile % entries * ROWS
    end = tl.load(entry + 2 * (tiles // entries))
    if first >= end:
        return
    blocks, column_blocks = tl.cdiv(inner, _BLOCK), tl.cdiv(columns, _BLOCK)
    row = first + tl.arange(0, ROWS)
    in_group = row < end
    first_column = low + column_tile * COLUMNS
    matrix = column_tile * COLUMNS // _BLOCK * panel_matrices + group
    w_column = column_tile * COLUMNS % _BLOCK if PANELS else column_tile * COLUMNS
    w_scale = w_scales_ptr + group * blocks * column_blocks + first_column // _BLOCK
    a_scales = a_scales_ptr + row
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.range(0, inner // _BLOCK if EDGE else blocks, num_stages=STAGES):
        a = a_desc.load([first, block * _BLOCK])
        a_scale = tl.load(a_scales, mask=in_group, other=0.0)
        w = _turned_tile(w_desc, matrix, block * (_BLOCK // 4), w_column, COLUMNS)
        sums += tl.dot(a, w) * (a_scale * tl.load(w_scale))[:, None]
        a_scales += rows
        w_scale += column_blocks
    if EDGE:
        a = a_desc.load([first, inner // _BLOCK * _BLOCK])
        a_scale = tl.load(a_scales, mask=in_group, other=0.0)
        w = _turned_tile(edge_desc, matrix, 0, w_column, COLUMNS)
        sums += tl.dot(a, w) * (a_scale * tl.load(w_scale))[:, None]
    column = first_column + tl.arange(0, COLUMNS)
    place = c_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    made = _as_they_lay(sums.to(c_ptr.dtype.element_ty), ROWS, COLUMNS)
    tl.store(place, made, mask=in_group[:, None] & (column < high)[None, :])


@triton.jit
def weight_gradient_kernel(
    a_desc,  # (rows of the output, tiles * 128) codes, or panels (tiles * rows, 128)
    b_desc,  # (columns of the output, tiles * 128) codes, or panels (tiles * columns, 128)
    c_desc,  # (groups, rows, columns)
    a_scales_desc,  # (tiles, rows)
    b_scales_desc,  # (tiles, columns)
    table_ptr,  # (3, tiles): the group of a tile first
    starts_ptr,  # (groups + 1,): the first tile of each group
    rows,
    columns,
    groups,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    PANELS: tl.constexpr,
):
    """One place, ``ROWS`` by ``PARTS`` times ``COLUMNS``, of the sums of ``EACH`` groups over their rows.

    Groups are short, some hundred rows, and what takes time is to write their sums. So a program walks along
    the tiles of many groups without a break: while a sum is on its way, the next tiles are loaded already.
    """
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS * PARTS)
    first_group = tl.program_id(0) // (row_tiles * column_tiles) * EACH
    program = tl.program_id(0) % (row_tiles * column_tiles)
    band = program // (TOGETHER * column_tiles)
    height = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    first_row = (band * TOGETHER + (program % (TOGETHER * column_tiles)) % height) * ROWS
    first_column = (program % (TOGETHER * column_tiles)) // height * (COLUMNS * PARTS)
    last_group = tl.minimum(first_group + EACH, groups)
    start, end = tl.load(starts_ptr + first_group), tl.load(starts_ptr + last_group)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    if PARTS == 2:
        more = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(start, end, num_stages=STAGES):
        group = tl.load(table_ptr + tile)
        after = tl.load(table_ptr + tile + 1, mask=tile + 1 < end, other=-1)
        # a tile at the end of a panel goes on into the next one: what that gives is not stored
        a_row = tile * rows + first_row if PANELS else first_row
        b_row = tile * columns + first_column if PANELS else first_column
        inner = 0 if PANELS else tile * _BLOCK
        a = a_desc.load([a_row, inner])
        b = b_desc.load([b_row, inner])
        a_scale = a_scales_desc.load([tile, first_row]).reshape(ROWS)
        b_scale = b_scales_desc.load([tile, first_column]).reshape(COLUMNS)
        sums += tl.dot(a, b.T) * (a_scale[:, None] * b_scale[None, :])
        if PARTS == 2:
            b = b_desc.load([b_row + COLUMNS, inner])
            b_scale = b_scales_desc.load([tile, first_column + COLUMNS]).reshape(COLUMNS)
            more += tl.dot(a, b.T) * (a_scale[:, None] * b_scale[None, :])
        if group != after:
            made = sums.to(c_desc.dtype).reshape(1, ROWS, COLUMNS)
            c_desc.store([group, first_row, first_column], made)
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            if PARTS == 2:
                made = more.to(c_desc.dtype).reshape(1, ROWS, COLUMNS)
                c_desc.store([group, first_row, first_column + COLUMNS], made)
                more = tl.zeros((ROWS, COLUMNS), tl.float32)
    every = first_group + tl.arange(0, EACH)
    known = every < last_group
    first_tile = tl.load(starts_ptr + every, mask=known, other=0)
    empty = first_tile == tl.load(starts_ptr + every + 1, mask=known, other=-1)
    if tl.sum(empty.to(tl.int32), axis=0) > 0:
        nothing = tl.zeros((1, ROWS, COLUMNS), c_desc.dtype)
        for group in tl.range(first_group, last_group):
            if tl.load(starts_ptr + group) == tl.load(starts_ptr + group + 1):
                c_desc.store([group, first_row, first_column], nothing)
                if PARTS == 2:
                    c_desc.store([group, first_row, first_column + COLUMNS], nothing)


def quantize(
    values: Tensor, groups: Groups, seen: Tensor | None, *, rowwise: bool = True, turned: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``emulation.quantize``."""
    rows, columns = values.shape
    tiles, blocks = groups.tiles, -(-columns // BLOCK)
    codes = values.new_empty((rows, columns) if rowwise else (0, columns), dtype=torch.uint8)
    scales = values.new_empty((blocks, rows) if rowwise else (0, rows), dtype=torch.float32)
    turned_codes = empty_turned(values, tiles if turned else 0, columns, groups.size)
    turned_scales = values.new_empty((tiles, columns) if turned else (0, columns), dtype=torch.float32)
    if tiles and columns:
        quantize_kernel[(blocks, tiles)](
            values.contiguous(),
            codes,
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
    return codes.view(torch.float8_e4m3fn), scales, turned_codes, turned_scales


def groups_of(counts: Tensor, rows: int) -> Groups:
    """As ``groups.groups_of``, in one kernel."""
    size = len(counts)
    tiles = rows // BLOCK + size if rows else 0
    table = counts.new_empty((3, tiles), dtype=torch.int32)
    starts = counts.new_zeros(size + 1, dtype=torch.int32)
    if tiles:
        groups_kernel[(tiles,)](counts, table, starts, size, tiles, triton.next_power_of_2(size))
    return Groups(table, starts)


def transpose(
    codes: Tensor, *, tile: tuple[int, int] = (_TURN_ROWS, _TURN_COLUMNS), warps: int = _TURN_WARPS
) -> Tensor:
    """Matrices (E, N, K) of codes as (E, K, N)."""
    matrices, rows, columns = codes.shape
    out = codes.new_empty((matrices, columns, rows))
    if codes.numel():
        grid = (triton.cdiv(columns, tile[1]), triton.cdiv(rows, tile[0]), matrices)
        source, target = codes.view(torch.int32), out.view(torch.int32)
        transpose_kernel[grid](source, target, rows, columns, *tile, num_warps=warps)
    return out


def _described(codes: Tensor, block_rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(codes, [block_rows, BLOCK])


def untile(codes: Tensor, shape: Sequence[int], turned: bool) -> Tensor:
    """Matrices of ``shape`` (E, N, K) whose codes lie flat in the order of their tiles; turned (E, K, N)."""
    matrices, rows, columns = shape
    out = codes.new_empty((matrices, columns, rows) if turned else (matrices, rows, columns))
    if codes.numel():
        grid = (triton.cdiv(columns, BLOCK), triton.cdiv(rows, BLOCK), matrices)
        source, target = codes.view(torch.int32), out.view(torch.int32)
        untile_kernel[grid](
            source, target, matrices, rows, columns, turned, BLOCK, BLOCK, num_warps=_TURN_WARPS
        )
    return out


def product(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    config: Config = PRODUCT,
) -> Tensor:
    """As ``emulation.product``."""
    inner, matrices = codes.shape[1], len(weight_scales)
    columns = columns_of(weight, weight_scales, inner, False)
    parts = _readable(weight, matrices, columns, inner, config.columns)
    operands = codes, scales, weight_scales, groups
    return _multiplied(product_kernel, parts, operands, columns, dtype, config, PARTS=config.parts)


def lying_product(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    config: Config = LYING_PRODUCT,
) -> Tensor:
    """As ``emulation.product`` with a weight that is ``turned``; parts of ``config`` are not used."""
    inner, matrices = codes.shape[1], len(weight_scales)
    columns = columns_of(weight, weight_scales, inner, True)
    parts = _readable_lying(weight, matrices, columns, inner, config.columns)
    operands = codes, scales, weight_scales, groups
    return _multiplied(lying_product_kernel, parts, operands, columns, dtype, config._replace(parts=1))


def _multiplied(
    kernel: Any,
    parts: Iterator[_Readable],
    operands: tuple[Tensor, Tensor, Tensor, Groups],
    columns: int,
    dtype: torch.dtype,
    config: Config,
    **constants: int,
) -> Tensor:
    """A launch for each part of the weight that can be read alike."""
    codes, scales, weight_scales, groups = operands
    rows, inner = codes.shape
    out = codes.new_empty((rows, columns), dtype=dtype)
    tiles = groups.tiles * (BLOCK // config.rows)
    for part in parts:
        if not tiles or part.low == part.high:
            continue
        kernel[(tiles * triton.cdiv(part.high - part.low, config.columns * config.parts),)](
            _described(codes, config.rows),
            part.codes,
            part.edge,
            out,
            scales,
            weight_scales,
            groups.table,
            rows,
            columns,
            inner,
            part.low,
            part.high,
            part.panel_size,
            tiles,
            ROWS=config.rows,
            COLUMNS=config.columns,
            TOGETHER=config.together,
            STAGES=config.stages,
            PANELS=part.panel_size > 0,
            EDGE=part.edge is not part.codes,
            **constants,
            **_launched(config),
        )
    return out


class _Readable(NamedTuple):
    """Columns of a product, rows of its weight, that one launch computes, and how it reads the weight."""

    low: int
    high: int
    codes: TensorDescriptor
    edge: TensorDescriptor
    """The narrower panel; the codes themselves where all are alike."""
    panel_size: int
    """Rows of a panel over all matrices, or matrices where they are what is counted; 0 is row-major."""


def _readable(weight: Tensor, matrices: int, columns: int, inner: int, width: int) -> Iterator[_Readable]:
    """A weight (E, N, K) at once; one in the order of tiles in whole ones and the lower edge."""
    if weight.dim() == 3:
        codes = _described(weight.view(-1, inner), width)
        yield _Readable(0, columns, codes, codes, 0)
        return
    whole, start, panels = columns // BLOCK * BLOCK, 0, inner // BLOCK
    for low, high in ((0, whole), (whole, columns)):
        rows = matrices * (high - low)
        middle, end = start + rows * panels * BLOCK, start + rows * inner
        made = [
            _described(part.view(-1, size), width)
            for part, size in ((weight[start:middle], BLOCK), (weight[middle:end], inner % BLOCK))
            if part.numel()
        ]
        if made:
            yield _Readable(low, high, made[0], made[-1], rows)
        start = end


def _readable_lying(
    weight: Tensor, matrices: int, columns: int, inner: int, width: int
) -> Iterator[_Readable]:
    """A weight (E, K, N) at once; one in the order of tiles in whole columns of them and the right edge."""
    weight = weight.view(torch.uint8)
    if weight.dim() == 3:
        codes = _in_fours(weight, columns, inner, width)
        yield _Readable(0, columns, codes, codes, 0)
        return
    above, whole = inner // BLOCK * BLOCK, columns // BLOCK * BLOCK
    # sizes of tiles lie behind each other: whole ones, right edge, lower edge, corner
    upper, lower = weight.split((matrices * above * columns, matrices * (inner - above) * columns))
    for low, high in ((0, whole), (whole, columns)):
        made = [
            _in_fours(
                part[matrices * rows * low : matrices * rows * high], min(BLOCK, high - low), rows, width
            )
            for part, rows in ((upper, above), (lower, inner - above))
            if rows and high > low
        ]
        if made:
            yield _Readable(low, high, made[0], made[-1], matrices)


def _in_fours(codes: Tensor, columns: int, rows: int, width: int) -> TensorDescriptor:
    """Matrices of so many columns and rows, the rows in fours."""
    return TensorDescriptor.from_tensor(codes.view(-1, rows // 4, 4, columns), [1, BLOCK // 4, 1, width])


def weight_gradient(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    config: Config = WEIGHT_GRADIENT,
) -> Tensor:
    """As ``emulation.weight_gradient``."""
    rows, columns = a.shape[1], b.shape[1]
    out = a.new_empty((groups.size, rows, columns), dtype=dtype)
    if not groups.tiles:
        return out.zero_()
    panels = groups.size > 1
    places = triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.columns * config.parts)
    weight_gradient_kernel[(places * triton.cdiv(groups.size, config.each),)](
        _described(a.flatten(0, 1) if panels else a.transpose(0, 1).flatten(1), config.rows),
        _described(b.flatten(0, 1) if panels else b.transpose(0, 1).flatten(1), config.columns),
        TensorDescriptor.from_tensor(out, [1, config.rows, config.columns]),
        TensorDescriptor.from_tensor(a_scales, [1, config.rows]),
        TensorDescriptor.from_tensor(b_scales, [1, config.columns]),
        groups.table,
        groups.starts,
        rows,
        columns,
        groups.size,
        config.rows,
        config.columns,
        config.parts,
        config.each,
        config.together,
        config.stages,
        panels,
        **_launched(config),
    )
    return out


def _launched(config: Config) -> dict[str, int]:
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return {**options, "maxnreg": config.registers} if config.registers else options
