"""The 8-bit maps, their rounding, and the block geometry, without a process group."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from ragged_fsdp.optim.adam8bit.codes import (
    FIRST_OCTAVE,
    _thresholds,
    dequantize,
    map_constants,
    nearest_index,
    one_edge,
    quantize,
    rounding_key,
    rounding_noise,
    value_table,
    zero_code,
)
from ragged_fsdp.optim.blocks import block_grid, block_policy, blocks_placements, locate_blocks
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.policy import Elements, Rows, Whole

CPU = torch.device("cpu")


def _normalised_codes(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """The codes of values in a block whose scale is 1."""
    blocks = torch.cat([values, torch.ones(values.shape[0], 1)], dim=1)
    return quantize(blocks, signed)[0][:, :-1].long()


@pytest.mark.parametrize("signed", [True, False])
def test_map_is_the_dynamic_one(signed):
    values = value_table(signed, CPU)
    assert len(values) == 256 and bool((values[1:] > values[:-1]).all())
    assert values[zero_code(signed)] == 0.0 and values[-1] == 1.0
    # the figures of the published map: smallest magnitudes, and the ends
    if signed:
        assert math.isclose(values[128].item(), 0.55e-6, rel_tol=1e-6)
        assert math.isclose(values[0].item(), -0.99296875, rel_tol=1e-6)
    else:
        assert math.isclose(values[1].item(), 0.325e-6, rel_tol=1e-6)
        assert math.isclose(values[254].item(), 0.996484375, rel_tol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_rounds_to_the_nearest_value_and_computed_codes_agree(signed):
    values = value_table(signed, CPU).double()
    middles = ((values[1:] + values[:-1]) / 2).float()
    edges = torch.tensor([2.0**-e for e in range(24)]).repeat(2, 1) * torch.tensor([[1.0], [1 - 2**-24]])
    spread = torch.cat([torch.logspace(-8, 0, 4000), edges.flatten()])
    samples = torch.cat([middles, middles * (1 + 3e-6), middles * (1 - 3e-6), spread]).clamp(-1, 1)
    if signed:
        samples = torch.cat([samples, -samples])
    samples = samples[samples.abs() > (0 if signed else 2e-7)][None]
    codes = _normalised_codes(samples, signed)
    distance = (samples.double() - values[codes]).abs()
    best, nearest = (samples.double()[..., None] - values).abs().min(-1)
    gap = values[(nearest + 1).clamp(max=255)] - values[(nearest - 1).clamp(min=0)]
    # at most a rounding error of the index away from the nearest
    assert bool((distance <= best + 4e-5 * gap).all())
    index = nearest_index(samples.abs(), signed).long()
    sign = torch.where(samples < 0, -1, 1)
    computed = 127 + torch.where(samples < 0, index.clamp(max=127), index) * sign if signed else index - 1
    assert torch.equal(codes, computed)


@pytest.mark.parametrize("signed", [True, False])
def test_no_threshold_depends_on_rounding_twice(signed):
    """The last float below each step of the index, and the next, in exact arithmetic, as an FMA has it."""
    slopes, offsets, _ = map_constants(signed)
    for last in _thresholds(signed, CPU)[127 if signed else 0 :]:
        for magnitude in (last, torch.nextafter(last, torch.tensor(2.0))):
            octave = max(int(magnitude.view(torch.int32)) >> 23, FIRST_OCTAVE) - FIRST_OCTAVE
            slope, offset = Fraction(slopes[octave].item()), Fraction(offsets[octave].item())
            here = _rounded(Fraction(magnitude.item()) * slope + offset)
            fifth, shift = Fraction(torch.tensor(0.2).item()), Fraction(torch.tensor(1.8).item())
            beyond = _rounded(here * fifth + _rounded(offset * shift + Fraction(1, 2)))
            end = _rounded(offset * Fraction(9, 4) + Fraction(13, 8))
            k = torch.tensor(float(beyond if here >= end else min(here, _rounded(end - Fraction(3, 2)))))
            index = int((k + 2.0**23).view(torch.int32)) & 0x1FF
            expected = int(nearest_index(magnitude[None], signed))
            special = expected in (0, 128) if signed else expected in (1, 2, 256)  # comparisons, not sums
            assert special or index == expected, magnitude.item()


def _rounded(exact: Fraction) -> Fraction:
    """The nearest fp32 number, ties to even."""
    if exact == 0:
        return exact
    unit = Fraction(2) ** (math.frexp(float(exact))[1] - 24)
    return round(exact / unit) * unit


@pytest.mark.parametrize("signed", [True, False])
def test_tables_do_not_depend_on_defaults(signed):
    """Scripts for bf16 set the default dtype, others the device; tables are made in the first step."""
    tables = map_constants, one_edge, value_table, _thresholds
    made = [[*map_constants(signed), value_table(signed, CPU), _thresholds(signed, CPU)]]
    default = torch.get_default_dtype()
    try:
        for table in tables:
            table.cache_clear()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            made.append([*map_constants(signed), value_table(signed, CPU), _thresholds(signed, CPU)])
    finally:
        torch.set_default_dtype(default)
        for table in tables:
            table.cache_clear()
    assert all(map(torch.equal, *made)) and {table.dtype for table in made[1]} == {torch.float32}


def test_round_trip_zero_blocks_and_non_finite_blocks():
    blocks = torch.zeros(4, 256)
    blocks[1] = torch.linspace(-3, 2, 256)
    blocks[2, 5], blocks[3, 7] = float("nan"), 1e-38
    codes, scales = quantize(blocks, signed=True)
    back = dequantize(codes, scales, signed=True)
    assert torch.equal(back[0], blocks[0]) and torch.equal(back[3], torch.zeros(256))
    assert bool(((back[1] - blocks[1]).abs() <= 3 * 0.0075).all())
    assert bool(back[2].isnan().all())  # as in fp32, a NaN is never lost


def test_second_moment_never_becomes_zero():
    squares = torch.full((1, 256), 1e-12)
    squares[0, 0], squares[0, 1] = 1.0, 0.0
    codes, _ = quantize(squares, signed=False)
    assert codes[0, 1] == 0 and bool((codes[0, 2:] == 1).all())


@pytest.mark.parametrize("signed", [True, False])
def test_stochastic_rounding_is_unbiased(signed):
    """Means of many roundings of values in every cell, at cell borders, and where decades meet."""
    count = 4000
    values = value_table(signed, CPU)[128 if signed else 1 :]
    fraction = torch.rand(len(values) - 1, generator=torch.Generator().manual_seed(3))
    samples = torch.cat([values[:-1] + fraction * (values[1:] - values[:-1]), values])
    blocks = samples[:, None].expand(-1, count).clone()
    blocks[:, 0] = 1.0
    if signed:
        blocks[1::2, 1:] *= -1
        blocks = blocks[samples < values[-2]]  # -1 has no value of its own
    rows, cols = torch.arange(len(blocks))[:, None] + 7, torch.arange(count)[None]
    noise = rounding_noise(rows, cols, rounding_key(1, 2, 3))[0 if signed else 1]
    back = dequantize(*quantize(blocks, signed, noise), signed)[:, 1:].double()
    exact = blocks[:, 1:2].double()
    spread = back.std(1, keepdim=True)
    # five standard errors, and the grain of a 16-bit draw
    grain = (back.amax(1, keepdim=True) - back.amin(1, keepdim=True)) * 2.0**-16
    bound = 5 * spread / count**0.5 + grain + 1e-7 * exact.abs()
    assert bool(((back.mean(1, keepdim=True) - exact).abs() <= bound).all())
    assert int((spread > 0).sum()) > 100


def test_noise_is_uniform_and_independent():
    """Of rows, columns, moments, steps and parameters: no pair of draws is correlated."""
    rows, cols = torch.arange(256)[:, None], torch.arange(1024)[None]
    draws = [rounding_noise(rows, cols, rounding_key(0, *key)) for key in ((1, 0), (2, 0), (1, 1))]
    every = [moment.flatten() for pair in draws for moment in pair]
    neighbours = [every[0].view(256, 1024).roll(1, dim).flatten() for dim in (0, 1)]
    sample = torch.stack([*every, *neighbours]).double()
    assert bool((sample > 0).all()) and bool((sample < 1).all())
    error = sample.shape[1] ** -0.5
    assert bool((torch.corrcoef(sample) - torch.eye(len(sample))).abs().max() < 5 * error)
    for draw in every:
        histogram = torch.histc(draw, 64, 0, 1).double()
        expected = draw.numel() / 64
        chi_squared = float(((histogram - expected) ** 2 / expected).sum())
        assert 20 < chi_squared < 130  # 63 degrees of freedom
    part = rounding_noise(rows[5:9], cols[:, 100:300], rounding_key(0, 1, 0))[0]
    assert torch.equal(part, draws[0][0][5:9, 100:300])  # a place's draw does not depend on the others


def test_blocks_come_from_the_global_shape():
    assert block_grid((128, 96)).grid_shape == (4, 3)
    assert block_grid((36, 300)).granularity == Rows(4) and block_grid((36, 300)).block_cols == 256
    assert block_grid((4, 64, 40)).grid_shape == (4, 2, 2)
    assert block_grid((1024,)).granularity == Elements(256)
    assert block_grid((1000,)).granularity == Whole()
    assert not block_grid((4096, 2)).tiled
    policy = block_policy(min_numel=4096)
    assert policy("w", torch.empty(128, 96)) == Rows(32)
    assert policy("b", torch.empty(96)) is None
    stacked = torch.empty(64, 256)  # a bias for each of 64 experts: a block of them would hold several
    assert policy("experts.up_proj_bias", stacked) == Rows(32)
    assert block_policy(exclude=["*_bias"])("experts.up_proj_bias", stacked) is None
    for bad in ((3, 32), (32,), (0, 32)):
        with pytest.raises(ValueError, match="power"):
            block_grid((64, 64), bad)


@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 70),
    lead=st.sampled_from([(), (2,), (3,)]),
    units=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(sum),
    block=st.sampled_from([(4, 4), (2, 16), (1, 128)]),
)
@settings(max_examples=60, deadline=None)
def test_parts_cover_the_grid_once_or_are_refused(rows, cols, lead, units, block):
    """Every rank's blocks, put together, are the grid; a layout that cuts a block is refused."""
    shape = (*lead, rows * 4, cols)
    grid = block_grid(shape, block, run=16)
    if math.prod(shape) % sum(units):
        return
    placements = (RaggedShard(range(len(shape)), units),)
    parts = locate_blocks(grid, (len(units),), placements)
    unit_numel = math.prod(shape) // sum(units)
    bounds = [s * unit_numel for s in itertools.accumulate(units, initial=0)]
    cut = any(b % grid.granule_numel and b != grid.numel for b in bounds)
    assert (None in parts) == cut
    if cut:
        return
    seen = torch.zeros(grid.numel, dtype=torch.int)
    for part in parts:
        element = part.source_row(torch.arange(part.rows))[:, None] * grid.cols + part.col_base
        element = element + torch.arange(part.cols)
        seen[element.view(-1)[: part.numel]] += 1
    assert bool((seen == 1).all())
    assert blocks_placements(grid, (len(units),), placements) is not None


def test_blocks_under_several_placements():
    grid = block_grid((256, 128))
    fine = [
        (Replicate(), Shard(0)),
        (Shard(0), Shard(1)),
        (Replicate(), RaggedShard((0,), (3, 5))),
        (StridedRaggedShard((0,), (1, 3)), Shard(0)),
        (RaggedShard((0,), (1, 3)), Shard(1)),
    ]
    for placements in fine:
        assert None not in locate_blocks(grid, (2, 2), placements), placements
        assert blocks_placements(grid, (2, 2), placements) is not None, placements
    for placements in [(Shard(0), RaggedShard((0,), (1, 7))), (RaggedShard((0, 1), (1, 511)), Replicate())]:
        assert None in locate_blocks(grid, (2, 2), placements), placements
