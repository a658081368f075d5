"""Modules called several times, several forwards, no-grad forwards, partial runs, exceptions."""

import pytest
import torch
from torch import nn

from collective_calls import count
from fsdp_cases import (
    DIM,
    FeedForward,
    Transformer,
    assert_same,
    average_gradients,
    build,
    fully_shard,
    is_sharded,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
)
from rank_pool import spmd


class _Loop(nn.Module):
    """Runs one block three times in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = FeedForward(), nn.Linear(DIM, DIM)

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return self.last(x)


def _finish(model, reference, tolerance=1e-6):
    average_gradients(reference)
    assert_same(model, reference, tolerance=tolerance, grads=True)


@pytest.mark.parametrize("reshard", [True, False])
@spmd(2)
def test_a_module_reused_within_a_forward(rank, reshard):
    model, reference = build(_Loop, rank.device)
    fully_shard(model.block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    for step in range(2):
        for module in (model, reference):
            module.zero_grad()
            module(rows(rank, step)).square().sum().backward()
        _finish(model, reference)


@pytest.mark.parametrize("reshard", [True, False, None])
@spmd(1, 2)
def test_several_forwards_before_one_backward(rank, reshard):
    """As in preference optimisation: chosen and rejected, plus a reference pass without gradients."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=reshard)
    for step in range(2):
        for module in (model, reference):
            module.zero_grad()
            chosen = module(tokens(rank, 10 * step))
            with torch.no_grad():
                module(tokens(rank, 10 * step + 1))
            rejected = module(tokens(rank, 10 * step + 2))
            (2 * chosen - rejected).backward()
        _finish(model, reference)


