# mypy: allow-untyped-defs
"""The 8-bit Adam step as one Triton kernel over many parameters.

A program owns one row of ``TILES`` neighbouring blocks of one parameter: it reads weights, gradients,
codes and scales once, and writes weights, codes and scales once. Parameters are found through a table
of pointers, so a step is one launch per kind of parameter (dtypes, block shape) however many there are.

The arithmetic is that of ``adam8bit_reference``, operation for operation: contraction to fused
multiply-adds is off and division and root round correctly, so the results are equal bit by bit.
Codes are looked up, not searched (``quant.step_table``), and so are the values of the maps. All tensors of a
program keep one register layout, four neighbours per thread: without the ``max_contiguous`` hints the byte
loads and the lookups would get layouts of their own, and every value would travel through shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ragged_fsdp.optim.adam8bit_reference import AdamScalars, BlockEntry
from ragged_fsdp.optim.quant import SMALLEST_SCALE, step_table, value_table

__all__ = ["EntryTable", "update_entries"]

# On an H200 eight elements per thread are fastest: more spill, fewer hide too little latency.
_PROGRAM_NUMEL = 1024
_WARP_NUMEL = 256
_MOST_WARPS = 32
_FIELDS = tl.constexpr(17)  # int64 words per parameter in the table; the order is that of _row_of_table
_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _mix32(state):
    state = (state ^ (state >> 16)) * 0x7FEB352D
    state = (state ^ (state >> 15)) * 0x846CA68B
    return state ^ (state >> 16)


@triton.jit
def _uniform(bits):
    return (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def _noise(row_of_table, row, col):
    """Uniform numbers of both moments for local rows and columns; as ``quant.rounding_noise``."""
    inner = row + tl.load(row_of_table + 9).to(tl.int32)  # 64-bit divisions are slow
    period = tl.load(row_of_table + 11).to(tl.int32)
    outer = inner // period
    source_row = tl.load(row_of_table + 10) + outer * tl.load(row_of_table + 12) + inner - outer * period
    source = source_row.to(tl.int64) * tl.load(row_of_table + 13) + tl.load(row_of_table + 14) + col
    bits = _mix32(source.to(tl.uint32) ^ tl.load(row_of_table + 15).to(tl.uint32))
    bits = _mix32(bits + (source >> 32).to(tl.uint32) + tl.load(row_of_table + 16).to(tl.uint32))
    return _uniform(bits), _uniform(_mix32(bits ^ 0x9E3779B9))


@triton.jit
def _block_scale(magnitudes):
    """Largest magnitude per block: as integers, so that a NaN outranks every number and is kept."""
    bits = magnitudes.to(tl.int32, bitcast=True)
    return tl.max(tl.max(bits, axis=2), axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _looked_up_index(magnitude, steps_ptr, BASE: tl.constexpr, LAST: tl.constexpr, SHIFT: tl.constexpr):
    """The index among magnitudes: one entry per float prefix holds the index at its start and its step."""
    bits = magnitude.to(tl.int32, bitcast=True)
    prefix = tl.minimum(tl.maximum((bits >> SHIFT) - BASE, 0), LAST)
    entry = tl.load(steps_ptr + tl.max_contiguous(prefix, [1, 1, 2]))
    return (entry >> 20) + ((bits & ((1 << SHIFT) - 1)) > (entry & 0xFFFFF)).to(tl.int32)


@triton.jit
def _round_stochastically(normalised, nearest, values_ptr, noise):
    value = tl.load(values_ptr + tl.max_contiguous(nearest, [1, 1, 2]))
    below = tl.maximum(nearest - (value > normalised).to(tl.int32), 0)
    low = tl.load(values_ptr + tl.max_contiguous(below, [1, 1, 2]))
    high = tl.load(values_ptr + tl.max_contiguous(tl.minimum(below + 1, 255), [1, 1, 2]))
    return below + (noise * (high - low) < normalised - low).to(tl.int32)


@triton.jit
def _quantize(values, values_ptr, steps_ptr, noise, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes and scales of (rows, tiles, columns) values; as ``quant.quantize``."""
    scale = _block_scale(tl.abs(values))
    usable = scale > _SMALLEST
    inverse = tl.where(usable, tl.div_rn(1.0, scale), 0.0)
    scale = tl.where(usable | (scale != scale), scale, 0.0)
    normalised = values * inverse[None, :, None]
    if SIGNED:
        index = _looked_up_index(tl.abs(normalised), steps_ptr, (127 - 23) << 6, 23 << 6, 17)
        codes = tl.where(normalised < 0, 127 - tl.minimum(index, 127), 127 + index)
    else:
        codes = _looked_up_index(tl.abs(normalised), steps_ptr, (127 - 23) << 7, 23 << 7, 16)
    if STOCHASTIC:
        codes = _round_stochastically(normalised, codes, values_ptr, noise)
    if not SIGNED:
        codes = tl.where(normalised > 0, tl.maximum(codes, 1), codes)
    return codes.to(tl.uint8), scale


