"""Tiles of weights as one byte per element and one scale per tile: the arithmetic, for any number of tiles.

A tensor is seen as bands of ``block_rows`` rows, each a row of tiles: ``(..., bands, block_rows, tiles,
block_columns)``. A band is the least that a rank may hold; where bands come from makes no difference to their
codes, so a sharded weight has the codes of the whole one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from ragged_fsdp.policy import BlockCodes

__all__ = ["band_shape", "code_dtype", "decode", "decode_plain", "encode", "quantize_dequantize"]

_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_SMALLEST_SCALE = 1e-36  # a tile below it is stored as zeros: the reciprocal would overflow


def code_dtype(codes: BlockCodes) -> torch.dtype:
    """The torch dtype of one code."""
    return getattr(torch, codes.dtype)


def band_shape(codes: BlockCodes, columns: int) -> tuple[int, int, int]:
    """Rows, tiles, and columns of a tile, of one band of a tensor with so many columns."""
    rows, width = codes.block_shape
    return rows, columns // width, width


def encode(bands: Tensor, codes: BlockCodes, out: tuple[Tensor, Tensor]) -> None:
    """Codes and fp32 scales of ``bands``, written to ``out``.

    A tile that holds a nan or an infinity gets a scale that is none, and so decodes to no finite value.
    """
    out_codes, out_scales = out
    largest = _LARGEST[codes.dtype]
    values = bands.float()
    scales = torch.linalg.vector_norm(values, ord=float("inf"), dim=(-3, -1)) / largest
    usable = ~(scales <= _SMALLEST_SCALE)
    out_scales.copy_(torch.where(usable, scales, 0.0))
    inverse = torch.where(usable, scales.reciprocal(), 0.0)
    normal = (values * inverse[..., None, :, None]).clamp_(-largest, largest)
    out_codes.copy_(normal.round_() if codes.dtype == "int8" else normal)


def decode(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """The values of codes and scales, rounded once from fp32 to the dtype of ``out``.

    With the leading dim of ranks, whose parts are each contiguous.
    """
    if _has_kernel(codes):
        from ragged_fsdp.fsdp.block_codes_triton import launch_decode

        launch_decode(codes, scales, out)
    else:
        decode_plain(codes, scales, out)


def decode_plain(codes: Tensor, scales: Tensor, out: Tensor) -> None:
    """What :func:`decode` computes, with torch's operators: the reference, and what other devices use."""
    if codes.dtype.is_floating_point:
        codes = codes.to(torch.bfloat16)  # exact; float8 takes no part in arithmetic
    torch.mul(codes, scales[..., None, :, None], out=out)


def _has_kernel(codes: Tensor) -> bool:
    """Whether Triton can decode these; it reads float8 from compute capability 8.9 on."""
    if not codes.is_cuda or not _has_triton():
        return False
    return codes.dtype == torch.int8 or torch.cuda.get_device_capability(codes.device) >= (8, 9)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def quantize_dequantize(whole: Tensor, codes: BlockCodes, dtype: torch.dtype | None = None) -> Tensor:
    """What a weight is computed with when it is gathered as ``codes``: the reference of the runtime."""
    codes.check(whole.shape)
    shape: Sequence[int] = (-1, *band_shape(codes, whole.shape[-1]))
    bands = whole.detach().reshape(shape)
    packed = torch.empty(bands.shape, dtype=code_dtype(codes), device=whole.device)
    scales = torch.empty((bands.shape[0], bands.shape[2]), dtype=torch.float32, device=whole.device)
    encode(bands, codes, (packed, scales))
    out = torch.empty(bands.shape, dtype=dtype or whole.dtype, device=whole.device)
    decode_plain(packed, scales, out)
    return out.view(whole.shape)