@spmd(2)
def test_forward_backward_interleaved_out_of_order(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    for module in (model, reference):
        first, second = module(tokens(rank, 0)), module(tokens(rank, 1))
        first.backward()
        second.backward()
    _finish(model, reference)


def _evaluate_and_train(rank, no_gradients):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    for step in range(2):
        model.eval()
        with no_gradients():
            assert torch.equal(model(tokens(rank, step)), reference(tokens(rank, step)))
        model.train()
        for module in (model, reference):
            module(tokens(rank, step)).backward()
    _finish(model, reference)


@spmd(2)
def test_evaluation_between_training_steps(rank):
    _evaluate_and_train(rank, torch.no_grad)


@ragged_only
@spmd(2)
def test_inference_mode_before_training(rank):
    """Stock FSDP2 cannot train after a first forward under ``torch.inference_mode``."""
    _evaluate_and_train(rank, torch.inference_mode)


@spmd(2)
def test_eval_as_the_very_first_call(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    with torch.no_grad():
        assert torch.equal(model(tokens(rank, 0)), reference(tokens(rank, 0)))
    assert is_sharded(model.layers.parameters())


@ragged_only
@pytest.mark.parametrize("reshard", [None, True, False, 2])
@spmd(4)
def test_weights_gathered_before_an_optimizer_step_are_gathered_again(rank, reshard):
    """By an evaluation between backward and step, by hand, or because a backward kept them; FSDP2 goes on
    with the old ones. What was gathered after the step is used."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(list(m.parameters()), lr=0.1) for m in (model, reference)]
    for step in range(4):
        losses = [m(tokens(rank, step)) for m in (model, reference)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for loss in losses:
            loss.backward()
        average_gradients(reference)
        if step == 0:
            with torch.no_grad():
                model(tokens(rank, 9))
        elif step == 1:
            model.layers[0].unshard()
            model.set_reshard_after_backward(False)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    gathers = []
    for ahead in (False, True):
        for module in (*model.layers, model):
            module.reshard()
        assert_same(model, reference, tolerance=1e-5)
        if ahead:
            model.unshard()
        with torch.no_grad():
            gathers.append(count(lambda: model(tokens(rank, 0)))[1]["gather"])
    assert gathers[1] == gathers[0] - 1


@spmd(2)
def test_a_submodule_called_by_itself(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    x = torch.randn(2, 3, DIM, device=rank.device)
    model(tokens(rank, 0)).backward()
    reference(tokens(rank, 0)).backward()
    for module in (model, reference):
        module.layers[1](x).square().sum().backward()
    _finish(model, reference)


@spmd(2)
def test_a_backward_that_reaches_only_some_layers(rank):
    """The graph is cut below the last layer."""

    class Cut(Transformer):
        def forward(self, batch):
            x = self.layers[0](self.embed(batch[:, :-1])).detach()
            return self.head(self.norm(self.layers[1](x))).square().mean()

    model, reference = build(Cut, rank.device)
    shard_blocks(model)
    for step in range(2):
        for module in (model, reference):
            module(tokens(rank, step)).backward()
    _finish(model, reference)
    assert model.layers[0].norm1.weight.grad is None


@spmd(2)
def test_a_loss_of_what_a_module_computed_inside(rank):
    """No gradient arrives at an output; the gradients of the input end the backward of each step alike."""

    class Probed(FeedForward):
        def forward(self, x):
            self.inside = self.up(x)
            return self.down(self.inside)

    model, reference = build(Probed, rank.device)
    fully_shard(model, mesh=rank.mesh())
    for step in range(3):
        for module in (model, reference):
            module.zero_grad()
            module(rows(rank, step).requires_grad_())
            module.inside.square().sum().backward()
        _finish(model, reference)


@spmd(2)
def test_a_forward_that_raises_can_be_repeated(rank):
    class Fragile(FeedForward):
        fail = False

        def forward(self, x):
            if self.fail:
                raise RuntimeError("planted")
            return super().forward(x)

    model, reference = build(lambda: nn.Sequential(FeedForward(), Fragile(), FeedForward()), rank.device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        model[1].fail = True
        with pytest.raises(RuntimeError, match="planted"):
            model(rows(rank, 0))
        model[1].fail = False
        if hasattr(model, "reset_iter_state"):
            model.reset_iter_state()
        for module in (model, reference):
            module.zero_grad()
            module(rows(rank, 1)).square().sum().backward()
        _finish(model, reference)


@spmd(2)
def test_gradient_with_respect_to_the_input(rank):
    model, reference = build(Transformer, rank.device)
    shard_blocks(model)
    grads = []
    for module in (model, reference):
        x = torch.ones(1, 4, DIM, device=rank.device, requires_grad=True)
        out = module.layers[0](x)
        grads.append(torch.autograd.grad(out.square().sum(), x)[0])
    assert torch.equal(*grads)


@spmd(2)
def test_grouped_modules_run_apart(rank):
    """``fully_shard([norm, head])``: the body's forward runs the norm, the head is called per chunk."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = FeedForward(), nn.LayerNorm(DIM)
            self.head = nn.Linear(DIM, DIM, bias=False)

        def forward(self, x):
            return self.norm(self.body(x))

    model, reference = build(Chunked, rank.device)
    fully_shard(model.body)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    for module in (model, reference):
        hidden = module(rows(rank, 0, batch=4))
        leaf = hidden.detach().requires_grad_()
        for chunk in leaf.chunk(2):
            module.head(chunk).square().sum().backward()
        hidden.backward(leaf.grad)
    _finish(model, reference)


@ragged_only
@spmd(2)
def test_a_part_of_a_list_that_is_no_child_of_the_module_that_runs_it(rank):
    """The list's forward ends with that of the module: what was gathered for it is freed."""

    class Encoder(nn.Module):
        def __init__(self, embed: nn.Module) -> None:
            super().__init__()
            self.body, self.borrowed = FeedForward(), (embed,)

        def forward(self, x):
            return self.body(self.borrowed[0](x))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            self.encoder = Encoder(self.embed)

        def forward(self, x):
            return self.head(self.encoder(x))

    model, reference = build(Tied, rank.device)
    fully_shard([model.embed, model.head], mesh=rank.mesh())
    fully_shard(model.encoder, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    parameters = list(model.parameters())
    with torch.no_grad():
        for step in range(3):
            part = (lambda module: module) if step == 0 else (lambda module: module.encoder)
            torch.testing.assert_close(part(model)(rows(rank, step)), part(reference)(rows(rank, step)))
            assert is_sharded(model.embed.parameters())
            for parameter in (*parameters, *reference.parameters()):
                parameter.mul_(0.5)
