"""The 8-bit maps, their rounding, and the block geometry, without a process group."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from ragged_fsdp.optim.quant import (
    codebook,
    computed_codes,
    dequantize,
    quantize,
    rounding_key,
    rounding_noise,
    step_table,
)
from ragged_fsdp.optim.quant_grid import block_grid, block_policy, blocks_placements, locate_blocks
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.policy import Elements, Rows, Whole


def _normalised_codes(values: torch.Tensor, signed: bool) -> torch.Tensor:
    """The codes of values in a block whose scale is 1."""
    blocks = torch.cat([values, torch.ones(values.shape[0], 1)], dim=1)
    return quantize(blocks, signed)[0][:, :-1].long()


@pytest.mark.parametrize("signed", [True, False])
def test_map_is_the_dynamic_one(signed):
    book = codebook(signed)
    values = torch.tensor(book.values)
    assert len(book.values) == 256 and bool((values[1:] > values[:-1]).all())
    assert book.values[book.zero_code] == 0.0 and book.values[-1] == 1.0
    # the figures of the published map: smallest magnitudes, and the ends
    if signed:
        assert math.isclose(values[128].item(), 0.55e-6, rel_tol=1e-6)
        assert math.isclose(values[0].item(), -0.99296875, rel_tol=1e-6)
    else:
        assert math.isclose(values[1].item(), 0.325e-6, rel_tol=1e-6)
        assert math.isclose(values[254].item(), 0.996484375, rel_tol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_rounds_to_the_nearest_value_and_computed_codes_agree(signed):
    values = torch.tensor(codebook(signed).values, dtype=torch.float64)
    middles = ((values[1:] + values[:-1]) / 2).float()
    spread = torch.logspace(-8, 0, 4000)
    samples = torch.cat([middles, middles * (1 + 3e-6), middles * (1 - 3e-6), spread]).clamp(-1, 1)
    if signed:
        samples = torch.cat([samples, -samples])
    samples = samples[samples.abs() > (0 if signed else 2e-7)][None]
    codes = _normalised_codes(samples, signed)
    distance = (samples.double() - values[codes]).abs()
    best = (samples.double()[..., None] - values).abs().amin(-1)
    # at most a rounding error of fp32 away from the nearest
    assert bool((distance <= best + 1e-6 * samples.abs().double()).all())
    assert torch.equal(codes, computed_codes(samples, signed))


@pytest.mark.parametrize("signed", [True, False])
def test_step_table_is_the_same_function(signed):
    shift = 17 if signed else 16
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.logspace(-9, 0, 20000), torch.rand(20000, generator=generator)])
    bits = values.view(torch.int32)
    table = step_table(signed, torch.device("cpu"))
    entry = table[((bits >> shift) - ((127 - 23) << (23 - shift))).clamp(0, table.numel() - 1)]
    index = (entry >> 20) + ((bits & ((1 << shift) - 1)) > (entry & 0xFFFFF))
    assert torch.equal(index.long(), computed_codes(values, signed) - (127 if signed else 0))


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
def test_stochastic_rounding_keeps_the_mean_and_needs_no_neighbours(signed):
    values = torch.rand(8, 1, generator=torch.Generator().manual_seed(3)).expand(8, 40000).clone()
    values[:, 0] = 1.0
    if signed:
        values[1::2, 1:] *= -1
    element = torch.arange(values.numel()).view_as(values)
    noise = rounding_noise(element, rounding_key(1, 2, 3))[0 if signed else 1]
    back = dequantize(*quantize(values, signed, noise), signed)
    error = (back - values)[:, 1:]
    assert bool((error.mean(1).abs() < 5e-4).all()) and bool((error.abs() > 1e-4).any())
    assert torch.equal(noise[2:4], rounding_noise(element[2:4], rounding_key(1, 2, 3))[0 if signed else 1])
    assert abs(noise.mean().item() - 0.5) < 5e-3
    assert not torch.equal(noise, rounding_noise(element, rounding_key(1, 3, 3))[0 if signed else 1])


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
        element = part.element_of_row(torch.arange(part.rows))[:, None] + torch.arange(part.cols)
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
