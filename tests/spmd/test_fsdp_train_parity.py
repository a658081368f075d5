"""Ten steps of sharded training give the losses and parameters of unsharded training."""

import pytest
import torch

from fsdp_cases import (
    Transformer,
    assert_same,
    average_gradients,
    build,
    shard_blocks,
    tokens,
    tolerance_for,
)
from rank_pool import spmd

STEPS = 10
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


def _train(rank, *, moe, optimizer, mesh=None, clip=None, accumulate=1, **kwargs):
    """Train both models; assert equal losses at each step and equal parameters at the end."""
    model, reference = build(lambda: Transformer(moe=moe), rank.device)
    shard_blocks(model, mesh=mesh, **kwargs)
    ours, theirs = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](reference.parameters())
    exact = rank.world_size <= 2 and clip is None
    for step in range(STEPS):
        for micro in range(accumulate):
            model.set_requires_gradient_sync(micro == accumulate - 1)
            batch = tokens(rank, step * accumulate + micro)
            loss, expected = model(batch), reference(batch)
            torch.testing.assert_close(loss, expected, rtol=0 if exact else 1e-6, atol=0)
            (loss / accumulate).backward()
            (expected / accumulate).backward()
        average_gradients(reference)
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            expected_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
        for optim in (ours, theirs):
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
    assert_same(model, reference, tolerance=0.0 if exact else 1e-6)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@spmd(1, 2, 3, 4)
def test_adamw_equals_unsharded_training(rank, moe):
    _train(rank, moe=moe, optimizer="adamw")


@pytest.mark.parametrize("reshard", [True, False])
@spmd(3)
def test_sgd_with_momentum_and_clipping(rank, reshard):
    _train(rank, moe=True, optimizer="sgd", clip=0.1, reshard_after_forward=reshard)


@spmd(2)
def test_accumulation_over_three_microbatches(rank):
    _train(rank, moe=True, optimizer="adamw", accumulate=3)


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (4, 1), (1, 4)])
@spmd(4)
def test_hsdp(rank, replicas, shards):
    _train(rank, moe=True, optimizer="adamw", mesh=rank.mesh(replicas, shards, names=("replicate", "shard")))


@spmd(4)
def test_hsdp_with_accumulation_and_clipping(rank):
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    _train(rank, moe=False, optimizer="adamw", mesh=mesh, accumulate=2, clip=0.5)


@spmd(4)
def test_reshard_after_forward_to_a_smaller_group(rank):
    _train(rank, moe=False, optimizer="sgd", reshard_after_forward=2)


@spmd(2)
def test_gradients_equal_before_the_step(rank):
    model, reference = build(lambda: Transformer(moe=True), rank.device)
    shard_blocks(model)
    for step in range(2):  # gradients accumulate over the two backwards
        model(tokens(rank, step)).backward()
        reference(tokens(rank, step)).backward()
    average_gradients(reference)
    assert_same(model, reference, tolerance=max(tolerance_for(rank.world_size), 1e-6), grads=True)
