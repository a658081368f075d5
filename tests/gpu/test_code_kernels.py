"""The kernels of block codes: the bits of the plain functions, for every tile, dtype and place in a message.

They run on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

import random

import pytest
import torch

from interpreted import DEVICE, INTERPRETED
from ragged_fsdp import block_codes
from ragged_fsdp.fsdp.gather.codes import MessageLayout
from ragged_fsdp.fsdp.parts.plan import GroupTensors, make_plan
from ragged_fsdp.policy import BlockCodes, Tiles

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU or Triton's interpreter"
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KINDS = ["int8", "float8_e4m3fn"]
TILES = {  # the matrices of a group, and their tiles
    "usual": [((384, 256), (128, 128)), ((256, 640), (128, 128)), ((3, 128, 128), (128, 128))],
    "small": [((96, 64), (32, 32)), ((32, 4224), (32, 32))],
    "rows": [((37, 768), (1, 256)), ((5, 256), (1, 256))],
    "odd": [((21, 35), (3, 5)), ((6, 10), (3, 5))],
    "empty": [((0, 24), (2, 8)), ((0, 64), (16, 16)), ((2, 16), (2, 8))],
    "mixed": [((48, 64), (16, 16)), ((40, 12), (8, 4)), ((9, 20000), (1, 20000))],
    "stored": [((300, 200), (128, 128)), ((3, 160, 96), (64, 32)), ((5, 7), (64, 32)), ((0, 8), (2, 2))],
    "stored, odd": [((21, 35), (3, 5)), ((2, 7, 11), (3, 5)), ((12, 40), (3, 5))],
}
"""Those whose name begins with stored lie in the order of their tiles, with smaller ones at the edges."""


def drawn(seed):
    """Matrices and tiles of any size; every other case is stored in the order of its tiles."""
    draw = random.Random(seed)
    cases = []
    for _ in range(draw.randint(1, 4)):
        tile = draw.randint(1, 40), draw.choice([1, 3, 8, 16, 50, 128])
        whole = [draw.randint(0 if cases else 1, 4) * tile[0], draw.randint(1, 4) * tile[1]]  # not all empty
        if seed % 2:
            whole = [draw.randint(1, 90), draw.randint(1, 300)]
        cases.append(((draw.randint(1, 3), *whole), tile))
    return cases


FUZZED = {("stored, " if seed % 2 else "") + f"drawn {seed}": drawn(seed) for seed in range(8)}


def message_of(case, kind, ranks, dtype):
    """The layout of a group and what its ranks would send: every code there is, with holes between."""
    shapes, tiles = zip(*(TILES | FUZZED)[case])
    codes = tuple(BlockCodes(kind, tile) for tile in tiles)
    stored = tiles if case.startswith("stored") else ()
    grains = [Tiles(*tile) for tile in stored] or [c.granularity for c in codes]
    blocks = [grain.block_numel(shape) for grain, shape in zip(grains, shapes)]
    names = [f"p{index}" for index in range(len(shapes))]
    dtypes = [dtype] * len(shapes)
    plan = make_plan(GroupTensors(names, shapes, blocks, dtypes, None, tiles=stored), ranks)
    layout = MessageLayout(plan, codes)
    shape = (ranks, layout.part_bytes)
    message = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = message[:, layout.scale_offset :].view(torch.float32)
    scales.copy_(torch.rand(scales.shape, generator=torch.Generator().manual_seed(1)))
    scales[0, 0] = scales[-1, 0] = float("nan")  # of tiles that could not be encoded
    if kind != "int8":  # other tiles hold no nan
        codes_part = message[:, : layout.scale_offset]
        codes_part[(codes_part & 0x7F) == 0x7F] -= 1
    return layout, message.to(DEVICE)


@pytest.mark.parametrize("case", TILES)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_a_message(case, kind):
    for ranks in (1, 3, 7):
        for dtype in DTYPES:
            check_decoding(case, kind, ranks, dtype)


@pytest.mark.parametrize("case", FUZZED)
def test_decoding_drawn_messages(case):
    seed = int(case.split()[-1])
    check_decoding(case, KINDS[seed // 2 % 2], 1 + seed, DTYPES[seed % 4])


def check_decoding(case, kind, ranks, dtype):
    from ragged_fsdp.fsdp.gather.codes_triton import Decoder

    layout, message = message_of(case, kind, ranks, dtype)
    expected = torch.full((layout.plan.layout.buffer_numel + 32,), 7.0, dtype=dtype, device=DEVICE)
    out = expected.clone()  # what lies between the parameters and behind them is left alone
    layout.decode(message, expected)
    Decoder(layout, out.device)(message, out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


def tricky(shape, dtype):
    """Matrices with values of all sizes, ties of the rounding, tiles of zeros, and what is not finite."""
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(shape, generator=generator) * torch.logspace(-12, 3, shape[-1])
    flat = values.view(-1)
    flat[: flat.numel() // 8].mul_(2).round_().div_(2)
    flat[0] = 127.0
    rows = values.view(-1, shape[-1])
    last = rows.shape[0] - 1
    rows[last // 2] = 0
    rows[last, 0], rows[last, -1] = float("nan"), -float("inf")
    rows[last // 4] *= 1e-38
    return values.to(dtype).to(DEVICE)


@pytest.mark.parametrize("case", [case for case in TILES | FUZZED if not case.startswith("stored")])
@pytest.mark.parametrize("kind", KINDS)
def test_encoding_a_shard(case, kind):
    from ragged_fsdp.fsdp.gather.codes_triton import encode

    for shape, tile in (TILES | FUZZED)[case]:
        if 0 in shape:
            continue  # such a shard is not encoded
        codes = BlockCodes(kind, tile)
        for dtype in DTYPES:
            bands = tricky(shape, dtype).view(-1, *block_codes.band_shape(codes, shape[-1]))
            made = []
            for run in (block_codes.encode, encode):
                packed = torch.empty(bands.shape, dtype=block_codes.code_dtype(codes), device=DEVICE)
                scales = torch.empty((bands.shape[0], bands.shape[2]), device=DEVICE)
                run(bands, codes, (packed, scales))
                made.append((packed.float(), scales))  # a nan among float8 codes has no certain sign
            for expected, got in zip(*made):
                torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_every_float8_is_read_and_written():
    """All 256 codes, and the numbers halfway between them, which go to the even one."""
    from ragged_fsdp.fsdp.gather.codes_triton import encode

    codes = BlockCodes("float8_e4m3fn", (1, 512))
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    between = (every[:-1] + every[1:]) / 2
    values = torch.cat([every, -every, between, -between]).to(DEVICE)
    bands = torch.cat([values, torch.zeros(512 - values.numel(), device=DEVICE)]).view(1, 1, 1, 512)
    packed, scales = torch.empty_like(bands, dtype=torch.uint8), torch.empty(1, 1, device=DEVICE)
    encode(bands, codes, (packed.view(torch.float8_e4m3fn), scales))
    assert scales.item() == 1
    assert torch.equal(packed, bands.to(torch.float8_e4m3fn).view(torch.uint8))
