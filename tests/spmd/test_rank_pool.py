"""The pool itself: every rank runs, a failing rank is named, and a broken pool is replaced."""

import warnings
from pathlib import Path

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


def _skips_on(rank, ranks):
    if rank.rank in ranks:
        pytest.skip("planted")


def test_a_test_is_skipped_by_all_ranks_or_none(tmp_path):
    skipping = spmd(2)(_skips_on)
    with pytest.raises(pytest.skip.Exception, match="planted"):
        skipping(world_size=2, tmp_path=tmp_path, ranks=(0, 1))
    for one in (0, 1):
        with pytest.raises(pytest.fail.Exception, match=rf"only some of the ranks.*{one}: '.*planted"):
            skipping(world_size=2, tmp_path=tmp_path, ranks=(one,))
    skipping(world_size=2, tmp_path=tmp_path, ranks=())


def _warns(rank, category, module):
    warnings.warn_explicit("planted", category, "file.py", 1, module=module, registry={})


@pytest.mark.parametrize("category", [UserWarning, FutureWarning, DeprecationWarning])
def test_a_warning_from_our_own_frames_is_an_error(tmp_path, category):
    with pytest.raises(category, match="planted"):
        _warns(None, category, "ragged_fsdp.dtensor.redistribute")
    warned = spmd(2)(_warns)
    with pytest.raises(pytest.fail.Exception, match="planted"):
        warned(world_size=2, tmp_path=tmp_path, category=category, module="ragged_fsdp.dtensor.redistribute")
    _warns(None, category, "torch.distributed")
    warned(world_size=2, tmp_path=tmp_path, category=category, module="torch.distributed")


@spmd(2)
def test_gloo_groups_have_one_worker_thread(rank):
    """Two of them corrupt the heap now and then, and some later test is aborted."""

    def workers():
        return sum(path.read_text() == "pt_gloo_runloop\n" for path in Path("/proc/self/task").glob("*/comm"))

    before, group = workers(), dist.new_group(backend="gloo")
    dist.barrier(group)  # by when its threads have their names
    assert workers() == before + 1
    dist.destroy_process_group(group)