@triton.jit
def _step_kernel(
    table_ptr,
    owner_ptr,
    signed_values_ptr,
    unsigned_values_ptr,
    signed_steps_ptr,
    unsigned_steps_ptr,
    beta1,
    beta1_rest,
    beta2,
    beta2_rest,
    eps,
    step_size,
    root_scale,
    decay_factor,
    l2,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    TILES: tl.constexpr,
    ALIGNED: tl.constexpr,
    FULL: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    L2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    program = tl.program_id(0)
    row_of_table = table_ptr + tl.load(owner_ptr + program).to(tl.int64) * _FIELDS
    param_ptr = tl.load(row_of_table).to(tl.pointer_type(PARAM_DTYPE))
    grad_ptr = tl.load(row_of_table + 1).to(tl.pointer_type(GRAD_DTYPE))
    mean_ptr = tl.load(row_of_table + 2).to(tl.pointer_type(tl.uint8))
    square_ptr = tl.load(row_of_table + 3).to(tl.pointer_type(tl.uint8))
    mean_scales_ptr = tl.load(row_of_table + 4).to(tl.pointer_type(tl.float32))
    square_scales_ptr = tl.load(row_of_table + 5).to(tl.pointer_type(tl.float32))
    cols = tl.load(row_of_table + 6)
    grid_cols = tl.load(row_of_table + 7).to(tl.int32)
    if ALIGNED:
        param_ptr = tl.multiple_of(param_ptr, 16)
        grad_ptr = tl.multiple_of(grad_ptr, 16)
        mean_ptr = tl.multiple_of(mean_ptr, 16)
        square_ptr = tl.multiple_of(square_ptr, 16)
        cols = tl.multiple_of(cols, 16)

    local = program - tl.load(row_of_table + 8).to(tl.int32)
    stretches = (grid_cols + TILES - 1) // TILES
    grid_row = local // stretches
    first_tile = (local - grid_row * stretches) * TILES
    start = grid_row.to(tl.int64) * BLOCK_ROWS * cols + first_tile.to(tl.int64) * BLOCK_COLS
    param_ptr += start
    grad_ptr += start
    mean_ptr += start
    square_ptr += start

    row = tl.arange(0, BLOCK_ROWS)[:, None, None]
    col = tl.arange(0, TILES)[None, :, None] * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, None, :]
    element = tl.max_contiguous(row * cols.to(tl.int32) + col, [1, 1, 4])
    # Rows of blocks are always whole; only the last stretch of a row may be short.
    mask = (col < cols - first_tile.to(tl.int64) * BLOCK_COLS) & (row >= 0)
    if FULL:
        mask = (row >= 0) & (col >= 0)
    tile_index = first_tile + tl.arange(0, TILES)
    tile_mask = tile_index < grid_cols
    tile_index += grid_row * grid_cols

    param = tl.load(param_ptr + element, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + element, mask=mask, other=0.0).to(tl.float32)
    mean_codes = tl.load(mean_ptr + element, mask=mask, other=127).to(tl.int32)
    square_codes = tl.load(square_ptr + element, mask=mask, other=0).to(tl.int32)
    mean_scales = tl.load(mean_scales_ptr + tile_index, mask=tile_mask, other=0.0)
    square_scales = tl.load(square_scales_ptr + tile_index, mask=tile_mask, other=0.0)

    if MAXIMIZE:
        grad = -grad
    if L2:
        grad = grad + param * l2
    mean = tl.load(signed_values_ptr + tl.max_contiguous(mean_codes, [1, 1, 2])) * mean_scales[None, :, None]
    square = (
        tl.load(unsigned_values_ptr + tl.max_contiguous(square_codes, [1, 1, 2]))
        * square_scales[None, :, None]
    )
    mean = mean * beta1 + grad * beta1_rest
    square = square * beta2 + (grad * beta2_rest) * grad
    direction = tl.div_rn(mean, tl.sqrt_rn(square) * root_scale + eps)
    param = param * decay_factor - direction * step_size
    tl.store(param_ptr + element, param.to(PARAM_DTYPE), mask=mask)

    mean_noise, square_noise = direction, direction
    if STOCHASTIC:
        mean_noise, square_noise = _noise(
            row_of_table, grid_row * BLOCK_ROWS + row, first_tile * BLOCK_COLS + col
        )
    mean_codes8, mean_scales = _quantize(
        mean, signed_values_ptr, signed_steps_ptr, mean_noise, True, STOCHASTIC
    )
    square_codes8, square_scales = _quantize(
        square, unsigned_values_ptr, unsigned_steps_ptr, square_noise, False, STOCHASTIC
    )
    tl.store(mean_ptr + element, mean_codes8, mask=mask)
    tl.store(square_ptr + element, square_codes8, mask=mask)
    tl.store(mean_scales_ptr + tile_index, mean_scales, mask=tile_mask)
    tl.store(square_scales_ptr + tile_index, square_scales, mask=tile_mask)


