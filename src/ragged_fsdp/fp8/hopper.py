"""The FP8 products on Hopper: torch's own for one group of whole blocks, the Triton kernels for the rest.

``torch.nn.functional.scaled_mm`` takes scales in these forms, each a view of ours: of rows by blocks of 128
(outer, blocks), with the outer dim contiguous; of blocks by blocks, with the contracted blocks contiguous and
padded to a multiple of four. Its rows must be a multiple of four.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad, scaled_mm

from ragged_fsdp.fp8 import kernels
from ragged_fsdp.fp8.groups import BLOCK, Groups, columns_of
from ragged_fsdp.fp8.kernels import groups_of, quantize, transpose, untile

__all__ = ["groups_of", "product", "quantize", "weight_gradient"]

_SCALE_ALIGN = 4  # fp32 scales: 16 bytes
_LYING_ROWS = 448
"""Rows of an expert, on average, up to which a product turns what it reads. With more it costs less to turn a
weight once than for every 64 rows: on H200, 64 experts of 5760 x 2880, the two took 1.46 and 1.34 ms with 384
rows each, 1.73 and 1.75 with 512."""
_ROWS, _BLOCKS = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128


def product(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    turned: bool,
) -> Tensor:
    """The product of ``emulation.product``, by torch's kernel for one group of whole blocks.

    A weight to be turned is small beside the rows of a linear layer, and turned once. Beside few rows of each
    expert it is not: there a product turns what it reads. Either way has the same bits.
    """
    rows, inner = codes.shape
    if turned and groups.size > 1 and rows <= _LYING_ROWS * groups.size:
        return kernels.lying_product(codes, scales, weight, weight_scales, groups, dtype)
    columns = columns_of(weight, weight_scales, inner, turned)
    if turned:
        shape = (groups.size, inner, columns)
        weight_scales = weight_scales.transpose(1, 2).contiguous()
        weight = untile(weight, shape, True) if weight.dim() == 1 else transpose(weight)
    if groups.size > 1 or rows % _SCALE_ALIGN or inner % BLOCK or columns % BLOCK or not rows:
        return kernels.product(codes, scales, weight, weight_scales, groups, dtype)
    if weight.dim() == 1:
        weight = untile(weight, (1, columns, inner), False)
    blocks = weight_scales[0]
    if blocks.shape[1] % _SCALE_ALIGN:
        blocks = pad(blocks, (0, -blocks.shape[1] % _SCALE_ALIGN))
    return scaled_mm(codes, weight[0].t(), scales.t(), _ROWS, blocks.t(), _BLOCKS, output_dtype=dtype)


def weight_gradient(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, groups: Groups, dtype: torch.dtype
) -> Tensor:
    """The gradient of ``emulation.weight_gradient``, by torch's kernel for one group of whole blocks."""
    if groups.size > 1 or a.shape[1] % BLOCK or b.shape[1] % BLOCK or not groups.tiles:
        return kernels.weight_gradient(a, a_scales, b, b_scales, groups, dtype)
    a, b = (codes.transpose(0, 1).flatten(1) for codes in (a, b))
    made = scaled_mm(a, b.t(), a_scales.t(), _ROWS, b_scales.t(), _ROWS, output_dtype=dtype)
    return made.unsqueeze(0)
