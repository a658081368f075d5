"""The order of tiles: a permutation in which no cut at a multiple of the block falls inside a tile."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_fsdp.dtensor.geometry import compute_layout
from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.placement import RaggedShard, legal_granularity, placement_from_layout
from ragged_fsdp.planner import plan_group
from ragged_fsdp.policy import Elements, Tiles, parse_granularity
from ragged_fsdp.tiling import tiled, untiled


def tile_of_each(shape: tuple[int, ...], tile: tuple[int, int]) -> torch.Tensor:
    """The number of the tile that each element of a row-major tensor lies in."""
    *lead, rows, columns = shape
    across = -(-columns // tile[1])
    down = -(-rows // tile[0])
    row, column = torch.arange(rows) // tile[0], torch.arange(columns) // tile[1]
    grid = row[:, None] * across + column[None]
    return torch.arange(math.prod(lead)).view(*lead, 1, 1) * (across * down) + grid


shapes = st.lists(st.integers(1, 9), min_size=2, max_size=4).map(tuple)


@settings(max_examples=300, deadline=None)
@given(shape=shapes, tile=st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_a_tile_is_one_run_and_no_block_ends_inside_it(shape, tile):
    owner = tiled(tile_of_each(shape, tile), tile).tolist()
    runs = [number for number, _ in itertools.groupby(owner)]
    assert len(runs) == len(set(runs)), "a tile lies in two runs"
    block, numel = Tiles(*tile).block_numel(shape), math.prod(shape)
    for cut in range(block, numel, block):
        assert owner[cut - 1] != owner[cut], f"a cut at {cut} falls inside a tile"
    whole = torch.arange(numel).view(shape)
    flat = tiled(whole, tile)
    assert sorted(flat.tolist()) == list(range(numel))
    assert torch.equal(untiled(flat, shape, tile), whole)
    # inside a tile elements are row-major
    for _, run in itertools.groupby(zip(owner, flat.tolist()), key=lambda pair: pair[0]):
        places = [place for _, place in run]
        assert places == sorted(places)


@settings(max_examples=200, deadline=None)
@given(shape=shapes, tile=st.tuples(st.integers(1, 4), st.integers(1, 4)), ranks=st.integers(1, 5))
def test_pieces_are_runs_of_the_tiled_order(shape, tile, ranks):
    placement = RaggedShard.even(shape, ranks, Tiles(*tile))
    whole = torch.arange(math.prod(shape)).view(shape)
    pieces = []
    for rank in range(ranks):
        layout = compute_layout(shape, (ranks,), (rank,), (placement,))
        boxes = [whole[tuple(slice(o, o + s) for o, s in zip(*box))].reshape(-1) for box in layout.boxes()]
        pieces += boxes
        assert sum(map(torch.numel, boxes)) == layout.numel
    assert torch.equal(torch.cat(pieces), tiled(whole, tile))


def test_the_drawing_of_the_docstring():
    lines = [line.split("stored")[0].split()[-5:] for line in Tiles.__doc__.splitlines()]
    rows = [row for row in lines if len(row) == 5 and all(len(cell) == 1 for cell in row)]
    letters = [cell for row in rows for cell in row]
    order = tiled(torch.arange(25).view(5, 5), (2, 2)).tolist()
    stored = Tiles.__doc__.split("stored: ")[1].splitlines()[0].replace("|", "").replace(" ", "")
    assert "".join(letters[place] for place in order) == stored


def test_edge_tiles_that_fill_whole_ones_leave_the_block_at_one_tile():
    for shape in ((576, 7168), (2880, 2880), (128, 2880, 5760), (4096, 2880)):
        assert Tiles().block_numel(shape) == 128 * 128, shape
    assert Tiles().block_numel((64, 96)) == 64 * 96, "a tensor smaller than a tile is one tile"
    assert Tiles().block_numel((50257, 768)) == 4 * 128 * 128, "81 rows of six tiles lie behind all others"
    assert Tiles().block_numel((0, 128)) == 1


def test_a_layout_cuts_between_tiles_and_says_so_in_its_digest():
    spec = TensorSpec("w", 2880 * 2880, Tiles().block_numel((2880, 2880)), (128, 128))
    layout = plan_group([spec, TensorSpec("b", 2880)], 7)
    placement = placement_from_layout(layout, 0, (2880, 2880))
    assert placement.tile == (128, 128) and placement.dims == (0, 1)
    assert eval(repr(placement), {"RaggedShard": RaggedShard}) == placement
    owner = tiled(tile_of_each((2880, 2880), (128, 128)), (128, 128))
    for rank in range(1, 7):
        cut = layout.local_range(0, rank).tensor_start
        assert cut in (0, spec.numel) or owner[cut - 1] != owner[cut]
    rowwise = TensorSpec("w", spec.numel, math.gcd(spec.numel, spec.block_numel))
    plain = GroupLayout((rowwise, layout.specs[1]), 7, 128, layout.shard_numel, layout.offsets, 0)
    assert plain.digest != layout.digest
    assert layout.recut(7).specs[0].tile is None


def test_what_tiles_cannot_be_is_said():
    with pytest.raises(ValueError, match="Tiles: rows must be at least 1, got 0"):
        Tiles(0, 8)
    with pytest.raises(ValueError, match="Tiles: columns must be at least 1, got 0"):
        Tiles(8, 0)
    with pytest.raises(ValueError, match="two dims or more, got shape \\(7,\\)"):
        Tiles().block_numel((7,))
    with pytest.raises(ValueError, match="tile must be \\(rows, columns\\)"):
        RaggedShard((0, 1), (1, 1), tile=(3,))
    with pytest.raises(ValueError, match="tiles need two dims or more, and dims of all of them"):
        compute_layout((4, 4), (2,), (0,), (RaggedShard((0,), (1, 1), tile=(2, 2)),))
    with pytest.raises(TypeError, match="need no larger block"):
        legal_granularity((4, 4), Tiles(2, 2), [])
    with pytest.raises(ValueError, match="block of 3 elements does not divide numel 8"):
        TensorSpec("w", 8, 3)
    assert TensorSpec("w", 8, 3, (1, 3)).tile == (1, 3)


def test_settings_name_tiles():
    assert parse_granularity("tiles:64x32") == Tiles(64, 32)
    assert parse_granularity("tiles") == Tiles(128, 128)
    assert parse_granularity("elements:4") == Elements(4)
    for text in ("tiles:0x8", "tiles:8", "tiles8x8"):
        with pytest.raises(ValueError, match="expected"):
            parse_granularity(text)