_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class EntryTable:
    """Entries of one kind, described on the device: rebuilt only when a pointer changes."""

    key: tuple[int, ...]
    words: Tensor
    owner: Tensor
    tiles: int
    aligned: bool
    full: bool


def _kernel_cols(entry: BlockEntry) -> tuple[int, int]:
    """Columns and blocks per row as the kernel sees them: runs are one long row."""
    if entry.blocks.grid.tiled:
        return entry.blocks.cols, entry.blocks.grid_cols
    return entry.blocks.numel, entry.blocks.grid_rows


def _tensors(entry: BlockEntry) -> tuple[Tensor, ...]:
    return (
        entry.param,
        entry.grad,
        entry.exp_avg_codes,
        entry.exp_avg_sq_codes,
        entry.exp_avg_scales,
        entry.exp_avg_sq_scales,
    )


def _row_of_table(entry: BlockEntry, first_program: int) -> list[int]:
    blocks, (cols, grid_cols) = entry.blocks, _kernel_cols(entry)
    key0, key1 = entry.noise_key or (0, 0)
    if blocks.grid.tiled:
        source = [blocks.first_row, blocks.row_base, blocks.row_period, blocks.row_stride]
        source += [blocks.grid.cols, blocks.col_base]
    else:  # one row that starts at the first element of the first run
        source = [0, 0, 1, 0, 0, blocks.first_row * blocks.grid.cols]
    shape = [cols, grid_cols, first_program]
    return [t.data_ptr() for t in _tensors(entry)] + shape + source + [key0, key1]


def build_table(entries: Sequence[BlockEntry], tiles: int) -> EntryTable:
    """Describe entries that share dtypes and block shape."""
    words, programs, first = [], [], 0
    for entry in entries:
        words.append(_row_of_table(entry, first))
        tiled = entry.blocks.grid.tiled
        programs.append((entry.blocks.grid_rows if tiled else 1) * -(-_kernel_cols(entry)[1] // tiles))
        first += programs[-1]
    device = entries[0].param.device
    aligned = all(
        _kernel_cols(e)[0] % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in _tensors(e)[:4]) for e in entries
    )
    owner = torch.repeat_interleave(torch.arange(len(entries)), torch.tensor(programs)).to(torch.int32)
    return EntryTable(
        table_key(entries),
        torch.tensor(words, dtype=torch.int64).to(device, non_blocking=True),
        owner.to(device, non_blocking=True),
        tiles,
        aligned,
        all(_kernel_cols(e)[0] % (tiles * e.blocks.grid.block_cols) == 0 for e in entries),
    )


def table_key(entries: Sequence[BlockEntry]) -> tuple[int, ...]:
    """Equal keys mean an equal table: the pointers, and the noise keys where rounding is stochastic."""
    pointers = [t.data_ptr() for e in entries for t in _tensors(e)]
    return (*pointers, *(word for e in entries for word in e.noise_key or ()))


def update_entries(
    entries: Sequence[BlockEntry],
    scalars: AdamScalars,
    cached: EntryTable | None = None,
) -> EntryTable:
    """One step of all ``entries``, alike in dtypes, blocks and scalars; returns the table to reuse."""
    first = entries[0]
    grid, device = first.blocks.grid, first.param.device
    block_numel = grid.block_rows * grid.block_cols
    tiles = max(1, _PROGRAM_NUMEL // block_numel)
    warps = min(_MOST_WARPS, max(1, tiles * block_numel // _WARP_NUMEL))
    table = cached
    if table is None or table.tiles != tiles or table.key != table_key(entries):
        table = build_table(entries, tiles)
    _step_kernel[(table.owner.numel(),)](
        table.words,
        table.owner,
        value_table(True, device),
        value_table(False, device),
        step_table(True, device),
        step_table(False, device),
        scalars.beta1,
        1 - scalars.beta1,
        scalars.beta2,
        1 - scalars.beta2,
        scalars.eps,
        scalars.step_size,
        scalars.root_scale,
        scalars.decay_factor,
        scalars.l2,
        _TL_DTYPES[first.param.dtype],
        _TL_DTYPES[first.grad.dtype],
        grid.block_rows,
        grid.block_cols,
        tiles,
        table.aligned,
        table.full,
        scalars.maximize,
        scalars.l2 != 0,
        first.noise_key is not None,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return table
