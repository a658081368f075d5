"""The FP8 products in plain torch: slow, exact, the same bits on every device; the kernels' reference.

A product of two codes has 8 bits, and 128 of them span less than the 53 of fp64: the sum over a block is
exact in any order. It is rounded to fp32, multiplied by the product of the two scales, and added in fp32,
block after block.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragged_fsdp.block_codes import encoded
from ragged_fsdp.fp8.groups import BLOCK, Groups, columns_of, empty_quantized, groups_of
from ragged_fsdp.policy import BlockCodes
from ragged_fsdp.tiling import untiled

__all__ = ["groups_of", "product", "quantize", "weight_gradient"]

_ROWWISE = BlockCodes("float8_e4m3fn", (1, BLOCK))
_COLUMNWISE = BlockCodes("float8_e4m3fn", (BLOCK, 1))


def quantize(
    values: Tensor, groups: Groups, seen: Tensor | None, *, rowwise: bool = True, turned: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of rows (R, K) with a scale for each row and block of 128 columns, and the other way.

    Returns:
        codes (R, K); their scales (blocks of K, R); codes turned (tiles, K, 128), a group's rows from the
        first of its tiles on and zeros behind them; their scales (tiles, K). What is not asked for is empty.
        ``seen``, of one int32, becomes 1 if a value is not finite.
    """
    columns = values.shape[1]
    blocks = -(-columns // BLOCK)
    made = empty_quantized(values, groups.tiles, groups.size, rowwise, turned)
    codes, scales, turned_codes, turned_scales = (tensor.zero_() for tensor in made)
    broken = torch.zeros((), dtype=torch.bool, device=values.device)
    for tile, (_, first, end) in enumerate(groups.table.t().tolist()):
        part = values[first : min(end, first + BLOCK)].float()
        if first >= end:
            continue
        here = slice(first, first + len(part))
        if rowwise:
            wide = pad(part, (0, blocks * BLOCK - columns)).view(-1, 1, blocks, BLOCK)
            own, own_scales = encoded(wide, _ROWWISE)
            codes[here] = own.view(len(part), -1)[:, :columns]
            scales[:, here] = own_scales.view(-1, blocks).t()
        if turned:
            high = pad(part, (0, 0, 0, BLOCK - len(part))).view(1, BLOCK, columns, 1)
            own, own_scales = encoded(high, _COLUMNWISE)
            turned_codes[tile] = own.view(BLOCK, columns).t()
            turned_scales[tile] = own_scales.view(-1)
        broken |= ~part.isfinite().all()
    if seen is not None:
        seen.masked_fill_(broken, 1)
    return codes, scales, turned_codes, turned_scales


def product(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    groups: Groups,
    dtype: torch.dtype,
    turned: bool,
) -> Tensor:
    """Rows (R, K) of each group times its matrix of (E, N, K), transposed: (R, N).

    ``scales`` are (blocks of K, R), ``weight_scales`` (E, blocks of N, blocks of K). If ``turned``, the
    weight lies as (E, K, N), and its scales likewise. A weight that is flat lies in the order of its tiles.
    Rows of no group come out as zeros here, and as anything from the kernels.
    """
    inner = codes.shape[1]
    columns = columns_of(weight, weight_scales, inner, turned)
    if weight.dim() == 1:
        shape = (len(weight_scales), *((inner, columns) if turned else (columns, inner)))
        weight = untiled(weight.view(torch.uint8), shape, (BLOCK, BLOCK)).view(weight.dtype)
    if turned:
        weight, weight_scales = weight.transpose(1, 2), weight_scales.transpose(1, 2)
    out = codes.new_zeros((len(codes), columns), dtype=dtype)
    for group, first, end in groups.table.t().tolist():
        here = slice(first, min(end, first + BLOCK))
        scale = weight_scales[group].repeat_interleave(BLOCK, 0)[:columns]  # (N, blocks of K)
        out[here] = _summed(codes[here], scales[:, here].t(), weight[group], scale).to(dtype)
    return out


def weight_gradient(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, groups: Groups, dtype: torch.dtype
) -> Tensor:
    """The sum over each group's rows: codes turned (tiles, A, 128) times (tiles, B, 128), as (E, A, B).

    Scales are (tiles, A) and (tiles, B). A group without rows gets zeros.
    """
    out = a.new_zeros((groups.size, a.shape[1], b.shape[1]), dtype=dtype)
    starts = groups.starts.tolist()
    for group, (first, end) in enumerate(pairwise(starts)):
        here = slice(first, end)
        rows = [codes[here].transpose(0, 1).reshape(codes.shape[1], -1) for codes in (a, b)]
        out[group] = _summed(rows[0], a_scales[here].t(), rows[1], b_scales[here].t()).to(dtype)
    return out


def _summed(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    """Codes (A, K) times (B, K), with scales (A, blocks) and (B, blocks): block after block in fp32."""
    sums = torch.zeros((len(a), len(b)), dtype=torch.float32, device=a.device)
    for block in range(a_scales.shape[1]):
        here = slice(block * BLOCK, (block + 1) * BLOCK)
        exact = a[:, here].to(torch.float64) @ b[:, here].to(torch.float64).t()
        scale = a_scales[:, block, None] * b_scales[None, :, block]
        sums += exact.float() * scale
    return sums
