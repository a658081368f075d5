# mypy: allow-untyped-defs
"""The sum of rows as a Triton kernel: one pass over them, at the rate of the memory.

A program adds ``BLOCK`` columns. Each of its threads reads 16 bytes of a row at a time, where rows are
aligned. Rows are added one after the other, in fp32, so a sum has the same bits in every run, whatever
``BLOCK`` is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["sum_rows"]

_BLOCK = 2048
_WARPS = 8
_AHEAD = 8


@triton.jit
def _sum_rows_kernel(
    rows_ptr, out_ptr, numel, rows, stride, factor, AHEAD: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    row_ptr = rows_ptr + at
    for first in range(0, rows, AHEAD):
        for ahead in tl.static_range(AHEAD):
            there = tl.where(first + ahead < rows, numel, 0)
            total += tl.load(row_ptr, mask=at < there, other=0.0).to(tl.float32)
            row_ptr += stride
    tl.store(out_ptr + at, (total * factor).to(out_ptr.dtype.element_ty), mask=at < numel)


def sum_rows(rows: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
    """``out = rows.sum(0) / divisor``, as torch divides by a number on a GPU: times its reciprocal."""
    count, numel = rows.shape
    _sum_rows_kernel[(triton.cdiv(numel, _BLOCK),)](
        rows, out, numel, count, rows.stride(0), 1 / divisor, AHEAD=_AHEAD, BLOCK=_BLOCK, num_warps=_WARPS
    )
