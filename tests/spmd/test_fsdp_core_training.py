"""Sharded training equals unsharded training."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp_core_cases import (
    OPTIMIZERS,
    assert_same_params,
    batch,
    clone,
    counting_gathers,
    full,
    loss_of,
    make_net,
    shard,
    train_reference,
    train_sharded,
)
from ragged_fsdp import DBuffer, Rows, fully_shard
from ragged_fsdp.dtensor import is_ragged
from rank_pool import Rank, spmd


@pytest.mark.parametrize(("optimizer", "reshard"), [("adamw", None), ("sgd", False)])
@spmd(1, 3)
def test_parity_of_nested_groups(rank: Rank, optimizer: str, reshard: bool | None) -> None:
    reference = make_net(rank.device)
    model = shard(clone(reference), mesh=rank.mesh(), reshard_after_forward=reshard)
    assert all(is_ragged(p) for p in model.parameters())
    expected = train_reference(reference, OPTIMIZERS[optimizer], rank.world_size, 10)
    losses = train_sharded(model, OPTIMIZERS[optimizer], rank.rank, rank.world_size, 10)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert_same_params(model, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("buffers", [1, 2])
@spmd(2, 3)
def test_large_gradients_move_as_they_come(rank: Rank, buffers: int) -> None:
    """Gradients of every size take the path of large ones, with one buffer and with two."""
    from ragged_fsdp.fsdp import param_group

    saved, param_group._EAGER_GRAD_BYTES = param_group._EAGER_GRAD_BYTES, 64
    try:
        reference = make_net(rank.device, tied=True)
        model = shard(clone(reference), mesh=rank.mesh())
        model.set_reduce_scatter_max_input_buffers(buffers)
        expected = train_reference(reference, OPTIMIZERS["sgd"], rank.world_size, 4)
        losses = train_sharded(model, OPTIMIZERS["sgd"], rank.rank, rank.world_size, 4)
    finally:
        param_group._EAGER_GRAD_BYTES = saved
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert_same_params(model, reference, rtol=1e-4, atol=1e-5)


@spmd(4)
def test_hsdp_accumulation_and_offload(rank: Rank) -> None:
    """Replicas and shards; without sync, without all-reduce, then with both; parameters on the host."""
    reference = make_net(rank.device)
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    model = shard(clone(reference), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    parts = [batch(rank.device, step, 4) for step in range(3)]
    sum(loss_of(reference, part) for tokens in parts for part in tokens.chunk(4)).div(4).backward()
    for step, tokens in enumerate(parts):
        model.set_requires_gradient_sync(step > 0)
        model.set_requires_all_reduce(step > 1)
        loss_of(model, tokens.chunk(4)[rank.rank]).backward()
        if step < 2:
            assert all(p.grad is None for p in model.parameters())
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert param.device.type == param.grad.device.type == "cpu"
        torch.testing.assert_close(full(param.grad), expected[name].grad.cpu(), rtol=1e-4, atol=1e-6)


@spmd(3)
def test_mixed_precision_reduces_in_its_dtype(rank: Rank) -> None:
    """bf16 compute, fp32 reduction: equal to summing the bf16 gradients of the ranks in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference = make_net(rank.device).to(torch.bfloat16)
    model = shard(make_net(rank.device), mesh=rank.mesh(), mp_policy=policy)
    tokens = batch(rank.device, 0, 3)
    loss_of(model, tokens.chunk(3)[rank.rank]).backward()
    sums = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in reference.named_parameters()}
    for part in tokens.chunk(3):
        loss_of(reference, part).backward()
        for name, param in reference.named_parameters():
            sums[name] += param.grad.float() / 3
        reference.zero_grad()
    for name, param in model.named_parameters():
        assert param.dtype == param.grad.dtype == torch.float32
        torch.testing.assert_close(full(param.grad), sums[name], rtol=1e-5, atol=1e-6)


