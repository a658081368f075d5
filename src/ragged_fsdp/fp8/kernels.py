# mypy: allow-untyped-defs
"""Triton kernels of the FP8 products: quantising in both orientations, transposing codes, grouped products.

All work on rows that are grouped by expert, in tiles that a table names
(:class:`~ragged_fsdp.fp8.groups.Groups`); a linear layer is one group. None asks the device for the sizes
of the groups.

*Quantising* reads a tile of 128 rows and 128 columns once and writes it twice: as it lies with a scale for
each row, and turned, with a scale for each column. The turned tiles of a group lie behind each other, so a
group begins at a multiple of 128 there, and what is behind its last row are zeros.

*Products* take one block of 128 of the contracted dim at a time: the tensor cores add it up, then it is
scaled and added to an fp32 sum in registers. Their additions inside a block keep fewer bits than fp32; that
is all that sets the results apart from ``emulation``.

*Transposing* turns four by four bytes in registers, so that what goes through shared memory are words.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ragged_fsdp.fp8.groups import BLOCK, Groups
from ragged_fsdp.fsdp.gather.block_codes import LARGEST, SMALLEST_SCALE
from ragged_fsdp.fsdp.gather.codes_triton import nearest_float8

__all__ = [
    "PRODUCT",
    "WEIGHT_GRADIENT",
    "Config",
    "groups_of",
    "product",
    "quantize",
    "transpose",
    "weight_gradient",
]

Config = tuple[int, int, int, int]
"""Rows and columns of a program's tile of the output, warps, stages of the pipeline."""
PRODUCT: Config = (64, 128, 4, 4)
WEIGHT_GRADIENT: Config = (64, 128, 4, 3)
_TOGETHER = 8  # tiles of rows that share the columns of a weight while they are in the cache
_QUANTIZE_WARPS = 4
_DESCRIPTOR_ALIGN = 16  # bytes
_TURN_ROWS, _TURN_COLUMNS, _TURN_WARPS = 128, 128, 4

_BLOCK = tl.constexpr(BLOCK)
_LARGEST, _SMALLEST = tl.constexpr(LARGEST["float8_e4m3fn"]), tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _scale_and_inverse(largest):
    """The scale of a block and what values are multiplied by, from the largest magnitude as an integer."""
    scale = largest.to(tl.float32, bitcast=True) * (1.0 / _LARGEST)
    scale = tl.where(scale == float("inf"), float("nan"), scale)
    unusable = scale <= _SMALLEST
    return tl.where(unusable, 0.0, scale), tl.where(unusable, 0.0, tl.div_rn(1.0, scale))


@triton.jit
def _codes(values, inverse, HARDWARE: tl.constexpr):
    normal = values * inverse
    normal = tl.where(
        normal > _LARGEST, _LARGEST, tl.where(normal < -_LARGEST, -_LARGEST, normal)
    )  # a nan stays
    if HARDWARE:
        return normal.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return nearest_float8(normal)


