"""The sum of rows that arrived from several ranks: in fp32 at least, rounded once.

A sum runs beside the products of the next layer, on a stream of its own, and takes multiprocessors and the
memory's rate from them for as long as it lasts. So on a GPU it is one kernel
(:mod:`ragged_fsdp.fsdp.reduce.sums_triton`) that reads every row once, at nearly the rate of a copy (4.0 of
4.2 TB/s on an H200, where ``torch.sum`` has 3.3); what is here is what that must equal.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

__all__ = ["sum_rows", "sum_rows_reference"]

_IN_KERNEL = (torch.float32, torch.bfloat16, torch.float16)


def sum_rows(rows: torch.Tensor, out: torch.Tensor, divisor: float = 1.0) -> None:
    """``out = rows.sum(0) / divisor``; rows (m, n) are contiguous, and so is ``out`` (n,)."""
    if not out.numel():
        return
    kernels = _kernels() if rows.is_cuda and {rows.dtype, out.dtype}.issubset(_IN_KERNEL) else None
    if kernels is None:
        sum_rows_reference(rows, out, divisor)
    else:
        kernels.sum_rows(rows, out, divisor)


def sum_rows_reference(rows: torch.Tensor, out: torch.Tensor, divisor: float = 1.0) -> None:
    """Sum rows by torch's functions: two kernels, and memory for the sum, where ``out`` is narrower."""
    if out.dtype.itemsize >= torch.float32.itemsize:
        torch.sum(rows, 0, dtype=out.dtype, out=out)
        if divisor != 1:
            out.div_(divisor)
        return
    out.copy_(rows.sum(0, dtype=torch.float32).div_(divisor))


@cache
def _kernels() -> ModuleType | None:
    if find_spec("triton") is None:
        return None
    from ragged_fsdp.fsdp.reduce import sums_triton

    return sums_triton