@spmd(2, 4)
def test_frozen_and_mixed_dtypes_in_one_group(rank: Rank) -> None:
    """One gather carries every dtype; only trainable elements are in the gradient buffer."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 8)).to(rank.device)
    net[1].requires_grad_(False)
    net.codes = nn.Parameter(torch.arange(77, dtype=torch.int8, device=rank.device), requires_grad=False)
    reference = clone(net)
    fully_shard(
        net, mesh=rank.mesh(), orig_param_policy=lambda name, p: Rows(4) if p.shape == (40, 40) else None
    )
    x = torch.randn(4, 40, device=rank.device)
    seen = []
    hook = net.register_forward_pre_hook(lambda module, args: seen.append(module.codes.clone()))
    net(x).sum().backward()
    hook.remove()
    reference(x).sum().backward()
    assert torch.equal(seen[0], reference.codes)
    group = net._get_fsdp_state().groups[0]
    trainable = sum(p.numel() for p in reference.parameters() if p.requires_grad)
    (collected,) = group.reducer._fulls.values()
    assert collected.layout.tensor_numel == trainable
    for param, expected in zip(net.parameters(), reference.parameters()):
        assert (param.grad is None) == (expected.grad is None)
        if param.grad is not None:
            torch.testing.assert_close(full(param.grad), expected.grad)
    rows = net[0].weight.to_local()
    assert rows.shape[1:] == (40,) and rows.shape[0] % 4 == 0


@spmd(3)
def test_parameters_and_gradients_lie_in_buffers(rank: Rank) -> None:
    model = shard(make_net(rank.device), mesh=rank.mesh())
    loss_of(model, batch(rank.device, 0, 3).chunk(3)[rank.rank]).backward()
    for block in model.blocks:
        found = [DBuffer.of(p) for p in block.parameters()]
        assert len({id(buffer) for buffer, _ in found}) == 1
        for (buffer, index), param in zip(found, block.parameters()):
            assert torch.equal(buffer.tensor(index).view(-1), param.to_local().view(-1))
            found = DBuffer.of(param.grad)[0]
            assert found.layout is buffer.layout
            assert not param.grad.to_local().numel() or DBuffer.of(param.grad.to_local())[0] is found
    assert DBuffer.of(torch.zeros(3)) is None


@spmd(3)
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
def test_a_gradient_the_user_keeps_stays_as_it_is(rank: Rank, reduction: str) -> None:
    """Also where a rank has no part of it and so the same object in the next step, and after a cast."""
    model = shard(make_net(rank.device), mesh=rank.mesh(), reduction=reduction)
    kept, values = [], []
    for step in range(3):
        if step == 2:
            model.double()
        loss_of(model, batch(rank.device, step, 3).chunk(3)[rank.rank]).backward()
        kept.append([p.grad for p in model.parameters()])
        values.append([full(grad) for grad in kept[-1]])
        assert {grad.dtype for grad in kept[-1]} == {p.dtype for p in model.parameters()}
        model.zero_grad()
    assert any(not grad.to_local().numel() for grad in kept[0])
    for grads, expected in zip(kept, values):
        assert all(torch.equal(full(grad), value) for grad, value in zip(grads, expected))


@spmd(2)
def test_gradients_are_hooked_only_where_they_need_not_wait(rank: Rank) -> None:
    """With one buffer a gradient moves at once only if it is added to what an earlier backward left."""
    from ragged_fsdp.fsdp import param_group

    def hooked() -> set[bool]:
        params = [p for block in model.blocks for g in block._get_fsdp_state().groups for p in g.params]
        return {bool(p.unsharded._post_accumulate_grad_hooks) for p in params}

    saved, param_group._EAGER_GRAD_BYTES = param_group._EAGER_GRAD_BYTES, 64
    try:
        model = shard(make_net(rank.device), mesh=rank.mesh())
        tokens = batch(rank.device, 0, 2).chunk(2)[rank.rank]
        for _ in range(2):
            loss_of(model, tokens).backward()
        assert hooked() == {False}
        alone = [full(p.grad) for p in model.parameters()]
        model.zero_grad()
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            loss_of(model, tokens).backward()
        assert hooked() == {True}
    finally:
        param_group._EAGER_GRAD_BYTES = saved
    for param, once in zip(model.parameters(), alone):
        torch.testing.assert_close(full(param.grad), once)


@spmd(2)
def test_gradients_can_be_copied_and_saved(rank: Rank) -> None:
    model = shard(make_net(rank.device), mesh=rank.mesh())
    loss_of(model, batch(rank.device, 0, 2).chunk(2)[rank.rank]).backward()
    grads = [p.grad for p in model.parameters()]
    file = io.BytesIO()
    torch.save(grads, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    expected = [full(grad) for grad in grads]
    for copies in (copy.deepcopy(grads), [p.grad for p in copy.deepcopy(list(model.parameters()))], loaded):
        for made, grad, value in zip(copies, grads, expected, strict=True):
            assert torch.equal(full(made), value)
            assert not grad.to_local().numel() or DBuffer.of(made) is None  # it lies elsewhere


@spmd(3)
def test_ranks_that_disagree_raise(rank: Rank) -> None:
    hidden = 8 if rank.rank < 2 else 9
    model = nn.Linear(4, hidden).to(rank.device)
    before = model.weight
    with pytest.raises(ValueError, match=r"rank 0 has 'weight \(8, 4\).*rank 2 has 'weight \(9, 4\)"):
        fully_shard(model, mesh=rank.mesh())
    assert model.weight is before and type(model) is nn.Linear


@pytest.mark.parametrize("kept", [2, 3])
@spmd(2)
def test_end_of_the_forward_stays_gathered(rank: Rank, kept: int) -> None:
    """From the second step on backward does not gather its first two groups again, or as many as fit."""
    reference = make_net(rank.device, blocks=5)
    options: dict = {"mesh": rank.mesh()}
    if kept == 3:
        block_bytes = 4 * sum(p.numel() for p in reference.blocks[0].parameters())
        options |= {"reshard_after_forward": "auto", "gathered_budget_bytes": int(3.5 * block_bytes)}
    model = shard(clone(reference), **options)
    calls: list[str] = []
    with counting_gathers(calls):
        expected = train_reference(reference, OPTIMIZERS["sgd"], 2, 3)
        losses = train_sharded(model, OPTIMIZERS["sgd"], rank.rank, 2, 3)
    # each step gathers root and blocks in forward; in backward first all blocks, then those not kept
    assert len(calls) == (6 + 5) + 2 * (6 + 5 - kept)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="go together"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward="auto")
    with pytest.raises(ValueError, match="must be an int >= 0"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward="auto", gathered_budget_bytes=-1)


@spmd(2)
def test_kept_data_is_dropped_if_no_backward_follows(rank: Rank) -> None:
    """The first group of backward stays gathered after forward; a change of parameters must still be seen."""
    model = shard(make_net(rank.device), mesh=rank.mesh())
    tokens = batch(rank.device, 0, 2).chunk(2)[rank.rank]
    for _ in range(2):
        loss_of(model, tokens).backward()
    before = loss_of(model, tokens)  # ends with the last block kept
    assert isinstance(model.blocks[-1].up.weight, DTensor)
    model.reshard()  # the root stays unsharded after forward, as in FSDP2
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    after = loss_of(model, tokens)
    reference = make_net(rank.device)
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(0.5)
    torch.testing.assert_close(after, loss_of(reference, tokens))
    assert not torch.equal(before, after)


@spmd(2)
def test_manual_finalization_and_kept_storage(rank: Rank) -> None:
    """Backwards without sync, then one finalization reduces them; gathered storage keeps its address."""
    reference = make_net(rank.device)
    model = shard(clone(reference), mesh=rank.mesh())
    model.set_manual_backward_finalization(True)
    model.set_keep_unsharded_storage(True)
    model.set_requires_gradient_sync(False)
    addresses = []
    for step in range(2):
        tokens = batch(rank.device, step, 2)
        torch.stack([loss_of(reference, part) for part in tokens.chunk(2)]).mean().backward()
        loss_of(model, tokens.chunk(2)[rank.rank]).backward()
        addresses.append(model._get_fsdp_state().groups[0].model_weight.flat.data_ptr())
    assert addresses[0] == addresses[1]
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    model.finalize_backward(async_op=True).wait()
    for param, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(full(param.grad), expected.grad, rtol=1e-4, atol=1e-6)
    model.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
        model.finalize_backward()


@pytest.mark.parametrize("after_forward", [False, True])
@spmd(2)
def test_a_child_after_its_parent_is_refused(rank: Rank, after_forward: bool) -> None:
    """The parent's call took the child's parameters: top-down order is refused, on every rank."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(rank.device)
    fully_shard(model, mesh=rank.mesh())
    if after_forward:
        model(torch.ones(1, 4, device=rank.device))
    with pytest.raises(ValueError, match="'weight' is already sharded by a call on a module above"):
        fully_shard(model[1], mesh=rank.mesh())
    assert type(model[1]) is nn.Linear
    model(torch.ones(1, 4, device=rank.device)).sum().backward()
