"""Random layouts, options and things that users do to optimizers, beside one process."""

import pytest

from optim_fuzz import OptimizerTrial
from rank_pool import DEVICE, Rank, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="bits are compared with those of the host")
SEEDS = {1: range(104, 118), 2: range(184, 200), 4: range(165, 180)}


@spmd(*SEEDS)
def test_weights_and_state_are_those_of_one_process(rank: Rank) -> None:
    for seed in SEEDS[rank.world_size]:
        OptimizerTrial(rank, seed).run()