@triton.jit
def _every_fourth(values_ptr, first, end, column, columns, offset):
    """Every fourth row of a tile of 128, from ``first + offset`` on: which, their mask, places, values."""
    row = first + offset + tl.arange(0, _BLOCK // 4) * 4
    mask = (row < end)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    return row, mask, place, tl.load(values_ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _magnitudes(values):
    """As integers: a nan outranks every number."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _store_rows(values, row, mask, place, end, codes_ptr, scales_ptr, HARDWARE: tl.constexpr):
    """Codes and scales of some rows; how many of them are not finite."""
    scale, inverse = _scale_and_inverse(tl.max(_magnitudes(values), axis=1))
    tl.store(scales_ptr + row, scale, mask=row < end)
    tl.store(codes_ptr + place, _codes(values, inverse[:, None], HARDWARE), mask=mask)
    return tl.sum((scale != scale).to(tl.int32), axis=0)


@triton.jit
def quantize_kernel(
    values_ptr,  # (rows, columns)
    codes_ptr,  # (rows, columns)
    scales_ptr,  # (column blocks, rows)
    turned_ptr,  # (columns, tiles * 32) words of four codes
    turned_scales_ptr,  # (tiles, columns)
    table_ptr,  # (3, tiles): group, first row, behind the last row
    seen_ptr,  # becomes one where a block is not finite
    rows,
    columns,
    tiles,
    ROWWISE: tl.constexpr,
    TURNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    NOTES: tl.constexpr,
):
    """One tile of 128 rows of a group and 128 columns, in both orientations.

    Rows are held in four parts, every fourth row in each, so that four codes of a column make a word: through
    shared memory, where the tile is turned, go words.
    """
    tile, block = tl.program_id(1), tl.program_id(0)
    first, end = tl.load(table_ptr + tiles + tile), tl.load(table_ptr + 2 * tiles + tile)
    if first >= end:
        return
    column = block * _BLOCK + tl.arange(0, _BLOCK)
    row_a, mask_a, place_a, a = _every_fourth(values_ptr, first, end, column, columns, 0)
    row_b, mask_b, place_b, b = _every_fourth(values_ptr, first, end, column, columns, 1)
    row_c, mask_c, place_c, c = _every_fourth(values_ptr, first, end, column, columns, 2)
    row_d, mask_d, place_d, d = _every_fourth(values_ptr, first, end, column, columns, 3)
    if ROWWISE:
        scales = scales_ptr + block.to(tl.int64) * rows
        broken = _store_rows(a, row_a, mask_a, place_a, end, codes_ptr, scales, HARDWARE)
        broken += _store_rows(b, row_b, mask_b, place_b, end, codes_ptr, scales, HARDWARE)
        broken += _store_rows(c, row_c, mask_c, place_c, end, codes_ptr, scales, HARDWARE)
        broken += _store_rows(d, row_d, mask_d, place_d, end, codes_ptr, scales, HARDWARE)
    if TURNED:
        largest = tl.maximum(
            tl.maximum(_magnitudes(a), _magnitudes(b)), tl.maximum(_magnitudes(c), _magnitudes(d))
        )
        scale, inverse = _scale_and_inverse(tl.max(largest, axis=0))
        tl.store(turned_scales_ptr + tile.to(tl.int64) * columns + column, scale, mask=column < columns)
        inverse = inverse[None, :]
        word = _codes(a, inverse, HARDWARE).to(tl.int32) | (_codes(b, inverse, HARDWARE).to(tl.int32) << 8)
        word |= _codes(c, inverse, HARDWARE).to(tl.int32) << 16
        word |= _codes(d, inverse, HARDWARE).to(tl.int32) << 24
        place = tile * (_BLOCK // 4) + tl.arange(0, _BLOCK // 4)
        out = turned_ptr + column.to(tl.int64)[:, None] * (tiles * (_BLOCK // 4)) + place[None, :]
        tl.store(out, tl.trans(word), mask=(column < columns)[:, None])
        broken = tl.sum((scale != scale).to(tl.int32), axis=0)
    if NOTES:  # noqa: SIM102  (known when it is compiled, unlike the other)
        if broken > 0:
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
def transpose_kernel(words_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``ROWS`` by ``COLUMNS`` bytes of one matrix, turned; both sizes of the matrix are multiples of 4."""
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    in_width, out_width = columns // 4, rows // 4  # in words
    row = tl.program_id(1) * (ROWS // 4) + tl.arange(0, ROWS // 4)  # of words turned: four rows each
    column = tl.program_id(0) * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
    mask = (row < out_width)[:, None] & (column < in_width)[None, :]
    place = words_ptr + matrix // 4 + (row.to(tl.int64) * 4 * in_width)[:, None] + column[None, :]
    a = tl.load(place, mask=mask, other=0)
    b = tl.load(place + in_width, mask=mask, other=0)
    c = tl.load(place + 2 * in_width, mask=mask, other=0)
    d = tl.load(place + 3 * in_width, mask=mask, other=0)
    out = out_ptr + matrix // 4 + (column.to(tl.int64) * 4 * out_width)[:, None] + row[None, :]
    turned_mask = (column < in_width)[:, None] & (row < out_width)[None, :]
    for byte in tl.static_range(4):
        word = ((a >> (8 * byte)) & 0xFF) | (((b >> (8 * byte)) & 0xFF) << 8)
        word = word | (((c >> (8 * byte)) & 0xFF) << 16) | (((d >> (8 * byte)) & 0xFF) << 24)
        tl.store(out + byte * out_width, tl.trans(word), mask=turned_mask)


@triton.jit
def product_kernel(
    a_desc,  # (rows, inner) codes
    b_desc,  # (groups * columns, inner) codes
    c_ptr,  # (rows, columns)
    a_scales_ptr,  # (inner blocks, rows)
    b_scales_ptr,  # (groups, column blocks, inner blocks)
    table_ptr,  # (3, tiles of 128 rows)
    rows,
    columns,
    inner,
    tiles,  # of ROWS rows
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows of a group times the transposed matrix of the group: a tile of ``ROWS`` by ``COLUMNS``."""
    program = tl.program_id(0)
    column_tiles = tl.cdiv(columns, COLUMNS)
    band = program // (TOGETHER * column_tiles)
    height = tl.minimum(tiles - band * TOGETHER, TOGETHER)
    tile = band * TOGETHER + (program % (TOGETHER * column_tiles)) % height
    first_column = (program % (TOGETHER * column_tiles)) // height * COLUMNS
    parts: tl.constexpr = _BLOCK // ROWS  # of a tile of the table
    entry = table_ptr + tile // parts
    group = tl.load(entry)
    first = tl.load(entry + tiles // parts) + tile % parts * ROWS
    end = tl.load(entry + 2 * (tiles // parts))
    if first >= end:
        return
    blocks = tl.cdiv(inner, _BLOCK)
    row, column = first + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    in_group = row < end
    b_row = group * columns + first_column
    b_scale = b_scales_ptr + group * tl.cdiv(columns, _BLOCK) * blocks
    if COLUMNS <= _BLOCK:
        b_scale += first_column // _BLOCK * blocks
    else:
        b_scale += column // _BLOCK * blocks
    a_scales = a_scales_ptr + row
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        a = a_desc.load([first, block * _BLOCK])
        b = b_desc.load([b_row, block * _BLOCK])
        a_scale = tl.load(a_scales, mask=in_group, other=0.0)
        if COLUMNS <= _BLOCK:
            sums += tl.dot(a, b.T) * (a_scale * tl.load(b_scale))[:, None]
        else:
            each = tl.load(b_scale, mask=column < columns, other=0.0)
            sums += tl.dot(a, b.T) * (a_scale[:, None] * each[None, :])
        a_scales += rows
        b_scale += 1
    place = c_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(place, sums.to(c_ptr.dtype.element_ty), mask=in_group[:, None] & (column < columns)[None, :])


@triton.jit
def weight_gradient_kernel(
    a_desc,  # (rows of the output, tiles * 128) codes
    b_desc,  # (columns of the output, tiles * 128) codes
    c_ptr,  # (groups, rows, columns)
    c_desc,  # the same, for tiles that end with the rows of a group
    a_scales_ptr,  # (tiles, rows)
    b_scales_ptr,  # (tiles, columns)
    starts_ptr,  # (groups + 1,): the first tile of each group
    rows,
    columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr,
    STAGES: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
):
    """A tile of ``ROWS`` by ``COLUMNS`` of one group's sum over its rows; zeros for a group without rows."""
    program, group = tl.program_id(0), tl.program_id(1)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    band = program // (TOGETHER * column_tiles)
    height = tl.minimum(row_tiles - band * TOGETHER, TOGETHER)
    first_row = (band * TOGETHER + (program % (TOGETHER * column_tiles)) % height) * ROWS
    first_column = (program % (TOGETHER * column_tiles)) // height * COLUMNS
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    start, end = tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1)
    a_scales = a_scales_ptr + start.to(tl.int64) * rows + row
    b_scales = b_scales_ptr + start.to(tl.int64) * columns + column
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in tl.range(start, end, num_stages=STAGES):
        a = a_desc.load([first_row, tile * _BLOCK])
        b = b_desc.load([first_column, tile * _BLOCK])
        a_scale = tl.load(a_scales, mask=row < rows, other=0.0)
        b_scale = tl.load(b_scales, mask=column < columns, other=0.0)
        sums += tl.dot(a, b.T) * (a_scale[:, None] * b_scale[None, :])
        a_scales += rows
        b_scales += columns
    if WHOLE_ROWS:
        c_desc.store([group * rows + first_row, first_column], sums.to(c_desc.dtype))
    else:
        place = c_ptr + (group.to(tl.int64) * rows + row)[:, None] * columns + column[None, :]
        in_both = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(place, sums.to(c_ptr.dtype.element_ty), mask=in_both)


def quantize(
    values: Tensor,
    groups: Groups,
    seen: Tensor | None,
    *,
    rowwise: bool = True,
    turned: bool = True,
    warps: int = _QUANTIZE_WARPS,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``emulation.quantize``."""
    rows, columns = values.shape
    tiles, blocks = groups.tiles, -(-columns // BLOCK)
    codes = values.new_empty((rows, columns) if rowwise else (0, columns), dtype=torch.uint8)
    scales = values.new_empty((blocks, rows) if rowwise else (0, rows), dtype=torch.float32)
    turned_codes = values.new_empty((columns, tiles * BLOCK) if turned else (columns, 0), dtype=torch.uint8)
    turned_scales = values.new_empty((tiles, columns) if turned else (0, columns), dtype=torch.float32)
    if tiles and columns:
        quantize_kernel[(blocks, tiles)](
            values.contiguous(),
            codes,
            scales,
            turned_codes.view(torch.int32) if turned else turned_codes,
            turned_scales,
            groups.table,
            groups.table if seen is None else seen,
            rows,
            columns,
            tiles,
            rowwise,
            turned,
            values.is_cuda,
            seen is not None,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    float8 = torch.float8_e4m3fn
    return codes.view(float8), scales, turned_codes.view(float8), turned_scales


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
    """As ``emulation.transpose``."""
    matrices, rows, columns = codes.shape
    out = codes.new_empty((matrices, columns, rows))
    if codes.numel():
        grid = (triton.cdiv(columns, tile[1]), triton.cdiv(rows, tile[0]), matrices)
        source, target = codes.view(torch.int32), out.view(torch.int32)
        transpose_kernel[grid](source, target, rows, columns, *tile, num_warps=warps)
    return out


def _described(codes: Tensor, block_rows: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(codes, [block_rows, BLOCK])


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
    rows, inner = codes.shape
    _, columns, _ = weight.shape
    height, width, warps, stages = config
    out = codes.new_empty((rows, columns), dtype=dtype)
    tiles = groups.tiles * (BLOCK // height)
    if tiles and columns:
        product_kernel[(tiles * triton.cdiv(columns, width),)](
            _described(codes, height),
            _described(weight.view(-1, inner), width),
            out,
            scales,
            weight_scales,
            groups.table,
            rows,
            columns,
            inner,
            tiles,
            height,
            width,
            _TOGETHER,
            stages,
            num_warps=warps,
            num_stages=stages,
        )
    return out


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
    rows, columns = len(a), len(b)
    height, width, warps, stages = config
    out = a.new_empty((groups.size, rows, columns), dtype=dtype)
    if not groups.tiles:
        return out.zero_()
    # what is stored by a descriptor is not masked: rows of the next group must not be in the tile
    whole_rows = rows % height == 0 and columns * out.element_size() % _DESCRIPTOR_ALIGN == 0
    weight_gradient_kernel[(triton.cdiv(rows, height) * triton.cdiv(columns, width), groups.size)](
        _described(a, height),
        _described(b, width),
        out,
        TensorDescriptor.from_tensor(out.view(-1, columns), [height, width]) if whole_rows else out,
        a_scales,
        b_scales,
        groups.starts,
        rows,
        columns,
        height,
        width,
        _TOGETHER,
        stages,
        whole_rows,
        num_warps=warps,
        num_stages=stages,
    )
    return out
