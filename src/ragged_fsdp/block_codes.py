"""Tiles of weights as one byte per element and one scale per tile: the arithmetic, for any number of tiles.

A tensor is seen as bands of ``block_rows`` rows, each a row of tiles: ``(..., bands, block_rows, tiles,
block_columns)``. A band is the least that a rank may hold; where bands come from makes no difference to their
codes, so a sharded weight has the codes of the whole one, bit for bit. This is the reference, and what runs
on the CPU; on CUDA ``codes_triton`` computes the same bits with one kernel instead of seven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragged_fsdp.policy import BlockCodes, Tiles

__all__ = [
    "LARGEST",
    "SMALLEST_SCALE",
    "band_shape",
    "code_dtype",
    "decode",
    "encode",
    "encode_matrices",
    "quantize_dequantize",
]

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_FP8_BLOCKS = BlockCodes("float8_e4m3fn", (128, 128))
SMALLEST_SCALE = 1e-36  # a tile below it is stored as zeros: the reciprocal would overflow


def code_dtype(codes: BlockCodes) -> torch.dtype:
    """The torch dtype of one code."""
    return getattr(torch, codes.dtype)


def band_shape(codes: BlockCodes, columns: int) -> tuple[int, int, int]:
    """Rows, tiles, and columns of a tile, of one band of a tensor with so many columns."""
    rows, width = codes.block_shape
    return rows, columns // width, width


def encode(bands: Tensor, codes: BlockCodes, out: tuple[Tensor, Tensor]) -> None:
    """Codes and fp32 scales of ``bands``, written to ``out``.

    A tile that holds a nan or an infinity gets a nan as its scale, and so decodes to nans.
    """
    out_codes, out_scales = out
    largest = LARGEST[codes.dtype]
    values = bands.float()
    # by the reciprocal, on every device: dividing by a number of the host, torch itself does so on some
    scales = torch.linalg.vector_norm(values, ord=float("inf"), dim=(-3, -1)) * (1.0 / largest)
    scales.masked_fill_(scales.isinf(), float("nan"))
    usable = ~(scales <= SMALLEST_SCALE)
    out_scales.copy_(torch.where(usable, scales, 0.0))
    inverse = torch.where(usable, scales.reciprocal(), 0.0)
    normal = (values * inverse[..., None, :, None]).clamp_(-largest, largest)
    out_codes.copy_(normal.round_() if codes.dtype == "int8" else normal)


def encode_matrices(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8 codes of matrices (..., rows, columns) and a scale for each block of 128 x 128.

    It is DeepSeek-V3's format. Blocks at the edges may be smaller. Scales are (..., blocks along the rows,
    blocks along the columns).
    """
    (rows, columns), (high, wide) = weight.shape[-2:], _FP8_BLOCKS.block_shape
    bands, tiles = -(-rows // high), -(-columns // wide)
    whole = weight
    if (rows, columns) != (bands * high, tiles * wide):  # zeros change no block's largest element
        whole = torch.nn.functional.pad(weight, (0, tiles * wide - columns, 0, bands * high - rows))
    view = whole.reshape(-1, high, tiles, wide)
    codes = torch.empty(view.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty((len(view), tiles), dtype=torch.float32, device=weight.device)
    encode(view, _FP8_BLOCKS, (codes, scales))
    full = codes.view(*weight.shape[:-2], bands * high, tiles * wide)
    return full[..., :rows, :columns].contiguous(), scales.view(*weight.shape[:-2], bands, tiles)


def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """The values of codes and scales, rounded once from fp32 to the dtype of ``out``."""
    if codes.dtype.is_floating_point:
        codes = codes.to(torch.bfloat16)  # exact; float8 takes no part in arithmetic
    torch.mul(codes, scales[..., None, :, None], out=out)


def _by_kinds(whole: Tensor, codes: BlockCodes, dtype: torch.dtype) -> Tensor:
    out = torch.empty(whole.shape, dtype=dtype, device=whole.device)
    for kind in Tiles(*codes.block_shape).kinds(whole.shape):
        rows = slice(kind.first_row, kind.first_row + kind.rows)
        columns = slice(kind.first_column, kind.first_column + kind.columns)
        sized = replace(codes, block_shape=(kind.tile_rows, kind.tile_columns))
        out[..., rows, columns] = quantize_dequantize(whole[..., rows, columns].contiguous(), sized, dtype)
    return out


def quantize_dequantize(whole: Tensor, codes: BlockCodes, dtype: torch.dtype | None = None) -> Tensor:
    """What a weight is computed with when it is gathered as ``codes``: the reference of the runtime.

    Tiles that do not divide it are smaller at the edges, as of a parameter stored in :class:`Tiles`.
    """
    if any(size % tile for size, tile in zip(whole.shape[-2:], codes.block_shape)):
        return _by_kinds(whole.detach(), codes, dtype or whole.dtype)
    codes.check(whole.shape)
    shape: Sequence[int] = (-1, *band_shape(codes, whole.shape[-1]))
    bands = whole.detach().reshape(shape)
    packed = torch.empty(bands.shape, dtype=code_dtype(codes), device=whole.device)
    scales = torch.empty((bands.shape[0], bands.shape[2]), dtype=torch.float32, device=whole.device)
    encode(bands, codes, (packed, scales))
    out = torch.empty(bands.shape, dtype=dtype or whole.dtype, device=whole.device)
    decode(packed, scales, out)
    return out.view(whole.shape)
