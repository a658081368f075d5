"""Parameters, gradients and optimizer states in CPU memory."""

import pytest
import torch

from fsdp_cases import (
    RAGGED,
    Transformer,
    assert_same,
    average_gradients,
    build,
    fsdp,
    shard_blocks,
    tokens,
)
from rank_pool import DEVICE, spmd

# without an accelerator there is nothing to pin memory for, and stock FSDP2 raises
PINNED = [False, True] if DEVICE == "cuda" or RAGGED else [False]


@pytest.mark.parametrize("pinned", PINNED)
@spmd(2)
def test_training_with_offload(rank, pinned):
    model, reference = build(Transformer, rank.device)
    model.cpu()
    shard_blocks(model, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=pinned))
    ours = torch.optim.AdamW(model.parameters(), lr=1e-3)
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(3):
        for module in (model, reference):
            module(tokens(rank, step)).backward()
        average_gradients(reference)
        for parameter in model.parameters():
            assert parameter.device.type == parameter.grad.device.type == "cpu"
            local = parameter.to_local()
            if local.numel():  # an empty one has no address to ask about
                assert local.is_pinned() == (pinned and DEVICE == "cuda")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for parameter in model.parameters():
        assert ours.state[parameter]["exp_avg"].device.type == "cpu"
    if rank.device == "cpu":
        assert_same(model, reference)


@pytest.mark.parametrize("sync_each", [True, False])
@spmd(3)
def test_accumulation_with_offload(rank, sync_each):
    model, reference = build(Transformer, rank.device)
    model.cpu()
    shard_blocks(model, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    for step in range(3):
        model.set_requires_gradient_sync(sync_each or step == 2)
        for module in (model, reference):
            module(tokens(rank, step)).backward()
    average_gradients(reference)
    if rank.device == "cpu":
        assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_post_accumulate_hooks_see_the_offloaded_gradient(rank):
    """Optimizer in backward: the hook steps and frees."""
    model, reference = build(Transformer, rank.device)
    model.cpu()
    shard_blocks(model, offload_policy=fsdp.CPUOffloadPolicy(pin_memory=False))
    calls = []

    def hook(parameter):
        assert parameter.grad.device.type == "cpu"
        calls.append(parameter)
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    model(tokens(rank, 0)).backward()
    reference(tokens(rank, 0)).backward()
    average_gradients(reference)
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    assert len(calls) == len(list(model.parameters()))
    if rank.device == "cpu":
        assert_same(model, reference)
