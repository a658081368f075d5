"""Gathered weights and gradient buffers in memory of the process group's allocator (ncclMemAlloc)."""

import pytest
import torch

from fsdp_core_cases import OPTIMIZERS, clone, make_net, shard, train_sharded
from ragged_fsdp.fsdp import comm_memory
from rank_pool import DEVICE, Rank, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")


@spmd(2)
def test_training_in_process_group_memory(rank: Rank) -> None:
    base = make_net(rank.device)
    losses = []
    for enabled in (False, True):
        model = shard(clone(base), mesh=rank.mesh())
        for module in (model, *model.blocks):
            module.set_allocate_memory_from_process_group_for_comm(enabled)
        losses.append(train_sharded(model, OPTIMIZERS["sgd"], rank.rank, rank.world_size, 5))
    assert losses[0] == losses[1]
    (group,) = model._get_fsdp_state().groups
    assert group.settings.comm_memory is not None
    pool = comm_memory._POOLS[group.mesh.shard_group]._pool
    segments = pool.snapshot()
    assert sum(segment["total_size"] for segment in segments) >= group.gathered_bytes
    group.unshard()
    group.wait_for_unshard()
    address = group.model_weight.flat.data_ptr()
    inside = [s for s in pool.snapshot() if s["address"] <= address < s["address"] + s["total_size"]]
    assert inside, "the gathered weights lie in the pool"
    group.to_sharded()
    torch.cuda.synchronize()
