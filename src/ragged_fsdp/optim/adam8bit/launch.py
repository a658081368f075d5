"""Tables that tell the kernels of 8-bit Adam where the parameters are, and the launches over them.

A batch is a set of parameters updated by one launch. What does not change from step to step (weights, state,
shapes) is described on the device once, when the batch is built. Gradients may come to lie elsewhere each
step, so their addresses are a table of their own, written anew only when one has moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ragged_fsdp.optim.adam8bit.codes import FIRST_OCTAVE, map_constants, rounding_key, rounding_salt
from ragged_fsdp.optim.adam8bit.kernel import exact_step_kernel, step_kernel
from ragged_fsdp.optim.adam8bit.reference import AdamScalars, BlockEntry

__all__ = ["BlockBatch", "ExactBatch", "kernel_kind"]

# Eight elements per thread: more spill, fewer hide too little latency.
_PROGRAM_NUMEL = 1024
_WARP_NUMEL = 256
_MOST_WARPS = 32
_ROUNDS = 4
"""Stretches of ``_PROGRAM_NUMEL`` elements that a program updates, one after the other."""
_EXACT_NUMEL = 1024
_TL_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def kernel_kind(entry: BlockEntry) -> tuple[Any, ...]:
    """Equal for parameters that one launch can update: those that share a compiled kernel."""
    grid, (cols, _) = entry.blocks.grid, _kernel_cols(entry)
    pointers = (entry.param, entry.exp_avg_codes, entry.exp_avg_sq_codes)
    aligned = cols % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in pointers)
    full = cols % (_tiles(entry) * grid.block_cols) == 0
    return grid.block_rows, grid.block_cols, grid.tiled, entry.param.dtype, entry.param.device, aligned, full


def _tiles(entry: BlockEntry) -> int:
    grid = entry.blocks.grid
    return max(1, _PROGRAM_NUMEL // (grid.block_rows * grid.block_cols))


def _kernel_cols(entry: BlockEntry) -> tuple[int, int]:
    """Columns and blocks per row as the kernel sees them: runs are one long row."""
    if entry.blocks.grid.tiled:
        return entry.blocks.cols, entry.blocks.grid_cols
    return entry.blocks.numel, entry.blocks.grid_rows


class _Batch:
    """Rows of a table and which program belongs to which row; gradients by address."""

    def __init__(self, rows: list[list[int]], programs: Sequence[int], device: torch.device) -> None:
        counts = torch.tensor(programs, device="cpu")
        owner = torch.repeat_interleave(torch.arange(len(rows), dtype=torch.int32, device="cpu"), counts)
        self._table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
        self._owner = owner.to(device)
        self._addresses: list[int] = []
        self._grads = self._table

    def _locate(self, grads: Sequence[Tensor]) -> None:
        addresses = [grad.data_ptr() for grad in grads]
        if addresses != self._addresses:
            self._addresses = addresses
            self._grads = torch.tensor(addresses, dtype=torch.int64, device="cpu").to(
                self._table.device, non_blocking=True
            )


class BlockBatch(_Batch):
    """Quantised parameters of one :func:`kernel_kind`; ``positions`` are theirs in the optimizer."""

    def __init__(self, entries: Sequence[BlockEntry], positions: Sequence[int]) -> None:
        first, self._tiles = entries[0], _tiles(entries[0])
        self._kind = kernel_kind(first)
        rows, programs, start = [], [], 0
        for entry, position in zip(entries, positions):
            rows.append(_row_of_table(entry, start, position))
            tiled = entry.blocks.grid.tiled
            stretches = -(-_kernel_cols(entry)[1] // (self._tiles * _ROUNDS))
            programs.append((entry.blocks.grid_rows if tiled else 1) * stretches)
            start += programs[-1]
        super().__init__(rows, programs, first.param.device)
        block_numel = first.blocks.grid.block_rows * first.blocks.grid.block_cols
        self._warps = min(_MOST_WARPS, max(1, self._tiles * block_numel // _WARP_NUMEL))
        self._maps = _maps(first.param.device)

    def launch(self, grads: Sequence[Tensor], scalars: AdamScalars, noise: tuple[int, int] | None) -> None:
        """One step; ``grads`` are contiguous and of one dtype, ``noise`` is the seed and step of rounding."""
        self._locate(grads)
        block_rows, block_cols, tiled, dtype, _, aligned, full = self._kind
        key = rounding_key(*noise, 0) if noise else (0, 0)
        step_kernel[(self._owner.numel(),)](
            self._table,
            self._grads,
            self._owner,
            self._maps,
            scalars.for_kernel(),
            *(word - (word >> 31 << 32) for word in key),
            _TL_DTYPES[dtype],
            _TL_DTYPES[grads[0].dtype],
            block_rows,
            block_cols,
            self._tiles,
            _ROUNDS,
            not tiled,
            aligned and all(address % 16 == 0 for address in self._addresses),
            full,
            scalars.maximize,
            scalars.l2 != 0,
            noise is not None,
            num_warps=self._warps,
            enable_fp_fusion=False,
        )


class ExactBatch(_Batch):
    """Parameters of one dtype with fp32 moments; each is given as weights, first and second moment."""

    def __init__(self, tensors: Sequence[Sequence[Tensor]]) -> None:
        rows, programs, start = [], [], 0
        for weight, mean, square in tensors:
            pointers = [t.data_ptr() for t in (weight, mean, square)]
            rows.append([*pointers, weight.numel(), start])
            programs.append(-(-weight.numel() // _EXACT_NUMEL))
            start += programs[-1]
        self._dtype = tensors[0][0].dtype
        super().__init__(rows, programs, tensors[0][0].device)

    def launch(self, grads: Sequence[Tensor], scalars: AdamScalars) -> None:
        """One step; ``grads`` are contiguous and of one dtype."""
        self._locate(grads)
        exact_step_kernel[(self._owner.numel(),)](
            self._table,
            self._grads,
            self._owner,
            scalars.for_kernel(),
            _TL_DTYPES[self._dtype],
            _TL_DTYPES[grads[0].dtype],
            _EXACT_NUMEL,
            scalars.maximize,
            scalars.l2 != 0,
            num_warps=4,
            enable_fp_fusion=False,
        )


def _row_of_table(entry: BlockEntry, first_program: int, position: int) -> list[int]:
    blocks, (cols, grid_cols) = entry.blocks, _kernel_cols(entry)
    tensors = (
        entry.param,
        entry.exp_avg_codes,
        entry.exp_avg_sq_codes,
        entry.exp_avg_scales,
        entry.exp_avg_sq_scales,
    )
    source = [blocks.first_row, blocks.row_base, blocks.row_period, blocks.row_stride, blocks.col_base]
    shape = [cols, grid_cols, first_program]
    return [*(t.data_ptr() for t in tensors), *shape, *source, rounding_salt(position)]


_MAPS: dict[torch.device, tuple[Tensor, ...]] = {}


def _maps(device: torch.device) -> tuple[Tensor, ...]:
    """Tables of the signed map, then of the unsigned: cell widths, and 64-bit pairs of slope and offset.

    Widths are found by the octave of k + 1/2, from 1/2 on; pairs by the upper nine bits of a float as a
    signed number, from -256 to 255: there is one for every float, so that the kernel need not check it.
    """
    if device not in _MAPS:
        tables = []
        for signed in (True, False):
            slopes, offsets, widths = map_constants(signed)
            octaves = torch.arange(-256, 256, device="cpu") - FIRST_OCTAVE
            octaves = octaves.clamp(0, slopes.numel() - 1)
            lines = torch.stack([slopes[octaves], offsets[octaves]], dim=1)
            padding = widths.new_zeros(0 if signed else 1)  # k of the unsigned map is at least 1
            tables += [torch.cat([padding, widths]), lines.view(torch.int64).view(-1)]
        widths_signed, lines_signed, widths, lines = (table.to(device) for table in tables)
        _MAPS[device] = widths_signed, lines_signed[256:], widths, lines[256:]
    return _MAPS[device]
