# mypy: allow-untyped-defs
"""The kernel of the weight gradients: products of codes turned, summed over the rows of each group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ragged_fsdp.fp8.groups import BLOCK, Groups
from ragged_fsdp.fp8.kernels.launching import Config, described, launched

__all__ = ["weight_gradient"]

WEIGHT_GRADIENT = Config(64, 128, 4, 3, together=16)
_BLOCK = tl.constexpr(BLOCK)


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


def weight_gradient(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    config: Config = WEIGHT_GRADIENT,
) -> Tensor:
    """The weight gradient of ``emulation.weight_gradient``, by a Triton kernel."""
    rows, columns = a.shape[1], b.shape[1]
    out = a.new_empty((groups.size, rows, columns), dtype=dtype)
    if not groups.tiles:
        return out.zero_()
    panels = groups.size > 1
    places = triton.cdiv(rows, config.rows) * triton.cdiv(columns, config.columns * config.parts)
    weight_gradient_kernel[(places * triton.cdiv(groups.size, config.each),)](
        described(a.flatten(0, 1) if panels else a.transpose(0, 1).flatten(1), config.rows),
        described(b.flatten(0, 1) if panels else b.transpose(0, 1).flatten(1), config.columns),
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
        **launched(config),
    )
    return out
