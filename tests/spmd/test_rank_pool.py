"""The pool itself: every rank runs, a failing rank is named, and a broken pool is replaced."""

import pytest
import torch
import torch.distributed as dist

from rank_pool import spmd


@spmd(1, 2, 3, 4)
def test_every_rank_takes_part(rank):
    total = torch.ones(1, device=rank.device)
    dist.all_reduce(total)
    assert total.item() == rank.world_size == dist.get_world_size()


def _fails_on_rank_one(rank):
    assert rank.rank != 1, "planted"


def test_a_failing_rank_is_reported_and_the_next_test_gets_a_new_pool(tmp_path):
    failing = spmd(2)(_fails_on_rank_one)
    with pytest.raises(pytest.fail.Exception, match=r"rank 1: (.|\n)*planted"):
        failing(world_size=2, tmp_path=tmp_path)
    spmd(2)(test_every_rank_takes_part.on_rank)(world_size=2, tmp_path=tmp_path)


def _skips(rank):
    pytest.skip("not here")


def test_a_skip_on_the_ranks_skips_the_test(tmp_path):
    with pytest.raises(pytest.skip.Exception, match="not here"):
        spmd(2)(_skips)(world_size=2, tmp_path=tmp_path)
