"""Random meshes, nodes, ways to move data and things that users do, beside what the numbers must be."""

import pytest

from fsdp_cases import ragged_only
from network_fuzz import NetworkTrial
from rank_pool import DEVICE, Rank, spmd

pytestmark = [ragged_only, pytest.mark.skipif(DEVICE != "cpu", reason="nodes and streams are pretended")]
SEEDS = {2: range(14), 3: range(6), 4: range(5)}


@spmd(*SEEDS)
def test_values_and_gradients_are_those_of_one_process(rank: Rank) -> None:
    for seed in SEEDS[rank.world_size]:
        NetworkTrial(rank, seed).run()
