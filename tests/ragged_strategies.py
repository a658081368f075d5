"""Random placements on N-D meshes, for property tests."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.routes import chunk_bounds

__all__ = ["placements"]


@st.composite
def split(draw, total: int, ranks: int) -> tuple[int, ...]:
    """``total`` rows over ``ranks``, anything from even to all on one; (1, ...) where there are none."""
    if not total:
        return (0,) * ranks
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=ranks - 1, max_size=ranks - 1)))
    return tuple(b - a for a, b in itertools.pairwise([0, *cuts, total]))


@st.composite
def placements(draw, shape: tuple[int, ...], mesh_shape: tuple[int, ...], with_partial: bool) -> tuple:
    """Any legal combination: at most one ragged placement, Shard and Replicate elsewhere."""
    plain = [Replicate(), *(Shard(d) for d in range(len(shape)))]
    chosen = [draw(st.sampled_from([*plain, Partial()] if with_partial else plain)) for _ in mesh_shape]
    if not draw(st.booleans()):
        return tuple(chosen)
    at, prefix = draw(st.integers(0, len(mesh_shape) - 1)), draw(st.integers(1, len(shape)))
    chosen[at] = Replicate()
    cut = any(isinstance(p, Shard) and p.dim < prefix for p in chosen)
    units = []
    for coordinate in itertools.product(
        *(range(n) if isinstance(p, Shard) else (0,) for n, p in zip(mesh_shape, chosen))
    ):
        inner = list(shape)
        for placement, size, index in zip(chosen, mesh_shape, coordinate):
            if isinstance(placement, Shard):
                begin, end = chunk_bounds(inner[placement.dim], size, index)
                inner[placement.dim] = end - begin
        units.append(draw(split(math.prod(inner[:prefix]), mesh_shape[at])))
    tile = draw(st.sampled_from([None, (2, 2), (2, 3), (1, 1)])) if prefix == len(shape) > 1 else None
    if cut and any(sum(u) for u in units):
        chosen[at] = StridedRaggedShard(range(prefix), units, tile)
    else:
        chosen[at] = RaggedShard(range(prefix), units[0] if sum(units[0]) else (1,) * mesh_shape[at], tile)
    return tuple(chosen)
