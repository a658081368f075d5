"""The element-wise passes of Muon as two Triton kernels over a table of pieces: one launch per pass.

A launch gets a table with one row per piece (addresses, element count) and a list of (piece, chunk)
pairs, one per program. Addresses of gradients may change from step to step, so the table is sent anew,
from pinned memory, without waiting; the chunk lists depend on sizes only and are kept.

Imported only where Triton is to be used.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from ragged_fsdp.optim.muon.passes import Strided

__all__ = ["launch_apply", "launch_apply_rows", "launch_momentum", "launch_momentum_rows"]

Integers = npt.NDArray[np.int64]
Row = tuple[int, int, int, int]

_BLOCK = 4096
_ALIGNED_ELEMENTS = 16
_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def _lerp(start, end, weight):
    # torch's formula: exact at both ends
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def _typed(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _extent(row, chunks, numel_column: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Element offsets of this program inside its piece, and which of them exist."""
    chunk = tl.load(chunks + 2 * tl.program_id(0) + 1).to(tl.int64)
    numel = tl.load(row + numel_column)
    if ALIGNED:
        numel = tl.multiple_of(numel, 16)
    offsets = chunk * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < numel


@triton.jit
def _momentum_kernel(
    table,  # rows: gradient, buffer, target (0: none), numel
    chunks,
    momentum,
    GRADIENT: tl.constexpr,
    BUFFER: tl.constexpr,
    TARGET: tl.constexpr,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + 4 * tl.load(chunks + 2 * tl.program_id(0))
    offsets, exists = _extent(row, chunks, 3, BLOCK, ALIGNED)
    buffer = _typed(tl.load(row + 1), BUFFER, ALIGNED)
    gradient = tl.load(_typed(tl.load(row), GRADIENT, ALIGNED) + offsets, mask=exists).to(tl.float32)
    held = tl.load(buffer + offsets, mask=exists).to(tl.float32)
    held = _lerp(held, gradient, 1.0 - momentum).to(BUFFER)
    tl.store(buffer + offsets, held, mask=exists)
    target = tl.load(row + 2)
    if target != 0:
        update = held.to(tl.float32)
        if NESTEROV:
            update = _lerp(gradient, update, momentum).to(BUFFER).to(tl.float32)
        tl.store(_typed(target, TARGET, ALIGNED) + offsets, update.to(TARGET), mask=exists)


@triton.jit
def _apply_kernel(
    table,  # rows: parameter, update, step (the bits of a double), numel
    chunks,
    decay,
    PARAMETER: tl.constexpr,
    UPDATE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + 4 * tl.load(chunks + 2 * tl.program_id(0))
    offsets, exists = _extent(row, chunks, 3, BLOCK, ALIGNED)
    parameter = _typed(tl.load(row), PARAMETER, ALIGNED)
    update = tl.load(_typed(tl.load(row + 1), UPDATE, ALIGNED) + offsets, mask=exists).to(tl.float32)
    step = tl.load(row + 2).to(tl.float64, bitcast=True).to(tl.float32)
    value = tl.load(parameter + offsets, mask=exists).to(tl.float32)
    tl.store(parameter + offsets, (value * decay - step * update).to(PARAMETER), mask=exists)


@lru_cache(maxsize=1024)
def _chunk_list(numels: tuple[int, ...], device: torch.device) -> Tensor:
    pairs = [(i, c) for i, numel in enumerate(numels) for c in range(-(-numel // _BLOCK))]
    return torch.tensor(pairs, dtype=torch.int32, device=device).flatten()


def _table(rows: Integers, device: torch.device) -> Tensor:
    return torch.from_numpy(rows).pin_memory().to(device, non_blocking=True)


def _aligned(rows: Integers, address_columns: int) -> bool:
    addresses = not (rows[:, :address_columns] % 16).any()
    return bool(addresses and not (rows[:, 3] % _ALIGNED_ELEMENTS).any())


def launch_momentum(
    gradients: list[Strided],
    buffers: list[Strided],
    targets: list[Strided | None],
    momentum: float,
    nesterov: bool,
) -> None:
    """:func:`ragged_fsdp.optim.muon.passes.update_momentum` for contiguous pieces on CUDA."""
    by_dtype: dict[tuple[torch.dtype, torch.dtype, torch.dtype], list[Row]] = {}
    for gradient, buffer, target in zip(gradients, buffers, targets):
        written = target.tensor.dtype if target is not None else torch.bfloat16
        row = (gradient.address, buffer.address, target.address if target is not None else 0, gradient.numel)
        by_dtype.setdefault((gradient.tensor.dtype, buffer.tensor.dtype, written), []).append(row)
    for dtypes, rows in by_dtype.items():
        launch_momentum_rows(np.array(rows), dtypes, gradients[0].tensor.device, momentum, nesterov)


def launch_momentum_rows(
    rows: Integers,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
    momentum: float,
    nesterov: bool,
) -> None:
    """The momentum pass over rows (gradient, buffer, target, numel) of these dtypes."""
    chunks = _chunk_list(tuple(rows[:, 3].tolist()), device)
    gradient, buffer, target = (_DTYPES[dtype] for dtype in dtypes)
    _momentum_kernel[(chunks.numel() // 2,)](
        _table(rows, device),
        chunks,
        momentum,
        GRADIENT=gradient,
        BUFFER=buffer,
        TARGET=target,
        NESTEROV=nesterov,
        ALIGNED=_aligned(rows, 3),
        BLOCK=_BLOCK,
        num_warps=8,
    )


def launch_apply(parameters: list[Strided], updates: list[Strided], steps: list[float], decay: float) -> None:
    """:func:`ragged_fsdp.optim.muon.passes.apply_updates` for contiguous pieces on CUDA."""
    by_dtype: dict[tuple[torch.dtype, torch.dtype], list[Row]] = {}
    for parameter, update, step in zip(parameters, updates, steps):
        bits = struct.unpack("<q", struct.pack("<d", step))[0]
        row = (parameter.address, update.address, bits, parameter.numel)
        by_dtype.setdefault((parameter.tensor.dtype, update.tensor.dtype), []).append(row)
    for dtypes, rows in by_dtype.items():
        launch_apply_rows(np.array(rows), dtypes, parameters[0].tensor.device, decay)


def launch_apply_rows(
    rows: Integers, dtypes: tuple[torch.dtype, torch.dtype], device: torch.device, decay: float
) -> None:
    """The weight pass over rows (parameter, update, bits of the step, numel) of these dtypes."""
    chunks = _chunk_list(tuple(rows[:, 3].tolist()), device)
    parameter, update = (_DTYPES[dtype] for dtype in dtypes)
    _apply_kernel[(chunks.numel() // 2,)](
        _table(rows, device),
        chunks,
        decay,
        PARAMETER=parameter,
        UPDATE=update,
        ALIGNED=_aligned(rows, 2),
        BLOCK=_BLOCK,
        num_warps=8,
    )
