"""The kernels of the FP8 products against the emulation: bits of codes, products to the tensor cores' error.

They run on a GPU, or on the CPU in Triton's interpreter (``TRITON_INTERPRET=1``).
"""

import mmap
import random

import pytest
import torch

from interpreted import DEVICE, INTERPRETED, only_program
from ragged_fsdp.fp8 import emulation
from ragged_fsdp.fp8.groups import BLOCK, groups_of, one_group
from ragged_fsdp.tiling import tiled

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = pytest.mark.skipif(
    not (HOPPER or INTERPRETED), reason="needs a Hopper GPU or Triton's interpreter"
)
DTYPE = torch.bfloat16
CASES = {  # counts of the groups, rows after them, columns in, columns out
    "linear": ((256,), 0, 256, 384),
    "odd": ((77,), 0, 144, 208),
    "experts": ((130, 0, 1, 257, 64), 0, 256, 128),
    "padded": ((3, 200, 0), 40, 192, 320),
    "none": ((0, 0), 16, 128, 128),
}
_draw = random.Random(0)
for _seed in range(2):
    _counts = tuple(
        _draw.choice([0, 1, 127, 128, 129, _draw.randint(1, 300)]) for _ in range(_draw.randint(2, 20))
    )
    CASES[f"drawn {_seed}"] = (
        _counts,
        _draw.choice([0, 1, 200]),
        16 * _draw.randint(1, 24),
        16 * _draw.randint(1, 24),
    )


def cut(counts, behind):
    rows = sum(counts) + behind
    if counts == (rows,):
        return rows, one_group(rows, torch.device(DEVICE))
    return rows, groups_of(torch.tensor(counts, device=DEVICE), rows)


def values(rows, columns, seed, dtype=DTYPE):
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, columns)
    if rows > 2:
        made[1] = 0
        made[2] *= 1e-38
    return made.to(dtype).to(DEVICE)


def unsigned(codes):
    return codes.view(torch.uint8)


def used(codes, scales, groups):
    """What of turned codes a product reads: the tiles that some group has."""
    last = int(groups.starts[-1]) if groups.tiles else 0
    return unsigned(codes)[:last], scales[:last]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [DTYPE, torch.float32])
def test_quantising_has_the_bits_of_the_emulation(case, dtype):
    from ragged_fsdp.fp8 import kernels

    counts, behind, columns, _ = CASES[case]
    (rows, groups), seen = cut(counts, behind), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    x, end = values(rows, columns, 0, dtype), sum(counts)
    want = emulation.quantize(x, groups, seen)
    got = kernels.quantize(x, groups, seen)
    assert not seen.item()
    assert torch.equal(unsigned(got[0])[:end], unsigned(want[0])[:end])
    assert torch.equal(got[1][:, :end], want[1][:, :end])
    for one, other in zip(used(*got[2:], groups), used(*want[2:], groups)):
        assert torch.equal(one, other)
    for only in ({"rowwise": False}, {"turned": False}):
        part = kernels.quantize(x, groups, seen, **only)
        assert [bool(t.numel()) for t in part[::2]] == [
            "turned" in only and rows > 0,
            "rowwise" in only and groups.tiles > 0,
        ]
        if "turned" in only:
            assert torch.equal(unsigned(part[0])[:end], unsigned(want[0])[:end])
            assert torch.equal(part[1][:, :end], want[1][:, :end])
        else:
            for one, other in zip(used(*part[2:], groups), used(*want[2:], groups)):
                assert torch.equal(one, other)


def test_tables_of_groups():
    from ragged_fsdp.fp8 import kernels

    for counts in ((130, 0, 1, 257, 64), (0, 0, 0), (128,) * 37, (0, 5, 0)):
        for behind in (0, 40, 300):
            rows, given = sum(counts) + behind, torch.tensor(counts, device=DEVICE)
            for one, other in zip(kernels.groups_of(given, rows), groups_of(given, rows)):
                assert torch.equal(one, other), (counts, behind)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_and_stays_nan(bad):
    from ragged_fsdp.fp8 import kernels

    _, groups = cut((150,), 0)
    x = values(150, 256, 1)
    x[140, 200] = bad
    made = []
    for backend in (emulation, kernels):
        seen = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        made.append(backend.quantize(x, groups, seen))
        assert seen.item() == 1
    for one, other in zip(*made):
        if one.dtype == torch.float32:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert made[1][1][1, 140].isnan() and made[1][3][1, 200].isnan()


@pytest.mark.parametrize("shape", [(1, 128, 256), (3, 64, 132), (2, 260, 4), (0, 8, 8)])
def test_transposing(shape):
    from ragged_fsdp.fp8 import kernels

    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    codes = codes.to(DEVICE).view(torch.float8_e4m3fn)
    assert torch.equal(unsigned(kernels.transpose(codes)), unsigned(codes).transpose(1, 2))


@pytest.mark.parametrize("shape", [(1, 128, 256), (3, 144, 208), (2, 272, 32), (2, 64, 128)])
def test_untiling(shape):
    from ragged_fsdp.fp8 import kernels

    codes = torch.randint(0, 256, shape, dtype=torch.uint8).to(DEVICE)
    stored = tiled(codes, (BLOCK, BLOCK)).view(torch.float8_e4m3fn)
    for turned, want in ((False, codes), (True, codes.transpose(1, 2))):
        assert torch.equal(unsigned(kernels.untile(stored, shape, turned)), want), turned


