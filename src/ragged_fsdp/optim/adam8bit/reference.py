"""The 8-bit Adam update in plain tensor operations: the CPU path, and the reference of the GPU kernel.

Every operation rounds once (no fused multiply-add), in a fixed order, so that an element's result
depends on its block alone: not on the vector width, the shard it lies in, or the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragged_fsdp.optim.adam8bit.codes import (
    LARGEST_SQUARE,
    SMALLEST_SQUARE,
    dequantize,
    quantize,
    rounding_noise,
    zero_code,
)
from ragged_fsdp.optim.blocks import LocalBlocks, from_blocks, to_blocks

__all__ = [
    "AdamScalars",
    "BlockEntry",
    "adam_direction",
    "prepared_grad",
    "update_entry",
    "update_exact",
    "widened",
]

_CHUNK_NUMEL = 1 << 19  # bounds the temporaries of a large parameter, and keeps them in cache


@dataclass(frozen=True)
class AdamScalars:
    """What one Adam step multiplies with; computed once in double precision on the host."""

    beta1: float
    beta2: float
    eps: float
    step_size: float
    root_scale: float
    decay_factor: float
    l2: float
    maximize: bool

    @classmethod
    def of(cls, group: dict, step: int, decoupled: bool) -> AdamScalars:
        """The scalars of a param group at its ``step``-th update, counted from 1."""
        beta1, beta2 = group["betas"]
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        return cls(
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            step_size=lr / (1 - beta1**step),
            root_scale=(1 - beta2**step) ** -0.5,
            decay_factor=1 - lr * decay if decoupled else 1.0,
            l2=0.0 if decoupled else decay,
            maximize=group["maximize"],
        )

    def for_kernel(self) -> tuple[float, ...]:
        """The numbers in the order of the kernels' arguments."""
        betas = (self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2)
        return (*betas, self.eps, self.step_size, self.root_scale, self.decay_factor, self.l2)


@dataclass(slots=True)
class BlockEntry:
    """The local tensors of one quantised parameter (but its gradient), and the blocks they hold."""

    param: Tensor
    exp_avg_codes: Tensor
    exp_avg_scales: Tensor
    exp_avg_sq_codes: Tensor
    exp_avg_sq_scales: Tensor
    blocks: LocalBlocks


def adam_direction(
    grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: AdamScalars
) -> tuple[Tensor, Tensor, Tensor]:
    """New moments, and first moment over root of the second, each operation rounding once."""
    exp_avg = exp_avg * scalars.beta1 + grad * (1 - scalars.beta1)
    exp_avg_sq = exp_avg_sq * scalars.beta2 + (grad * (1 - scalars.beta2)) * grad
    denominator = correct_sqrt(exp_avg_sq) * scalars.root_scale + scalars.eps
    return exp_avg, exp_avg_sq, exp_avg * denominator.reciprocal()


def prepared_grad(grad: Tensor, param: Tensor, scalars: AdamScalars) -> Tensor:
    """The fp32 gradient, negated to maximise, with the L2 term of Adam without decoupled decay."""
    grad = grad.float()
    if scalars.maximize:
        grad = -grad
    return grad + (param * scalars.l2).float() if scalars.l2 else grad


def widened(param: Tensor) -> Tensor:
    """Weights in fp32, or in fp64 if they are: fp32 would round them in every step."""
    return param if param.dtype == torch.float64 else param.float()


def update_exact(param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, scalars: AdamScalars) -> None:
    """One step of a local tensor whose moments are fp32, in place."""
    weight = widened(param)
    grad = prepared_grad(grad, weight, scalars)
    new_mean, new_square, direction = adam_direction(grad, mean, square, scalars)
    mean.copy_(new_mean)
    square.copy_(new_square)
    param.copy_(weight * scalars.decay_factor - direction * scalars.step_size)


def correct_sqrt(square: Tensor) -> Tensor:
    """The correctly rounded root: that of CPU vector libraries is not, and differs in a vector's tail."""
    square = square.clamp(SMALLEST_SQUARE, LARGEST_SQUARE)
    return square.sqrt() if square.is_cuda else square.double().sqrt().float()


def update_entry(
    entry: BlockEntry, grad: Tensor, scalars: AdamScalars, noise_key: tuple[int, int] | None = None
) -> None:
    """One step of one parameter, in place; ``noise_key`` makes the rounding of the moments stochastic."""
    rows_per_chunk = max(1, _CHUNK_NUMEL // entry.blocks.grid.granule_numel) * entry.blocks.grid.block_rows
    for first in range(0, entry.blocks.rows, rows_per_chunk):
        count = min(rows_per_chunk, entry.blocks.rows - first)
        _update_rows(entry, grad, scalars, noise_key, first, count)


def _update_rows(
    entry: BlockEntry,
    grad: Tensor,
    scalars: AdamScalars,
    noise_key: tuple[int, int] | None,
    first: int,
    count: int,
) -> None:
    blocks, chunk = entry.blocks, _rows_of(entry.blocks, first, count)
    grid_first = first // blocks.grid.block_rows * blocks.grid_cols
    of_grid = slice(grid_first, grid_first + chunk.grid_rows * chunk.grid_cols)
    of_flat = slice(first * blocks.cols, first * blocks.cols + chunk.numel)

    def blocked(local: Tensor, fill: int = 0) -> Tensor:
        return to_blocks(local.view(-1)[of_flat], chunk, fill)

    noise: tuple[Tensor | None, Tensor | None] = (None, None)
    if noise_key is not None:
        rows, cols = (to_blocks(index, chunk) for index in _places(chunk, entry.param.device))
        noise = rounding_noise(rows, cols, noise_key)
    param = widened(blocked(entry.param))
    grad = prepared_grad(blocked(grad), param, scalars)
    mean_scales, square_scales = entry.exp_avg_scales.view(-1), entry.exp_avg_sq_scales.view(-1)
    mean_codes = blocked(entry.exp_avg_codes, fill=zero_code(signed=True))
    mean = dequantize(mean_codes, mean_scales[of_grid], signed=True)
    square = dequantize(blocked(entry.exp_avg_sq_codes), square_scales[of_grid], signed=False)
    mean, square, direction = adam_direction(grad, mean, square, scalars)
    param = param * scalars.decay_factor - direction * scalars.step_size
    entry.param.view(-1)[of_flat] = from_blocks(param, chunk).to(entry.param.dtype)
    for value, signed, codes, scales, rounding in (
        (mean, True, entry.exp_avg_codes, mean_scales, noise[0]),
        (square, False, entry.exp_avg_sq_codes, square_scales, noise[1]),
    ):
        new_codes, scales[of_grid] = quantize(value, signed, rounding)
        codes.view(-1)[of_flat] = from_blocks(new_codes, chunk)


def _rows_of(blocks: LocalBlocks, first: int, count: int) -> LocalBlocks:
    """The part made of ``count`` rows from ``first``."""
    numel = min(count * blocks.cols, blocks.numel - first * blocks.cols)
    return replace(blocks, numel=numel, first_row=blocks.first_row + first)


def _places(blocks: LocalBlocks, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row and the column of each local element in the parameter's rows of ``grid.cols`` elements."""
    rows = blocks.source_row(torch.arange(blocks.rows, device=device))[:, None]
    cols = torch.arange(blocks.cols, device=device)[None] + blocks.col_base
    both = torch.broadcast_tensors(rows, cols)
    return both[0].reshape(-1)[: blocks.numel], both[1].reshape(-1)[: blocks.numel]
