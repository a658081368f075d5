"""The kernel that decodes block codes: the bits of torch's operators, for every tile, dtype and place."""

import pytest
import torch

from ragged_fsdp.fsdp.block_codes import decode, decode_plain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPES = {  # ranks, bands, rows, tiles, columns
    "one tile": (1, 1, 4, 1, 8),
    "ranks apart": (5, 2, 8, 3, 4),
    "odd tiles": (3, 2, 3, 2, 5),
    "usual tiles": (2, 3, 128, 5, 128),
    "a row is a tile": (2, 2, 1, 1, 20000),
    "larger than a program": (1, 1, 200, 2, 96),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_decoding_has_the_bits_of_torchs_operators(shape, kind, dtype):
    if kind.is_floating_point and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the kernel reads float8 from compute capability 8.9 on")
    ranks, bands, rows, tiles, columns = SHAPES[shape]
    numel = bands * rows * tiles * columns
    generator = torch.Generator("cuda").manual_seed(0)
    message = torch.randint(
        0, 256, (ranks, numel + 32), dtype=torch.uint8, device="cuda", generator=generator
    )
    codes = message.narrow(1, 16, numel).view(kind).view(ranks, bands, rows, tiles, columns)
    scales = torch.rand(ranks, bands * tiles + 4, device="cuda")[:, : bands * tiles]
    scales[-1, -1] = float("nan")  # of a tile that could not be encoded
    scales = scales.view(ranks, bands, tiles)
    around = torch.full((ranks * numel + 64,), 7.0, dtype=dtype, device="cuda")
    out = around.narrow(0, 32, ranks * numel).view(codes.shape)
    expected = torch.empty(codes.shape, dtype=dtype, device="cuda")
    decode(codes, scales, out)
    decode_plain(codes, scales, expected)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert bool((around[:32] == 7).all()) and bool((around[-32:] == 7).all())
