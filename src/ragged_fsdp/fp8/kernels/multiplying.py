# mypy: allow-untyped-defs
"""Kernels that multiply rows of a group with its matrix.

They take one block of 128 of the contracted dim at a time: the tensor cores add it up, then it is
scaled and added to an fp32 sum in registers. Their additions inside a block keep fewer bits than fp32; that
is all that sets the results apart from ``emulation``.

A matrix whose contracted dim comes first is turned on the way to the tensor cores (*lying*).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ragged_fsdp.fp8.groups import BLOCK, Groups, columns_of
from ragged_fsdp.fp8.kernels.launching import Config, described, launched

__all__ = ["lying_product", "product"]

PRODUCT = Config(64, 128, 4, 3)
LYING_PRODUCT = Config(64, 128, 4, 3)
_BLOCK = tl.constexpr(BLOCK)


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


def product(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    config: Config = PRODUCT,
) -> Tensor:
    """The product of ``emulation.product``, by a Triton kernel."""
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
    """The product of ``emulation.product`` with a weight that is ``turned``, by a kernel that turns what it
    reads; ``config.parts`` is not used."""
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
            described(codes, config.rows),
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
            **launched(config),
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
        codes = described(weight.view(-1, inner), width)
        yield _Readable(0, columns, codes, codes, 0)
        return
    whole, start, panels = columns // BLOCK * BLOCK, 0, inner // BLOCK
    for low, high in ((0, whole), (whole, columns)):
        rows = matrices * (high - low)
        middle, end = start + rows * panels * BLOCK, start + rows * inner
        made = [
            described(part.view(-1, size), width)
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
