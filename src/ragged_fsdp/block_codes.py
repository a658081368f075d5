"""Tiles of weights as one byte per element and one scale per tile: the arithmetic, for any number of tiles.

A tensor is seen as bands of ``block_rows`` rows, each a row of tiles: ``(..., bands, block_rows, tiles,
block_columns)``. A band is the least that a rank may hold; where bands come from makes no difference to their
codes, so a sharded weight has the codes of the whole one, bit for bit. This is the reference, and what runs
on the CPU; on CUDA ``codes_triton`` computes the same bits with one kernel instead of seven.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ragged_fsdp.policy import BlockCodes

__all__ = [
    "LARGEST",
    "SMALLEST_SCALE",
    "band_shape",
    "code_dtype",
    "decode",
    "encode",
    "encode_matrices",
    "encoded",
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


def encoded(bands: Tensor, codes: BlockCodes) -> tuple[Tensor, Tensor]:
    """Codes and fp32 scales of ``bands``, in memory of their own."""
    packed = torch.empty(bands.shape, dtype=code_dtype(codes), device=bands.device)
    scales = torch.empty((bands.shape[0], bands.shape[2]), dtype=torch.float32, device=bands.device)
    encode(bands, codes, (packed, scales))
    return packed, scales


def encode_matrices(weight: Tensor, codes: BlockCodes = _FP8_BLOCKS) -> tuple[Tensor, Tensor]:
    """Codes of matrices (..., rows, columns), and a scale for each tile: (..., bands, tiles of a band).

    By default it is DeepSeek-V3's format. Tiles at the edges may be smaller.
    """
    packed, scales = encoded(_bands_of(weight, codes), codes)
    bands = -(-weight.shape[-2] // codes.block_shape[0])
    return _without_edges(packed, weight.shape), scales.view(*weight.shape[:-2], bands, scales.shape[1])


def _bands_of(weight: Tensor, codes: BlockCodes) -> Tensor:
    """Matrices as (bands, block rows, tiles, block columns), with zeros where tiles reach beyond them."""
    (rows, columns), (high, wide) = weight.shape[-2:], codes.block_shape
    if rows % high or columns % wide:  # zeros change no tile's largest element
        weight = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    return weight.reshape(-1, *band_shape(codes, weight.shape[-1]))


def _without_edges(bands: Tensor, shape: torch.Size) -> Tensor:
    """The matrices of ``shape`` that bands hold, without what lies beyond them."""
    _, high, tiles, wide = bands.shape
    rows, columns = shape[-2:]
    full = bands.view(*shape[:-2], -(-rows // high) * high, tiles * wide)
    return full[..., :rows, :columns].contiguous()


def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """The values of codes and scales, rounded once from fp32 to the dtype of ``out``."""
    if codes.dtype.is_floating_point:
        codes = codes.to(torch.bfloat16)  # exact; float8 takes no part in arithmetic
    torch.mul(codes, scales[..., None, :, None], out=out)


def quantize_dequantize(whole: Tensor, codes: BlockCodes, dtype: torch.dtype | None = None) -> Tensor:
    """What a weight is computed with when it is gathered as ``codes``: the reference of the runtime.

    Tiles that do not divide it are smaller at the edges, as of a parameter stored in :class:`Tiles`.
    """
    packed, scales = encoded(_bands_of(whole.detach(), codes), codes)
    out = torch.empty(packed.shape, dtype=dtype or whole.dtype, device=whole.device)
    decode(packed, scales, out)
    return _without_edges(out, whole.shape)
