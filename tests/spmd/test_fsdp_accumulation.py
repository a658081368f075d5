"""Gradient accumulation with and without communication."""

import pytest
import torch
from torch import nn

from collective_calls import count
from fsdp_cases import (
    Transformer,
    assert_same,
    average_gradients,
    backward_through,
    build,
    fsdp,
    in_dtype,
    is_sharded,
    ragged_only,
    shard_blocks,
    tokens,
)
from rank_pool import spmd

MICROBATCHES = 3
GROUPS = 3  # two layers and the root


def _accumulate(model, reference, rank, before):
    """Backward of each microbatch on both models; ``before(index)`` runs first. Returns the counts."""
    seen = []
    for index in range(MICROBATCHES):
        before(index)
        loss = model(tokens(rank, index))
        seen.append(count(loss.backward)[1])
        reference(tokens(rank, index)).backward()
    average_gradients(reference)
    return seen


@pytest.mark.parametrize("set_to_none", [True, False])
@spmd(1, 3)
def test_without_communication_until_the_last_microbatch(rank, set_to_none):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    for _ in range(2):  # the second iteration meets gradients that were zeroed or freed
        seen = _accumulate(
            model, reference, rank, lambda i: model.set_requires_gradient_sync(i == MICROBATCHES - 1)
        )
        expected = [0, 0, GROUPS] if rank.world_size > 1 else [0, 0, 0]
        assert [c.get("reduce_scatter", 0) for c in seen] == expected
        assert_same(model, reference, tolerance=1e-6, grads=True)
        for module in (model, reference):
            module.zero_grad(set_to_none=set_to_none)


@spmd(2)
def test_gradients_are_absent_while_communication_is_off(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model)
    model.set_requires_gradient_sync(False)
    model(tokens(rank, 0)).backward()
    model.set_requires_gradient_sync(True)
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.to_local().abs().sum() == 0


@spmd(2)
def test_sync_can_be_switched_for_one_module_only(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    layer = model.layers[0]
    seen = _accumulate(
        model,
        reference,
        rank,
        lambda i: layer.set_requires_gradient_sync(i == MICROBATCHES - 1, recurse=False),
    )
    assert [c["reduce_scatter"] for c in seen] == [GROUPS - 1, GROUPS - 1, GROUPS]
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_parameters_may_stay_unsharded_between_backwards(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=False)

    def before(index):
        model.set_is_last_backward(index == MICROBATCHES - 1)
        model.set_reshard_after_backward(index == MICROBATCHES - 1)
        model.set_requires_gradient_sync(index == MICROBATCHES - 1)

    gathers = []
    for index in range(MICROBATCHES):
        before(index)
        loss, seen = count(lambda index=index: model(tokens(rank, index)))
        gathers.append(seen.get("gather", 0))
        loss.backward()
        assert is_sharded(model.parameters()) == (index == MICROBATCHES - 1)
        reference(tokens(rank, index)).backward()
    assert gathers == [GROUPS, 0, 0]
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-6, grads=True)


@pytest.mark.parametrize("reduce_scatter_each", [True, False])
@spmd(4)
def test_hsdp_defers_the_all_reduce(rank, reduce_scatter_each):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh(2, 2, names=("replicate", "shard")))

    def before(index):
        last = index == MICROBATCHES - 1
        if reduce_scatter_each:
            model.set_requires_all_reduce(last)
        else:
            model.set_requires_gradient_sync(last)

    for _ in range(2):
        seen = _accumulate(model, reference, rank, before)
        scatters = [GROUPS] * MICROBATCHES if reduce_scatter_each else [0, 0, GROUPS]
        assert [c.get("reduce_scatter", 0) for c in seen] == scatters
        assert [c.get("all_reduce", 0) for c in seen] == [0, 0, GROUPS]
        assert_same(model, reference, tolerance=2e-6, grads=True)
        model.zero_grad()
        reference.zero_grad()


@spmd(4)
def test_hsdp_with_offload_without_sync_then_without_all_reduce(rank):
    """Gradients wait whole on the device, then as sums of a shard, and arrive on the host after both."""
    model, reference = build(Transformer, rank.device)
    model.cpu()
    offload = fsdp.CPUOffloadPolicy(pin_memory=False)
    shard_blocks(model, mesh=rank.mesh(2, 2, names=("replicate", "shard")), offload_policy=offload)

    def before(index):
        model.set_requires_gradient_sync(index > 0)
        model.set_requires_all_reduce(index > 1)
        assert all(p.grad is None for p in model.parameters())

    _accumulate(model, reference, rank, before)
    assert all(p.device.type == p.grad.device.type == "cpu" for p in model.parameters())
    assert_same(model, reference.cpu(), tolerance=2e-6, grads=True)


@spmd(2)
def test_mixed_precision_accumulates_in_the_reduce_dtype(rank):
    """bf16 gradients summed in float32: the sum equals the float32 sum of the bf16 gradients."""
    model, reference = build(Transformer, rank.device)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_blocks(model, mp_policy=policy)
    for index in range(MICROBATCHES):
        model.set_requires_gradient_sync(index == MICROBATCHES - 1)
        model(tokens(rank, index)).backward()
        backward_through(reference, in_dtype(reference, torch.bfloat16), tokens(rank, index))
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-6, grads=True)


@ragged_only
@spmd(2)
def test_manual_finalization_and_kept_storage(rank):
    """Backwards without sync, then one finalization reduces them; gathered storage keeps its address."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    model.set_manual_backward_finalization(True)
    model.set_keep_unsharded_storage(True)
    model.set_requires_gradient_sync(False)
    addresses = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, args: addresses.append(m.norm1.weight.data_ptr()))
    for step in range(2):
        model(tokens(rank, step)).backward()
        reference(tokens(rank, step)).backward()
    assert addresses[:2] == addresses[2:]
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    _, seen = count(lambda: model.finalize_backward(async_op=True).wait())
    assert seen == {"reduce_scatter": GROUPS}
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-6, grads=True)
    model.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
        model.finalize_backward()


class _Some(nn.Module):
    """Uses those of its parameters that it is told to."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3, 3))

    def forward(self, x, used):
        return sum((x * getattr(self, name).sum() for name in used), x)


class _TwoOfThem(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = _Some(), _Some()

    def forward(self, x, used_by_both):
        for module, used in zip((self.first, self.second), used_by_both):
            x = module(x, used) if used else x
        return x.sum()


@ragged_only
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
@spmd(4)
def test_hsdp_keeps_what_only_an_earlier_microbatch_used(rank, reduction):
    """A parameter, and a whole module, without a gradient in the backward that ends with the all-reduce."""
    model, reference = build(_TwoOfThem, rank.device)
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    for module in (model.first, model.second, model):
        fsdp.fully_shard(module, mesh=mesh, reduction=reduction)
    x = torch.ones(2, device=rank.device)
    for _ in range(2):  # nothing may be left for the second step
        for used in (("ab", "ab"), ("a", "b"), ("b", "")):
            model.set_requires_all_reduce(used == ("b", ""))
            model(x, used).backward()
            reference(x, used).backward()
        average_gradients(reference)
        assert_same(model, reference, tolerance=1e-6, grads=True)
        model.zero_grad()
        reference.zero_grad()
