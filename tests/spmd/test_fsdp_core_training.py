"""Sharded training equals unsharded training."""

from functools import partial

import pytest
import torch
from fsdp_core_cases import assert_same_params, clone, make_net, train_reference, train_sharded
from rank_pool import Rank, spmd
from torch.distributed.tensor import DTensor

from ragged_fsdp import fully_shard
from ragged_fsdp.dtensor import is_ragged

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("reshard", [None, False, True])
@spmd(1, 2, 3, 4)
def test_parity_of_nested_groups(rank: Rank, optimizer: str, reshard: bool | None) -> None:
    reference = make_net(rank.device)
    model = clone(reference)
    mesh = rank.mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    assert all(is_ragged(p) for p in model.parameters())
    expected = train_reference(reference, OPTIMIZERS[optimizer], rank.world_size, 10)
    losses = train_sharded(model, OPTIMIZERS[optimizer], rank.rank, rank.world_size, 10)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_same_params(model, reference, rtol=1e-4, atol=1e-5)
