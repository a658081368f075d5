"""Hooks of modules, parameters and autograd on a sharded model."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_cases import (
    DIM,
    FeedForward,
    Transformer,
    assert_same,
    average_gradients,
    backward_both,
    build,
    fully_shard,
    rows,
    shard_blocks,
    tokens,
)
from rank_pool import spmd


@spmd(1, 2)
def test_post_accumulate_hooks_run_once_with_the_reduced_gradient(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    seen = {}

    def hook(parameter):
        assert isinstance(parameter.grad, DTensor)
        seen[id(parameter)] = seen.get(id(parameter), 0) + 1

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    backward_both(model, reference, tokens(rank, 0))
    assert list(seen.values()) == [1] * len(list(reference.parameters()))
    assert_same(model, reference, grads=True)


@spmd(2)
def test_optimizer_in_backward(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        model(tokens(rank, step)).backward()
        reference(tokens(rank, step)).backward()
        average_gradients(reference)
        theirs.step()
        theirs.zero_grad()
    assert_same(model, reference)


@spmd(2)
def test_forward_hooks_see_unsharded_parameters(rank):
    model = FeedForward().to(rank.device)
    fully_shard(model)
    seen = []
    model.register_forward_pre_hook(lambda m, args: seen.append(type(m.up.weight)))
    model.up.register_forward_hook(lambda m, args, out: seen.append(type(m.weight)))
    model(rows(rank, 0)).sum().backward()
    assert not any(issubclass(t, DTensor) for t in seen)


@spmd(2)
def test_full_backward_hooks(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    grads = {model: [], reference: []}
    for module in (model, reference):
        module.layers[1].register_full_backward_hook(
            lambda m, grad_in, grad_out, module=module: grads[module].append(grad_out[0].clone())
        )
        module(tokens(rank, 0)).backward()
    assert torch.equal(grads[model][0], grads[reference][0])
    average_gradients(reference)
    assert_same(model, reference, grads=True)


@spmd(2)
def test_tensor_hooks_on_unsharded_parameters_of_a_forward(rank):
    """A hook set inside forward sees the full gradient of this rank."""
    seen = []

    class Hooked(FeedForward):
        def forward(self, x):
            self.up.weight.register_hook(lambda grad: seen.append(grad.shape))
            return super().forward(x)

    model = Hooked().to(rank.device)
    fully_shard(model)
    model(rows(rank, 0)).sum().backward()
    assert seen == [(23, DIM)]


@spmd(2)
def test_parametrizations(rank):
    """The original tensor is sharded; the parametrized one is computed from the gathered one."""

    class Symmetric(nn.Module):
        def forward(self, w):
            return w + w.T

    def make():
        linear = nn.Linear(DIM, DIM)
        torch.nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())
        return linear

    model, reference = build(make, rank.device)
    fully_shard(model)
    for module in (model, reference):
        module(rows(rank, 0)).square().sum().backward()
    average_gradients(reference)
    assert_same(model, reference, grads=True)


@spmd(2)
def test_ignored_parameters_stay_as_they_are(rank):
    model, reference = build(FeedForward, rank.device)
    ignored = {model.down.weight, model.down.bias}
    fully_shard(model, ignored_params=ignored)
    assert {model.down.weight, model.down.bias} == ignored
    assert isinstance(model.up.weight, DTensor)
    for module in (model, reference):
        module(rows(rank, 0)).square().sum().backward()
    assert torch.equal(model.down.weight.grad, reference.down.weight.grad)  # not reduced
    average_gradients(reference)
    assert torch.equal(model.up.weight.grad.full_tensor(), reference.up.weight.grad)


@pytest.mark.parametrize("which", ["jvp", "vjp"])
@spmd(1)
def test_functional_transforms_of_an_unsharded_module(rank, which):
    model, reference = build(lambda: nn.Linear(DIM, DIM), rank.device)
    fully_shard(model, reshard_after_forward=False)
    x, v = rows(rank, 0), rows(rank, 1)
    results = []
    for module in (model, reference):
        with torch.no_grad():
            module(x)
        if which == "jvp":
            results.append(torch.func.jvp(module, (x,), (v,))[1])
        else:
            results.append(torch.func.vjp(module, x)[1](v)[0])
    torch.testing.assert_close(*results, rtol=0, atol=0)
