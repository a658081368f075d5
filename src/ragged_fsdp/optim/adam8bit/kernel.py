# mypy: allow-untyped-defs
"""The 8-bit Adam step as one Triton kernel over many parameters, and that of the parameters kept in fp32.

A program owns up to ``ROUNDS * TILES`` neighbouring blocks in one row of blocks of a parameter, ``TILES`` at
a time: it reads weights, gradients, codes and scales once, and writes weights, codes and scales once.
Parameters are found through a table of pointers (``launch``), so a step is one launch per kind of
parameter however many there are.

The arithmetic is that of ``reference``, operation for operation: contraction to fused
multiply-adds is off and reciprocal and root round correctly, so the results are equal bit by bit.
Codes and values are computed (``codes``) from a few constants by octave: looking up 256 values and all float
prefixes took twice as long with stochastic rounding. A GPU issues integer operations, comparisons and
selections at half the rate of multiplications and additions, and they were what bound this kernel: so an
index of the map is a float here, and its sign and its rounding are float operations. All tensors of a program
keep one register layout, four neighbours per thread: without the ``max_contiguous`` hints the byte loads and
the lookups would get layouts of their own, and every value would travel through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ragged_fsdp.optim.adam8bit.codes import (
    CELL_OFFSET,
    LARGEST_SQUARE,
    SMALLEST_SCALE,
    SMALLEST_SQUARE,
    one_edge,
)

__all__ = ["FIELDS", "exact_step_kernel", "step_kernel"]

FIELDS = tl.constexpr(14)
"""int64 words per parameter in the table of ``step_kernel``; ``launch`` writes them."""
_SMALLEST = tl.constexpr(SMALLEST_SCALE)
_OFFSET = tl.constexpr(CELL_OFFSET)
_SIGNED_ONE_EDGE = tl.constexpr(one_edge(True))
_UNSIGNED_ONE_EDGE = tl.constexpr(one_edge(False))
_SMALLEST_SQUARE = tl.constexpr(SMALLEST_SQUARE)
_LARGEST_SQUARE = tl.constexpr(LARGEST_SQUARE)
_ROUNDER = tl.constexpr(8388608.0)  # 2^23, whose bits are 0x4B000000: adding it rounds to an integer
_SIGN = tl.constexpr(-2147483648)


@triton.jit
def _mix32(state):
    state = (state ^ (state >> 16)) * 0x7FEB352D
    state = (state ^ (state >> 15)) * 0x846CA68B
    return state ^ (state >> 16)


@triton.jit
def _uniform(bits):
    number = (bits | 0x4B000000).to(tl.int32).to(tl.float32, bitcast=True) - _ROUNDER  # cheaper than a cast
    return (number + 0.5) * 1.52587890625e-05  # 2^-16


@triton.jit
def _noise(table_row, row, col, tile, key0, key1, RUNS: tl.constexpr):
    """Uniform numbers of both moments at local rows, columns and tiles; as ``quant.rounding_noise``."""
    inner = tl.load(table_row + 8).to(tl.int32) + (tile if RUNS else row)
    period = tl.load(table_row + 10).to(tl.int32)
    outer = inner // period
    stride, base = tl.load(table_row + 11).to(tl.int32), tl.load(table_row + 9).to(tl.int32)
    source_row = base + outer * stride + inner - outer * period
    source_col = col + tl.load(table_row + 12).to(tl.int32)
    salted = key1.to(tl.uint32) + tl.load(table_row + 13).to(tl.uint32)
    of_row = _mix32(_mix32(source_row.to(tl.uint32) ^ key0.to(tl.uint32)) + salted)
    bits = _mix32(of_row + source_col.to(tl.uint32) * 0x9E3779B9)
    return _uniform(bits >> 16), _uniform(bits & 0xFFFF)


@triton.jit
def _block_scale(magnitudes):
    """Largest magnitude per block: as integers, so that a NaN outranks every number and is kept."""
    bits = magnitudes.to(tl.int32, bitcast=True)
    return tl.max(tl.max(bits, axis=2), axis=0).to(tl.float32, bitcast=True)


@triton.jit
def _float_of_byte(byte):
    """2^23 + the byte."""
    return (byte.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _with_sign_of(magnitude, signed):
    """The magnitude, negated where the other float has a sign."""
    sign = signed.to(tl.int32, bitcast=True) & _SIGN
    return (magnitude.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
def _negated(x):
    """``-x`` by an instruction's operand modifier; a minus sign would be a subtraction from zero."""
    return (x.to(tl.int32, bitcast=True) ^ _SIGN).to(tl.float32, bitcast=True)