@pytest.mark.skipif(not INTERPRETED, reason="needs a matrix of which only some pages are ever touched")
@pytest.mark.parametrize("turned", [False, True])
def test_untiling_a_matrix_of_more_than_2_to_the_31_elements(turned):
    """The last tile of a matrix as large as the head of a model may be lies at the end, in both orders."""
    from ragged_fsdp.fp8 import kernels

    rows, columns, height, width = (1 << 16) + 32, (1 << 15) + 48, 32, 48
    source, target = (
        torch.frombuffer(mmap.mmap(-1, rows * columns, flags=mmap.MAP_PRIVATE), dtype=torch.uint8)
        for _ in range(2)
    )
    source[-height * width :] = torch.arange(height * width, dtype=torch.int64).to(torch.uint8)
    with only_program(columns // BLOCK, rows // BLOCK, 0):
        kernels.turning.untile_kernel[(1,)](
            source.view(torch.int32), target.view(torch.int32), 1, rows, columns, turned, BLOCK, BLOCK
        )
    want, whole = source[-height * width :].view(height, width), target.view(rows, columns)
    if turned:
        want, whole = want.t(), target.view(columns, rows)
    assert torch.equal(whole[-want.shape[0] :, -want.shape[1] :], want)


def coded_weight(experts, rows, columns, seed):
    """Codes (E, N, K) and scales (E, blocks, blocks) of random matrices."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(experts, rows, columns, generator=generator).mul_(60).to(torch.float8_e4m3fn)
    scales = torch.rand(experts, -(-rows // BLOCK), -(-columns // BLOCK), generator=generator)
    return codes.to(DEVICE), scales.to(DEVICE)


def assert_close(got, want, absolute):
    """Errors below a rounding to bf16 and what adding in the tensor cores loses, of the sum of magnitudes."""
    error = ((got.double() - want.double()).abs() / absolute.double().clamp_min(1e-30)).max()
    assert error < 2.0**-8 + 2.0**-10, float(error)


def positive(codes):
    """Magnitudes of codes."""
    return (unsigned(codes) & 0x7F).view(codes.dtype)


def multiplied(codes, scales, groups, columns, turned):
    """A weight in rows and in tiles, its scales, the exact product, and the sums of its magnitudes."""
    shape = (codes.shape[1], columns) if turned else (columns, codes.shape[1])
    weight, weight_scales = coded_weight(groups.size, *shape, 3)
    exact, magnitude = (
        emulation.product(a, scales, b, weight_scales, groups, torch.float32, turned)
        for a, b in ((codes, weight), (positive(codes), positive(weight)))
    )
    in_tiles = tiled(unsigned(weight), (BLOCK, BLOCK)).view(weight.dtype)
    return (weight, in_tiles), weight_scales, exact, magnitude


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "config", [(128, 128, 8, 3), (64, 128, 4, 3), (128, 128, 8, 3, 2, 2), (64, 64, 4, 4, 2)]
)
def test_products(case, config):
    from ragged_fsdp.fp8 import kernels

    counts, behind, inner, columns = CASES[case]
    config = kernels.Config(*config)
    (rows, groups), seen = cut(counts, behind), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    end = sum(counts)
    codes, scales, x_turned, x_scales = emulation.quantize(values(rows, inner, 0), groups, seen)
    for turned, run in ((False, kernels.product), (True, kernels.lying_product)):
        stored, weight_scales, exact, magnitude = multiplied(codes, scales, groups, columns, turned)
        for weight in stored:
            got = run(codes, scales, weight, weight_scales, groups, DTYPE, config)
            assert_close(got[:end], exact[:end], magnitude[:end]) if end else None
    _, _, dy, dy_scales = emulation.quantize(values(rows, columns, 5), groups, seen)
    got = kernels.weight_gradient(dy, dy_scales, x_turned, x_scales, groups, DTYPE, config)
    exact, magnitude = (
        emulation.weight_gradient(a, dy_scales, b, x_scales, groups, torch.float32)
        for a, b in ((dy, x_turned), (positive(dy), positive(x_turned)))
    )
    assert_close(got, exact, magnitude)
    for group, count in enumerate(counts):
        assert count or not got[group].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("turned", "lying_rows"), [(False, 448), (True, 448), (True, 0)])
def test_the_backend_of_hopper_takes_weights_either_way(case, turned, lying_rows, monkeypatch):
    from ragged_fsdp.fp8 import hopper

    monkeypatch.setattr(hopper, "_LYING_ROWS", lying_rows)
    counts, behind, inner, columns = CASES[case]
    if INTERPRETED and case == "linear":
        pytest.skip("torch's own product of whole blocks needs the GPU")
    rows, groups = cut(counts, behind)
    end = sum(counts)
    codes, scales, _, _ = emulation.quantize(values(rows, inner, 0), groups, None)
    stored, weight_scales, exact, magnitude = multiplied(codes, scales, groups, columns, turned)
    for weight in stored:
        got = hopper.product(codes, scales, weight, weight_scales, groups, DTYPE, turned)
        assert_close(got[:end], exact[:end], magnitude[:end]) if end else None
