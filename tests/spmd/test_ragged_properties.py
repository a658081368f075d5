"""Random shapes, meshes, units and pairs of placements against the unsharded tensor."""

import functools
import math

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from ragged_cases import assert_same, numbers
from ragged_fsdp.dtensor import distribute_tensor, is_ragged
from ragged_strategies import placements
from rank_pool import DEVICE, spmd

MESHES = {3: [(3,), (3, 1), (1, 3)], 4: [(4,), (2, 2), (2, 2, 1), (1, 4), (2, 1, 2)]}
CASES_PER_EXAMPLE = 25


@st.composite
def cases(draw, world: int) -> tuple:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    mesh_shape = draw(st.sampled_from(MESHES[world]))
    source = draw(placements(shape, mesh_shape, with_partial=True))
    target = draw(placements(shape, mesh_shape, with_partial=False))
    return shape, mesh_shape, source, target, draw(st.booleans())


@functools.cache
def _mesh(device: str, mesh_shape: tuple[int, ...]) -> DeviceMesh:
    """One mesh of each shape for the life of the ranks: new groups are slow to make."""
    return init_device_mesh(device, mesh_shape)


@spmd(3, 4)
def moves(rank, batch):
    for shape, mesh_shape, source, target, async_op in batch:
        mesh = _mesh(rank.device, mesh_shape)
        note = f"{shape} on {mesh_shape}: {source} -> {target}"
        full = numbers(7, *shape, device=rank.device)
        pending = math.prod(n for n, p in zip(mesh_shape, source) if p.is_partial())
        settled = tuple(Replicate() if p.is_partial() else p for p in source)
        start = distribute_tensor(full, mesh, settled, src_data_rank=None)
        if pending > 1:
            local = start.to_local() / pending
            start = DTensor.from_local(local, mesh, source, shape=full.shape, stride=full.stride())
        end = start.redistribute(placements=target, async_op=async_op)
        expected = distribute_tensor(full, mesh, target, src_data_rank=None)
        assert end.placements == target, note
        assert_same(end.to_local() + 0, expected.to_local(), note, exact=pending == 1)
        assert_same(end, full, note)
        assert_same((end * 2).sum(), full.sum() * 2, note)
        if is_ragged(end):  # stock fails on an empty shard
            assert_same(torch.linalg.vector_norm(end, math.inf), full.abs().max(), note)


def _property(world: int):
    @settings(
        max_examples=6 if DEVICE == "cpu" else 2,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a shrink would start a new pool of ranks for every attempt
        suppress_health_check=list(HealthCheck),
    )
    @given(batch=st.lists(cases(world), min_size=CASES_PER_EXAMPLE, max_size=CASES_PER_EXAMPLE))
    def check(tmp_path, batch):
        moves(world_size=world, tmp_path=tmp_path, batch=batch)

    return check


if DEVICE == "cpu":
    test_moves_on_three_ranks = _property(3)
test_moves_on_four_ranks = _property(4)
