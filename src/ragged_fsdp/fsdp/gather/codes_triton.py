# mypy: allow-untyped-defs
"""The arithmetic of ``block_codes`` as Triton kernels: its bits, in one pass over the memory.

Decoding is bound by memory: a byte is read and two are written (bf16) for each element of a layer. A program
decodes ``BLOCK`` neighbours of one rank's part of a parameter, which it finds in a table of the runs of
``MessageLayout``; so a gather is one launch per kind of codes, however many parameters and ranks there are.
A thread holds ``VECTOR`` neighbours, all of one tile, as wide as one store of 16 bytes: with that shape loads
and stores have one register layout, and nothing goes through shared memory. It is two-dimensional, vectors by
elements, since the compiler leaves it open in which order a third dimension would be given to the threads.

Tiles that lie one behind the other (:class:`~ragged_fsdp.policy.Tiles`) are decoded by a kernel of their own,
a tile per program, which writes each to its rows and columns.

Encoding reads a rank's own shard, a tile per program, twice: for the largest magnitude, then (from the cache)
for the codes.

float8 is converted by integer operations: exact, and the same on devices without such an instruction.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragged_fsdp.block_codes import LARGEST, SMALLEST_SCALE
from ragged_fsdp.policy import BlockCodes

if TYPE_CHECKING:
    from ragged_fsdp.fsdp.gather.codes import MessageLayout

__all__ = ["Decoder", "encode", "nearest_float8"]

_BLOCK = 4096
_DECODE_WARPS = 4
_VECTOR_BYTES = 16
_ENCODE_NUMEL = 8192
_ENCODE_WARP_NUMEL = 512
_NO_PROGRAM = 1 << 62

_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_INT8_LARGEST, _FLOAT8_LARGEST = tl.constexpr(LARGEST["int8"]), tl.constexpr(LARGEST["float8_e4m3fn"])
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, half to even
_FLOAT8_REBIAS = tl.constexpr(2.0**120)  # between the biases of the exponents, 127 and 7
_FLOAT8_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_FLOAT8_ROUNDER = tl.constexpr(16384.0)  # 2^14: neighbours of it are 2^-9 apart, as the smallest codes are


@triton.jit
def _value_of_float8(codes):
    """Exact; a nan becomes a number, but is only found in tiles whose scale is a nan."""
    sign_and_magnitude = ((codes.to(tl.int32) << 24) >> 4) & -0x78100000  # 0x87F00000
    return sign_and_magnitude.to(tl.float32, bitcast=True) * _FLOAT8_REBIAS


@triton.jit
def nearest_float8(values):
    """Codes of values of at most 448, rounded half to even."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (tl.abs(values) + _FLOAT8_ROUNDER).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(tl.abs(values) < _FLOAT8_SMALLEST_NORMAL, small, normal)
    code = tl.where(values == values, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _nearest_int8(values):
    rounded = tl.where(values == values, (values + _ROUNDER) - _ROUNDER, 0.0)
    return rounded.to(tl.int32).to(tl.uint8)


@triton.jit
def decode_kernel(
    message_ptr,
    out_ptr,
    table_ptr,  # (6, RUNS): first program, elements per rank, columns; starts of codes, values and scales
    part_bytes,
    RUNS: tl.constexpr,
    FLOAT8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Values of all runs in the table."""
    program = tl.program_id(0)
    run = tl.sum((tl.load(table_ptr + tl.arange(0, RUNS)) <= program).to(tl.int32)) - 1
    entry = table_ptr + run
    local = program - tl.load(entry).to(tl.int32)
    numel = tl.load(entry + RUNS)
    columns = tl.load(entry + 2 * RUNS).to(tl.int32)
    chunks = tl.cdiv(numel, BLOCK).to(tl.int32)
    rank = local // chunks
    start = (local - rank * chunks).to(tl.int64) * BLOCK
    part_start = rank.to(tl.int64) * part_bytes
    codes_ptr = message_ptr + tl.multiple_of(tl.load(entry + 3 * RUNS) + part_start + start, VECTOR)
    values_ptr = out_ptr + tl.multiple_of(tl.load(entry + 4 * RUNS) + rank * numel + start, VECTOR)
    scales_ptr = (message_ptr + (tl.load(entry + 5 * RUNS) + part_start)).to(tl.pointer_type(tl.float32))

    first_row = start // columns
    vector = tl.arange(0, BLOCK // VECTOR) * VECTOR
    mask = vector < numel - start
    from_first_row = (start - first_row * columns).to(tl.int32) + vector
    row = from_first_row // columns
    tile_in_row = (from_first_row - row * columns) // BLOCK_COLS
    tile = (first_row.to(tl.int32) + row) // BLOCK_ROWS * (columns // BLOCK_COLS) + tile_in_row
    scales = tl.load(scales_ptr + tile, mask=mask, other=0.0)
    element = vector[:, None] + tl.arange(0, VECTOR)[None, :]
    codes = tl.load(codes_ptr + element, mask=mask[:, None], other=0)
    exact = _value_of_float8(codes) if FLOAT8 else codes.to(tl.int8, bitcast=True).to(tl.float32)
    tl.store(values_ptr + element, (exact * scales[:, None]).to(out_ptr.dtype.element_ty), mask=mask[:, None])


@triton.jit
def decode_tiles_kernel(
    message_ptr,
    out_ptr,
    owner_ptr,  # the part of each program's tile
    table_ptr,  # (parts, FIELDS); ``_tile_table`` says what is in a row
    FLOAT8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Values of one tile, ``ROWS`` rows at a time."""
    program = tl.program_id(0)
    entry = table_ptr + tl.load(owner_ptr + program).to(tl.int64) * FIELDS
    local = program - tl.load(entry).to(tl.int32)
    tile_rows, tile_cols = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    down, matrices = tl.load(entry + 5).to(tl.int32), tl.load(entry + 6).to(tl.int32)
    tile = local + tl.load(entry + 7).to(tl.int32)
    stacked = tile // down
    panel = stacked // matrices
    matrix = (stacked - panel * matrices).to(tl.int64)
    columns = tl.load(entry + 9)
    target = tl.load(entry + 8) + matrix * tl.load(entry + 10) + panel.to(tl.int64) * tile_cols
    target += (tile - stacked * down).to(tl.int64) * tile_rows * columns
    codes_ptr = message_ptr + tl.load(entry + 1) + local.to(tl.int64) * tile_rows * tile_cols
    scale = tl.load((message_ptr + tl.load(entry + 2)).to(tl.pointer_type(tl.float32)) + local)
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    for first in range(0, BLOCK_ROWS, ROWS):
        mask = (row + first < tile_rows) & (col < tile_cols)
        codes = tl.load(codes_ptr + (row + first) * tile_cols + col, mask=mask, other=0)
        exact = _value_of_float8(codes) if FLOAT8 else codes.to(tl.int8, bitcast=True).to(tl.float32)
        place = target + (row + first).to(tl.int64) * columns + col
        tl.store(out_ptr + place, (exact * scale).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def encode_kernel(
    values_ptr,
    codes_ptr,
    scales_ptr,
    columns,
    FLOAT8: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Codes and scale of one tile, ``ROWS`` rows at a time."""
    LIMIT: tl.constexpr = _FLOAT8_LARGEST if FLOAT8 else _INT8_LARGEST
    tile = tl.program_id(0)
    tiles = columns // BLOCK_COLS
    band = tile // tiles
    start = band.to(tl.int64) * BLOCK_ROWS * columns + (tile - band * tiles) * BLOCK_COLS
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    element = start + row.to(tl.int64) * columns + col

    largest = tl.zeros((ROWS, COLS), tl.int32)  # magnitudes as integers: a nan outranks every number
    for first in range(0, BLOCK_ROWS, ROWS):
        mask = (row < BLOCK_ROWS - first) & (col < BLOCK_COLS)
        values = tl.load(values_ptr + element + first * columns, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    scale = tl.max(tl.max(largest, axis=1), axis=0).to(tl.float32, bitcast=True) * (1.0 / LIMIT)
    scale = tl.where(scale == float("inf"), float("nan"), scale)
    unusable = scale <= _SMALLEST
    tl.store(scales_ptr + tile, tl.where(unusable, 0.0, scale))
    inverse = tl.where(unusable, 0.0, tl.div_rn(1.0, scale))

    for first in range(0, BLOCK_ROWS, ROWS):
        mask = (row < BLOCK_ROWS - first) & (col < BLOCK_COLS)
        values = tl.load(values_ptr + element + first * columns, mask=mask, other=0.0).to(tl.float32)
        normal = values * inverse
        normal = tl.where(normal > LIMIT, LIMIT, tl.where(normal < -LIMIT, -LIMIT, normal))  # a nan stays
        codes = nearest_float8(normal) if FLOAT8 else _nearest_int8(normal)
        tl.store(codes_ptr + element + first * columns, codes, mask=mask)


def encode(bands: Tensor, codes: BlockCodes, out: tuple[Tensor, Tensor]) -> None:
    """The codes and scales of ``block_codes.encode``, by a kernel; all tensors are contiguous."""
    rows, columns = codes.block_shape
    cols = triton.next_power_of_2(columns)
    at_once = min(triton.next_power_of_2(rows), max(1, _ENCODE_NUMEL // cols))
    out_codes, out_scales = out
    encode_kernel[(out_scales.numel(),)](
        bands,
        out_codes.view(torch.uint8),
        out_scales,
        bands.shape[-2] * columns,
        codes.dtype != "int8",
        rows,
        columns,
        at_once,
        cols,
        num_warps=min(16, max(1, at_once * cols // _ENCODE_WARP_NUMEL)),
        enable_fp_fusion=False,
    )


class Decoder:
    """Decodes the messages of a group; where everything lies is described on the device once."""

    def __init__(self, layout: MessageLayout, device: torch.device) -> None:
        self._part_bytes = layout.part_bytes
        filled = (i for i, runs in enumerate(layout.runs) if runs)  # not of empty parameters
        members = [(i, layout.codes[i]) for i in filled]
        kinds = {codes for i, codes in members if layout.plan.tile(i) is None}
        self._launches = [(codes, *_table(layout, codes, device)) for codes in sorted(kinds, key=repr)]
        tiled = {codes for i, codes in members if layout.plan.tile(i) is not None}
        self._tiles = [(codes, *_tile_table(layout, codes, device)) for codes in sorted(tiled, key=repr)]

    def __call__(self, message: Tensor, out: Tensor) -> None:
        """Write the values of the whole group to ``out``, its flat buffer."""
        for codes, table, programs, alignment in self._launches:
            decode_kernel[(programs,)](
                message,
                out,
                table,
                self._part_bytes,
                table.shape[1],
                codes.dtype != "int8",
                *codes.block_shape,
                _BLOCK,
                math.gcd(alignment, codes.block_shape[1], _VECTOR_BYTES // out.element_size()),
                num_warps=_DECODE_WARPS,
                enable_fp_fusion=False,
            )
        for codes, owner, table in self._tiles:
            rows, columns = (triton.next_power_of_2(size) for size in codes.block_shape)
            at_once = min(rows, max(1, _BLOCK // columns))
            decode_tiles_kernel[(owner.numel(),)](
                message,
                out,
                owner,
                table,
                codes.dtype != "int8",
                rows,
                at_once,
                columns,
                table.shape[1],
                num_warps=_DECODE_WARPS,
                enable_fp_fusion=False,
            )


def _tile_table(layout: MessageLayout, codes: BlockCodes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which part each program's tile belongs to, and the parts of the parameters with such codes."""
    rows: list[list[int]] = []
    tiles: list[int] = []
    for index, plan in ((i, layout.plan) for i, kind in enumerate(layout.codes) if kind == codes):
        if plan.tile(index) is None:
            continue
        *_, height, width = plan.shapes[index]
        for rank in range(plan.layout.ranks):
            run = layout.run_on(index, rank)
            for part in layout.tile_parts(index, rank):
                kind, begin = part.kind, rank * layout.part_bytes
                rows.append(
                    [
                        sum(tiles),
                        begin + run.shard_start + part.codes_at,
                        begin + layout.scale_start(run) + 4 * part.scales_at,
                        kind.tile_rows,
                        kind.tile_columns,
                        kind.rows // kind.tile_rows,
                        math.prod(plan.shapes[index][:-2]),
                        part.first,
                        plan.layout.offsets[index] + kind.first_row * width + kind.first_column,
                        width,
                        height * width,
                    ]
                )
                tiles.append(part.tiles)
    owner = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32), torch.tensor(tiles))
    return owner.to(device), torch.tensor(rows, dtype=torch.int64).to(device)


def _table(layout: MessageLayout, codes: BlockCodes, device: torch.device) -> tuple[Tensor, int, int]:
    """Runs of the parameters with such codes, as the kernel reads them; programs; what divides all starts."""
    shard_numel, part_bytes = layout.plan.layout.shard_numel, layout.part_bytes
    columns, programs = [], 0
    for index, runs in enumerate(layout.runs):
        for run in runs if layout.codes[index] == codes and layout.plan.tile(index) is None else ():
            starts = (
                run.first_rank * part_bytes + run.shard_start,
                run.first_rank * shard_numel + run.shard_start,
                run.first_rank * part_bytes + layout.scale_start(run),
            )
            columns.append((programs, run.numel, layout.plan.shapes[index][-1], *starts))
            programs += run.ranks * -(-run.numel // _BLOCK)
    alignment = math.gcd(part_bytes, *(start for column in columns for start in (column[1], *column[3:5])))
    padding = triton.next_power_of_2(len(columns)) - len(columns)
    columns += [(_NO_PROGRAM, 0, 0, 0, 0, 0)] * padding
    return torch.tensor(columns).t().contiguous().to(device), programs, alignment
