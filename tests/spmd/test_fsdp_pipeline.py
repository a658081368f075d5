"""Sharded modules as the stages of ``torch.distributed.pipelining``, which ends their backward itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleavedZeroBubble,
)

from fsdp_cases import DIM, FeedForward, assert_same, average_gradients, fsdp, fully_shard
from rank_pool import spmd

_SCHEDULES = {  # and the stages that a rank of the pipeline holds
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "zero-bubble": (ScheduleInterleavedZeroBubble, 2),
}


def _data(replica, step, device):
    generator = torch.Generator().manual_seed(100 * step + replica)
    return (torch.randn(8, DIM, generator=generator).to(device) for _ in range(2))


@pytest.mark.parametrize("schedule", list(_SCHEDULES))
@pytest.mark.parametrize("reduce_dtype", [None, torch.float64], ids=["plain", "reduced in fp64"])
@spmd(4)
def test_stages_train_like_the_whole_model(rank, schedule, reduce_dtype):
    """Two replicas of a pipeline over two ranks; gradients gather over the microbatches, then reduce."""
    kind, held = _SCHEDULES[schedule]
    mesh = rank.mesh(2, 2, names=("pp", "dp"))
    place, replica, group = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank(), mesh["dp"].get_group()
    torch.manual_seed(0)
    chunks = [nn.Sequential(FeedForward(), FeedForward()).to(rank.device) for _ in range(2 * held)]
    references = copy.deepcopy(chunks)
    mine = range(place, len(chunks), 2)
    options = {
        "mesh": mesh["dp"],
        "reshard_after_forward": False,
        "mp_policy": fsdp.MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
    }
    for index in mine:
        for block in chunks[index]:
            fully_shard(block, **options)
        fully_shard(chunks[index], **options)
    device = torch.device(rank.device)
    stages = [PipelineStage(chunks[i], i, len(chunks), device, group=mesh["pp"].get_group()) for i in mine]
    pipeline = kind(stages if held > 1 else stages[0], n_microbatches=4, loss_fn=F.mse_loss)
    for step in range(2):
        inputs, target = _data(replica, step, device)
        first, last = ((inputs,) if place == 0 else ()), ({"target": target} if place == 1 else {})
        pipeline.step(*first, **last)
        F.mse_loss(nn.Sequential(*references)(inputs), target).backward()
        for reference in references:
            average_gradients(reference, group)
        for index in mine:
            assert_same(chunks[index], references[index], tolerance=1e-5, grads=True)
            chunks[index].zero_grad()
        for reference in references:
            reference.zero_grad()
