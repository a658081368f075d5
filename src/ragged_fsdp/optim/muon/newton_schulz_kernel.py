"""Newton-Schulz on Hopper-class GPUs with kernels that compute a symmetric product once.

One iteration is ``A = X X^T``, ``P = a I + b A + c A A``, ``X <- P X`` for the short side of X on
the left. A and P are symmetric, so two of the three products need only the tiles on and below the
diagonal; each tile below it is stored twice, the second time transposed:

    tile columns ->  0     1     2        . = computed and stored
    tile row 0       .     m     m        m = the transpose of the computed tile
    tile row 1       .     .     m
    tile row 2       .     .     .

That leaves ``3 m^2 n + m^3`` operations of ``4 m^2 n + 2 m^3``. Further savings:

* ``a I`` is part of P, so the third product does not add X and reads it once.
* The input is never scaled by itself: its squared norm is the trace of the first A (summed per diagonal
  tile in a fixed order, so results repeat bit by bit), and the scale goes into the products that follow.
* Two iterations of a long matrix touch X once. All matrices involved are polynomials of A, so the next A
  is ``P A P`` and the two steps together are ``X <- (P' P) X``: ``3 m^2 n + 5 m^3`` for two iterations
  instead of ``6 m^2 n + 2 m^3``. Rounding in A can make its small eigenvalues slightly negative, and
  ``P A P`` multiplies those by about ``a^2`` per iteration; after one such step that is far below what would
  matter, after four the iteration diverges, hence pairs and no longer runs, and only for small ``a``.

This module imports Triton and is itself imported only where Triton is to be used.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["ALIGNMENT", "Terms", "TileConfig", "gram", "orthogonalize_symmetric", "symmetric_product"]

ALIGNMENT = 8
"""Rows and columns must be multiples of this: a tile is moved by the tensor memory engine, whose
strides are multiples of 16 bytes."""

_GROUP_ROWS = 8  # tile rows visited together, so that tiles running at one time share operands in L2
_PAIR_ASPECT = 1.5  # how much longer than short a matrix must be for paired iterations to pay
_PAIR_LARGEST_A = 4.0  # see the module's description; the usual coefficient is 3.4445

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class TileConfig:
    """How one symmetric product is cut: square output tiles, depth per step, pipeline of a program."""

    side: int
    depth: int
    stages: int
    warps: int


@dataclass(frozen=True)
class Terms:
    """``identity * I + addend * D + product * L R``, and the power of the inverse norm on each term."""

    identity: float = 0.0
    addend: float = 0.0
    product: float = 1.0
    powers: tuple[int, int, int] = (0, 0, 0)


_TILES = TileConfig(128, 64, 4, 4)
_SHALLOW_TILES = TileConfig(128, 64, 3, 4)
"""For products of square matrices: two programs fit on a multiprocessor, one computing while one stores."""


@triton.jit
def _triangle_tile(tiles, tiles_per_matrix):
    """The matrix, tile row and tile column of this program."""
    program = tl.program_id(0)
    code = tl.load(tiles + program % tiles_per_matrix)
    return program // tiles_per_matrix, code // 65536, code % 65536


@triton.jit
def _store_both(out, value, matrix, row, column, SIDE: tl.constexpr):
    """Store a tile, and its transpose unless it lies on the diagonal."""
    out.store([matrix, row * SIDE, column * SIDE], value.reshape(1, SIDE, SIDE))
    if column < row:
        out.store([matrix, column * SIDE, row * SIDE], value.T.reshape(1, SIDE, SIDE))


@triton.jit
def _gram_kernel(
    x,
    out,
    traces,  # (matrices, tile rows) fp32: the sum of the diagonal inside each tile row
    tiles,
    tiles_per_matrix,
    tile_rows,
    depth,
    TALL: tl.constexpr,  # X is stored transposed, as (depth, rows)
    TRACE: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
):
    matrix, row, column = _triangle_tile(tiles, tiles_per_matrix)
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for k in range(0, depth, STEP):
        if TALL:
            a = x.load([matrix, k, row * SIDE]).reshape(STEP, SIDE)
            b = x.load([matrix, k, column * SIDE]).reshape(STEP, SIDE)
            total = tl.dot(a.T, b, total)
        else:
            a = x.load([matrix, row * SIDE, k]).reshape(SIDE, STEP)
            b = x.load([matrix, column * SIDE, k]).reshape(SIDE, STEP)
            total = tl.dot(a, b.T, total)
    if TRACE and column == row:
        index = tl.arange(0, SIDE)
        diagonal = tl.where(index[:, None] == index[None, :], total, 0.0)
        # one sum: Triton 3.6 cannot compile a sum of sums of a product for Blackwell
        tl.store(traces + matrix * tile_rows + row, tl.sum(diagonal))
    _store_both(out, total.to(tl.bfloat16), matrix, row, column, SIDE)


@triton.jit
def _power(base, EXPONENT: tl.constexpr):
    value = base * 0.0 + 1.0
    for _ in tl.static_range(EXPONENT):
        value *= base
    return value


@triton.jit
def _product_kernel(
    left,
    right,  # None: the same as left
    addend,  # descriptor of D, blocks of the output tile; None without the first two terms
    out,
    traces,
    tiles,
    tiles_per_matrix,
    tile_rows,
    size,  # of the matrices
    identity_factor,
    addend_factor,
    product_factor,
    min_norm,
    SQUARE: tl.constexpr,  # whether right is left
    ADD: tl.constexpr,  # whether there are the first two terms
    IDENTITY_POWER: tl.constexpr,
    ADDEND_POWER: tl.constexpr,
    PRODUCT_POWER: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
    TRACES: tl.constexpr,
):
    matrix, row, column = _triangle_tile(tiles, tiles_per_matrix)
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for k in range(0, size, STEP):
        a = left.load([matrix, row * SIDE, k]).reshape(SIDE, STEP)
        if SQUARE:
            b = left.load([matrix, column * SIDE, k]).reshape(SIDE, STEP)
        else:
            b = right.load([matrix, column * SIDE, k]).reshape(SIDE, STEP)
        total = tl.dot(a, b.T, total)
    if IDENTITY_POWER + ADDEND_POWER + PRODUCT_POWER > 0:
        index = tl.arange(0, TRACES)
        squares = tl.sum(tl.load(traces + matrix * tile_rows + index, mask=index < tile_rows, other=0.0), 0)
        scale = 1.0 / tl.maximum(tl.sqrt(squares), min_norm)
        identity_factor *= _power(scale, IDENTITY_POWER)
        addend_factor *= _power(scale, ADDEND_POWER)
        product_factor *= _power(scale, PRODUCT_POWER)
    total = total * product_factor
    if ADD:
        added = addend.load([matrix, row * SIDE, column * SIDE]).reshape(SIDE, SIDE)
        total += added.to(tl.float32) * addend_factor
        index = tl.arange(0, SIDE)
        on_diagonal = (index[:, None] == index[None, :]) & (row == column)
        total += tl.where(on_diagonal, identity_factor, 0.0)
    _store_both(out, total.to(tl.bfloat16), matrix, row, column, SIDE)


@lru_cache(maxsize=256)
def _tile_table(size: int, side: int, device: torch.device) -> Tensor:
    """Tiles on and below the diagonal, ``row * 65536 + column``, in an order that reuses operands."""
    tile_rows = triton.cdiv(size, side)
    codes = [
        row * 65536 + column
        for first in range(0, tile_rows, _GROUP_ROWS)
        for column in range(min(first + _GROUP_ROWS, tile_rows))
        for row in range(max(first, column), min(first + _GROUP_ROWS, tile_rows))
    ]
    return torch.tensor(codes, dtype=torch.int32, device=device)


def _descriptor(tensor: Tensor, *block: int) -> Any:
    # Encoding a descriptor is most of the host's time per launch; hence few of them per kernel.
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, *block])


def gram(
    x: Tensor, out: Tensor, traces: Tensor, *, tall: bool, trace: bool, config: TileConfig = _TILES
) -> None:
    """``out = X X^T`` for a batch (matrices, m, n), or ``X^T X`` if ``tall``; fills ``traces`` on request."""
    size, depth = (x.shape[2], x.shape[1]) if tall else (x.shape[1], x.shape[2])
    tiles = _tile_table(size, config.side, x.device)
    block = (config.depth, config.side) if tall else (config.side, config.depth)
    _gram_kernel[(x.shape[0] * tiles.numel(),)](
        _descriptor(x, *block),
        _descriptor(out, config.side, config.side),
        traces,
        tiles,
        tiles.numel(),
        traces.shape[1],
        depth,
        TALL=tall,
        TRACE=trace,
        SIDE=config.side,
        STEP=config.depth,
        num_stages=config.stages,
        num_warps=config.warps,
    )


def symmetric_product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    traces: Tensor,
    terms: Terms,
    min_norm: float,
    *,
    config: TileConfig = _SHALLOW_TILES,
) -> None:
    """``out`` = the terms, with D = ``left``, for symmetric matrices whose product is symmetric too."""
    tiles = _tile_table(left.shape[1], config.side, left.device)
    add = bool(terms.identity or terms.addend)
    _product_kernel[(left.shape[0] * tiles.numel(),)](
        _descriptor(left, config.side, config.depth),
        None if right is left else _descriptor(right, config.side, config.depth),
        _descriptor(left, config.side, config.side) if add else None,
        _descriptor(out, config.side, config.side),
        traces,
        tiles,
        tiles.numel(),
        traces.shape[1],
        left.shape[1],
        terms.identity,
        terms.addend,
        terms.product,
        min_norm,
        SQUARE=right is left,
        ADD=add,
        IDENTITY_POWER=terms.powers[0],
        ADDEND_POWER=terms.powers[1],
        PRODUCT_POWER=terms.powers[2],
        SIDE=config.side,
        STEP=config.depth,
        TRACES=triton.next_power_of_2(traces.shape[1]),
        num_stages=config.stages,
        num_warps=config.warps,
    )


def _rounds(coefficients: tuple[Triple, ...], aspect: float) -> list[tuple[Triple, ...]]:
    """Iterations that touch X together: pairs for long matrices, else one by one."""
    rounds: list[tuple[Triple, ...]] = []
    left = list(coefficients)
    while left:
        pair = aspect >= _PAIR_ASPECT and len(left) > 1 and abs(left[0][0]) <= _PAIR_LARGEST_A
        size = 2 if pair else 1
        rounds.append(tuple(left[:size]))
        left = left[size:]
    return rounds


def orthogonalize_symmetric(x: Tensor, coefficients: tuple[Triple, ...], min_norm: float) -> Tensor:
    """Newton-Schulz on a contiguous bf16 batch (matrices, rows, columns); one triple per iteration.

    ``x`` is used as scratch memory: its contents are lost.
    """
    matrices, rows, columns = x.shape
    tall = rows > columns
    side, length = sorted((rows, columns))
    rounds = _rounds(coefficients, length / side)
    products = x.new_empty(4 if any(len(r) > 1 for r in rounds) else 2, matrices, side, side)
    scratch = products.unbind()
    traces = torch.empty(matrices, triton.cdiv(side, _TILES.side), dtype=torch.float32, device=x.device)
    current, other = x, torch.empty_like(x)
    for index, triples in enumerate(rounds):
        gram(current, scratch[0], traces, tall=tall, trace=index == 0)
        if len(triples) == 1:
            factor = _one_step(scratch, traces, triples[0], min_norm, scaled=index == 0)
        else:
            factor = _two_steps(scratch, traces, triples, min_norm, scaled=index == 0)
        if tall:
            torch.bmm(current, factor, out=other)
        else:
            torch.bmm(factor, current, out=other)
        current, other = other, current
    return current


def _one_step(
    scratch: tuple[Tensor, ...], traces: Tensor, triple: Triple, min_norm: float, *, scaled: bool
) -> Tensor:
    """P from A in ``scratch[0]``. ``scaled``: A and X belong to an input not yet divided by its norm."""
    terms = Terms(*triple, powers=(1, 3, 5) if scaled else (0, 0, 0))
    symmetric_product(scratch[0], scratch[0], scratch[1], traces, terms, min_norm)
    return scratch[1]


def _two_steps(
    scratch: tuple[Tensor, ...], traces: Tensor, triples: tuple[Triple, ...], min_norm: float, *, scaled: bool
) -> Tensor:
    """P' P from A in ``scratch[0]``, where P' belongs to the next A, which is P A P."""
    a, p, half, last = scratch
    powers = [(0, 2, 4), (0, 0, 2), (0, 0, 1)] if scaled else [(0, 0, 0)] * 3
    symmetric_product(a, a, p, traces, Terms(*triples[0], powers=powers[0]), min_norm)
    symmetric_product(p, a, half, traces, Terms(powers=powers[1]), min_norm)
    symmetric_product(half, p, a, traces, Terms(), min_norm)
    symmetric_product(a, a, half, traces, Terms(*triples[1]), min_norm)
    symmetric_product(half, p, last, traces, Terms(powers=powers[2]), min_norm)
    return last