@triton.jit
def _value(middle, widths_ptr):
    """The magnitude of k, given as k + 1/2; as ``quant.value_of_index``."""
    bits = middle.to(tl.int32, bitcast=True)
    cells = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    width = tl.load(widths_ptr + tl.max_contiguous((bits >> 23) - 126, [1, 1, 2]))
    return tl.fma(cells, -_OFFSET, middle) * width


@triton.jit
def _dequantize(codes, scale, widths_ptr, SIGNED: tl.constexpr):
    if SIGNED:
        index = _float_of_byte(codes) - (_ROUNDER + 127)
        value = _with_sign_of(_value(tl.abs(index) + 0.5, widths_ptr), index)
    else:
        value = _value(_float_of_byte(codes) - (_ROUNDER - 1.5), widths_ptr)
    return value * scale[None, :, None]


@triton.jit
def _nearest_index(magnitude, lines_ptr, SIGNED: tl.constexpr):
    """k of the nearest value; as ``quant.nearest_index``. A NaN has the last k."""
    octave = magnitude.to(tl.int32, bitcast=True) >> 23
    line = tl.load(lines_ptr + tl.max_contiguous(octave, [1, 1, 2]))  # a slope and an offset
    slope = line.to(tl.int32).to(tl.float32, bitcast=True)
    offset = (line >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    here = tl.fma(magnitude, slope, offset)
    beyond = tl.fma(here, 0.2, tl.fma(offset, 1.8, 0.5))
    end = tl.fma(offset, 2.25, 1.625)
    k = tl.where(here >= end, beyond, tl.minimum(here, end - 1.5))
    index = (k + _ROUNDER) - _ROUNDER
    if SIGNED:
        return tl.where(magnitude <= _SIGNED_ONE_EDGE, index, 128.0)
    else:
        return tl.where(magnitude <= _UNSIGNED_ONE_EDGE, _never_zero(index, magnitude), 256.0)


@triton.jit
def _never_zero(index, magnitude):
    """The code of a second moment, in which a magnitude that is not zero does not become zero."""
    return tl.where(magnitude == 0, 1.0, tl.maximum(index, 2.0))


@triton.jit
def _round_stochastically(magnitude, index, widths_ptr, noise, SIGNED: tl.constexpr):
    magnitude = tl.minimum(magnitude, 1.0)
    nearest = _value(index + 0.5, widths_ptr)
    onwards = tl.where(magnitude >= nearest, 1.0, -1.0)
    other = _value(index + onwards + 0.5, widths_ptr)
    moves = noise * tl.abs(other - nearest) < tl.abs(magnitude - nearest)
    index = tl.where(moves, index + onwards, index)
    if not SIGNED:
        index = _never_zero(index, magnitude)
    return index


@triton.jit
def _quantize(values, maps, noise, SIGNED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Codes and scales of (rows, tiles, columns) values; as ``codes.quantize``."""
    magnitudes = tl.abs(values) if SIGNED else values
    scale = _block_scale(magnitudes)
    usable = scale > _SMALLEST
    inverse = tl.where(usable, tl.div_rn(1.0, scale), 0.0)
    scale = tl.where(usable | (scale != scale), scale, 0.0)
    magnitudes = magnitudes * inverse[None, :, None]
    index = _nearest_index(magnitudes, maps[1], SIGNED)
    if STOCHASTIC:
        index = _round_stochastically(magnitudes, index, maps[0], noise, SIGNED)
    if SIGNED:  # the sign of a product, because that of a NaN is always the same
        index = tl.maximum(_with_sign_of(index, values * inverse[None, :, None]), -127.0)
    codes = index + (_ROUNDER + 127 if SIGNED else _ROUNDER - 1)
    return codes.to(tl.int32, bitcast=True).to(tl.uint8), scale


@triton.jit
def _load(pointer, mask, other, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=other)


@triton.jit
def _store(pointer, value, mask, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer, value)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def _root(x):
    """The correctly rounded root of a number clamped as in the reference; a NaN stays one.

    The steps of ``sqrt.rn`` without its branch to a slow path, which would keep elements from overlapping.
    """
    x = tl.maximum(x, _SMALLEST_SQUARE, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, _LARGEST_SQUARE, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.rsqrt(x)
    root = x * inverse
    return tl.fma(tl.fma(_negated(root), root, x), inverse * 0.5, root)


@triton.jit
def _reciprocal(x):
    """The correctly rounded reciprocal of a number far from overflow: ``rcp.rn`` without its slow path."""
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(guess, tl.fma(_negated(x), guess, 1.0), guess)


@triton.jit
def _adam(param, grad, mean, square, scalars, MAXIMIZE: tl.constexpr, L2: tl.constexpr):
    """New weights and moments; as ``adam_direction`` and ``prepared_grad`` of the reference."""
    beta1, beta1_rest, beta2, beta2_rest, eps, step_size, root_scale, decay_factor, l2 = scalars
    if MAXIMIZE:
        grad = -grad
    if L2:
        grad = grad + param * l2
    mean = mean * beta1 + grad * beta1_rest
    square = square * beta2 + (grad * beta2_rest) * grad
    direction = mean * _reciprocal(_root(square) * root_scale + eps)
    return param * decay_factor - direction * step_size, mean, square


@triton.jit
def _tensors(table_row, grad_ptr, PARAM_DTYPE: tl.constexpr, GRAD_DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointers to weights, gradients and codes of both moments, and to the scales of both; columns."""
    param_ptr = tl.load(table_row).to(tl.pointer_type(PARAM_DTYPE))
    grad_ptr = tl.load(grad_ptr).to(tl.pointer_type(GRAD_DTYPE))
    mean_ptr = tl.load(table_row + 1).to(tl.pointer_type(tl.uint8))
    square_ptr = tl.load(table_row + 2).to(tl.pointer_type(tl.uint8))
    mean_scales_ptr = tl.load(table_row + 3).to(tl.pointer_type(tl.float32))
    square_scales_ptr = tl.load(table_row + 4).to(tl.pointer_type(tl.float32))
    cols = tl.load(table_row + 5)
    if ALIGNED:
        param_ptr = tl.multiple_of(param_ptr, 16)
        grad_ptr = tl.multiple_of(grad_ptr, 16)
        mean_ptr = tl.multiple_of(mean_ptr, 16)
        square_ptr = tl.multiple_of(square_ptr, 16)
        cols = tl.multiple_of(cols, 16)
    return (param_ptr, grad_ptr, mean_ptr, square_ptr), (mean_scales_ptr, square_scales_ptr), cols


@triton.jit
def _update(
    tensors,  # pointers at the first element, as _tensors gives them
    scales,  # pointers at the first block
    element,
    tile,
    masks,  # of elements and of tiles
    maps,  # pointers to cell widths and lines of the signed map, then of the unsigned
    scalars,
    noise,
    FULL: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    L2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Read, step and write a few neighbouring blocks."""
    param_ptr, grad_ptr, mean_ptr, square_ptr = tensors
    mean_scales_ptr, square_scales_ptr = scales
    mask, tile_mask = masks
    param = _load(param_ptr + element, mask, 0.0, FULL).to(tl.float32)
    grad = _load(grad_ptr + element, mask, 0.0, FULL).to(tl.float32)
    mean_codes = _load(mean_ptr + element, mask, 127, FULL)
    square_codes = _load(square_ptr + element, mask, 0, FULL)
    mean_scales = _load(mean_scales_ptr + tile, tile_mask, 0.0, FULL)
    square_scales = _load(square_scales_ptr + tile, tile_mask, 0.0, FULL)

    signed, unsigned = (maps[0], maps[1]), (maps[2], maps[3])
    mean = _dequantize(mean_codes, mean_scales, signed[0], True)
    square = _dequantize(square_codes, square_scales, unsigned[0], False)
    param, mean, square = _adam(param, grad, mean, square, scalars, MAXIMIZE, L2)
    _store(param_ptr + element, param.to(param_ptr.dtype.element_ty), mask, FULL)
    mean_codes, mean_scales = _quantize(mean, signed, noise[0], True, STOCHASTIC)
    square_codes, square_scales = _quantize(square, unsigned, noise[1], False, STOCHASTIC)
    _store(mean_ptr + element, mean_codes, mask, FULL)
    _store(square_ptr + element, square_codes, mask, FULL)
    _store(mean_scales_ptr + tile, mean_scales, tile_mask, FULL)
    _store(square_scales_ptr + tile, square_scales, tile_mask, FULL)


@triton.jit(do_not_specialize=["key0", "key1"])  # they change every step: no kernel of their own for each
def step_kernel(
    table_ptr,
    grads_ptr,
    owner_ptr,
    maps,
    scalars,
    key0,
    key1,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    TILES: tl.constexpr,
    ROUNDS: tl.constexpr,
    RUNS: tl.constexpr,
    ALIGNED: tl.constexpr,
    FULL: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    L2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """One step of quantised parameters; ``adam8bit_launch`` writes the tables."""
    program = tl.program_id(0)
    entry = tl.load(owner_ptr + program).to(tl.int64)
    table_row = table_ptr + entry * FIELDS
    tensors, scales, cols = _tensors(table_row, grads_ptr + entry, PARAM_DTYPE, GRAD_DTYPE, ALIGNED)
    grid_cols = tl.load(table_row + 6).to(tl.int32)
    local = program - tl.load(table_row + 7).to(tl.int32)
    stretches = (grid_cols + TILES * ROUNDS - 1) // (TILES * ROUNDS)
    grid_row = local // stretches
    first_tile = (local - grid_row * stretches) * (TILES * ROUNDS)
    scales = (scales[0] + grid_row * grid_cols, scales[1] + grid_row * grid_cols)

    row = tl.arange(0, BLOCK_ROWS)[:, None, None]
    tile = tl.arange(0, TILES)[None, :, None]
    in_tile = tl.arange(0, BLOCK_COLS)[None, None, :]
    col = tile * BLOCK_COLS + in_tile
    element = tl.max_contiguous(row * cols.to(tl.int32) + col, [1, 1, 4])
    for tile_start in range(first_tile, tl.minimum(first_tile + TILES * ROUNDS, grid_cols), TILES):
        first_col = tl.cast(tile_start, tl.int64) * BLOCK_COLS
        start = grid_row.to(tl.int64) * BLOCK_ROWS * cols + first_col
        here = (tensors[0] + start, tensors[1] + start, tensors[2] + start, tensors[3] + start)
        # Rows of blocks are always whole; only the last stretch of a row may be short.
        mask = (col < cols - first_col) & (row >= 0)
        tiles = tile_start + tl.arange(0, TILES)
        noise = (0.0, 0.0)
        if STOCHASTIC:
            in_row = in_tile if RUNS else tile_start * BLOCK_COLS + col
            first_row = grid_row * BLOCK_ROWS
            noise = _noise(table_row, first_row + row, in_row, tile_start + tile, key0, key1, RUNS)
        masks = (mask, tiles < grid_cols)
        _update(here, scales, element, tiles, masks, maps, scalars, noise, FULL, MAXIMIZE, L2, STOCHASTIC)


@triton.jit
def exact_step_kernel(
    table_ptr,
    grads_ptr,
    owner_ptr,
    scalars,
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    L2: tl.constexpr,
):
    """One step of parameters whose moments are fp32: a row of the table is weights, moments, numel, start."""
    program = tl.program_id(0)
    entry = tl.load(owner_ptr + program).to(tl.int64)
    table_row = table_ptr + entry * 5
    param_ptr = tl.load(table_row).to(tl.pointer_type(PARAM_DTYPE))
    grad_ptr = tl.load(grads_ptr + entry).to(tl.pointer_type(GRAD_DTYPE))
    mean_ptr = tl.load(table_row + 1).to(tl.pointer_type(tl.float32))
    square_ptr = tl.load(table_row + 2).to(tl.pointer_type(tl.float32))
    block = program - tl.load(table_row + 4).to(tl.int32)
    element = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < tl.load(table_row + 3)
    param = tl.load(param_ptr + element, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + element, mask=mask, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + element, mask=mask, other=0.0)
    square = tl.load(square_ptr + element, mask=mask, other=0.0)
    param, mean, square = _adam(param, grad, mean, square, scalars, MAXIMIZE, L2)
    tl.store(param_ptr + element, param.to(PARAM_DTYPE), mask=mask)
    tl.store(mean_ptr + element, mean, mask=mask)
    tl.store(square_ptr + element, square, mask=mask)
