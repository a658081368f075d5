"""What happens after an exception, in a second backward, to stale data, and to a model that is dropped."""

import gc
import itertools
import logging
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch import nn

from fsdp_core_cases import (
    WIDTH,
    assert_same_grads,
    batch,
    clone,
    counting_gathers,
    full,
    loss_of,
    make_net,
    shard,
)
from ragged_fsdp import collectives, fully_shard, register_fsdp_forward_method
from ragged_fsdp.dbuffer import registry
from rank_pool import Rank, spmd


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error=RuntimeError):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error("planted")


def _step(model: nn.Module, reference: nn.Module, rank: Rank, step: int) -> None:
    """One backward of both models; the gradients must be equal."""
    tokens = batch(rank.device, step, rank.world_size)
    torch.stack([loss_of(reference, part) for part in tokens.chunk(rank.world_size)]).mean().backward()
    loss_of(model, tokens.chunk(rank.world_size)[rank.rank]).backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


_COLLECTIVES = {
    "reduction": ("reduce_scatter", "all_to_all", "all_to_all_pieces"),
    "gather": ("all_gather_",),
}


@contextmanager
def _planted(where: str, module: nn.Module, error: type[BaseException]) -> Iterator[None]:
    """Let the forward or the backward of ``module`` raise, every reduction, or all gathers but the first."""
    gather, calls = collectives.all_gather_, itertools.count()

    def fail(*args: torch.Tensor, **options: object) -> object:
        if where == "backward":
            return _RaisesInBackward.apply(args[-1], error)
        if where == "gather" and next(calls) == 0:
            return gather(*args, **options)
        raise error("planted")

    with pytest.MonkeyPatch.context() as patch, ExitStack() as hooks:
        for name in _COLLECTIVES.get(where, ()):
            patch.setattr(collectives, name, fail)
        if where not in _COLLECTIVES:
            hooks.callback(module.register_forward_hook(fail).remove)
        yield


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("where", ["forward", "backward", "forward, then an update", "reduction", "gather"])
@spmd(2)
def test_the_step_after_a_failed_one_needs_no_reset(rank: Rank, where: str, reduction: str) -> None:
    """Nothing of the failed step is left: no gathered weights, no collected gradients, no open backward.

    Whatever was raised: hooks of a module see no ``KeyboardInterrupt``.
    """
    reference = make_net(rank.device)
    model = shard(clone(reference), mesh=rank.mesh(), reduction=reduction)
    for module in (model, reference):
        module.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    for step in range(4):  # the first fails before the order of the groups is known
        error = (RuntimeError, KeyboardInterrupt)[step % 2]
        with pytest.raises(error, match="planted"), _planted(where, model.blocks[1].up, error):
            loss_of(model, batch(rank.device, 50, 2).chunk(2)[rank.rank]).backward()
        model.zero_grad()
        if where == "forward, then an update":
            with torch.no_grad():
                for param in (*model.parameters(), *reference.parameters()):
                    param.mul_(0.9)
        _step(model, reference, rank, step)
        for module in (model, reference):
            module.optimizer.step()
            module.zero_grad()
    assert model._get_fsdp_state().root.comm.arena._lent == 0


class _Guarded(nn.Module):
    """Falls back to another layer if the first one raises, and goes on in the handler."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            if self.broken:
                self.first(x[:, :3])
            return self.first(x)
        except RuntimeError:
            return self.second(x)

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x[:, :3] if self.broken else x)


class _Broken(nn.Module):
    """Raises between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.broken:
            raise RuntimeError("planted")
        return self.second(x)


@pytest.mark.parametrize("kind", ["one group", "stay gathered", "prefetched"])
@spmd(2)
def test_modules_that_had_run_when_a_forward_raised(rank: Rank, kind: str) -> None:
    """Whatever the failed forward gathered, also for those before and behind the error, is gathered anew."""
    model = _Broken().to(rank.device)
    reference = clone(model)
    for modules in ([model.first, model.second],) if kind == "one group" else (model.first, model.second):
        fully_shard(modules, mesh=rank.mesh(), reshard_after_forward=kind != "stay gathered")
    fully_shard(model, mesh=rank.mesh())
    if kind == "prefetched":
        model.first.set_modules_to_forward_prefetch([model.second])
    parameters, x = list(model.parameters()), torch.randn(4, WIDTH, device=rank.device)
    for _ in range(2):
        model.broken = True
        with pytest.raises(RuntimeError, match="planted"):
            model(x)
        model.broken = False
        with torch.no_grad():
            for parameter in (*parameters, *reference.parameters()):
                parameter.mul_(0.5)
        output, expected = model(x), reference(x)
        torch.testing.assert_close(output, expected)
        output.sum().backward()


@spmd(2)
def test_errors_that_a_forward_handles_itself(rank: Rank) -> None:
    model = _Guarded().to(rank.device)
    reference = clone(model)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=rank.mesh())
    register_fsdp_forward_method(model, "other")
    x = torch.randn(4, WIDTH, device=rank.device)
    for broken in (True, False, True):
        for module in (model, reference):
            module.zero_grad()
            module.broken = broken
            module(x).square().sum().backward()
        assert_same_grads(model, reference, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError):
        model.other(x)
    model.broken = False
    assert torch.equal(model.other(x), reference.first(x))
    assert model._get_fsdp_state().root.forward_root is None


@spmd(2)
def test_one_rank_may_fail_alone_while_weights_are_unsharded_by_hand(rank: Rank) -> None:
    """As when serving requests: no rank communicates, so an error on one of them concerns no other."""
    reference = make_net(rank.device)
    model = shard(clone(reference), mesh=rank.mesh(), reshard_after_forward=False)
    tokens = batch(rank.device, 0, 2).chunk(2)[rank.rank]
    with torch.no_grad():
        model(tokens)  # everything stays gathered
        if rank.rank == 0:
            with pytest.raises(RuntimeError, match="indices"):
                model(tokens.float())
        calls: list[str] = []
        with counting_gathers(calls):
            assert torch.equal(model(tokens), reference(tokens))
        assert not calls


@spmd(2)
def test_a_second_backward_after_a_failed_one_without_a_forward_between(rank: Rank) -> None:
    reference = make_net(rank.device)
    model = shard(clone(reference), mesh=rank.mesh())
    tokens = batch(rank.device, 1, 2).chunk(2)[rank.rank]
    hook = model.blocks[1].up.register_forward_hook(lambda m, a, out: _RaisesInBackward.apply(out))
    bad = loss_of(model, tokens)
    hook.remove()
    good = loss_of(model, tokens)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ragged_fsdp").addHandler(handler)
    with pytest.raises(RuntimeError, match="planted"):
        bad.backward()
    model.zero_grad()
    good.backward()
    logging.getLogger("ragged_fsdp").removeHandler(handler)
    assert any("the last backward raised" in line for line in said)
    torch.stack([loss_of(reference, part) for part in batch(rank.device, 1, 2).chunk(2)]).mean().backward()
    assert_same_grads(model, reference, rtol=1e-4, atol=1e-6)


@spmd(2)
def test_gradients_of_gradients(rank: Rank) -> None:
    """As for gradient penalties and forces: the second backward gathers the weights again."""
    model = make_net(rank.device).blocks
    model = nn.Sequential(*model)
    reference = clone(model)
    for block in model:
        fully_shard(block, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    for _ in range(2):
        for module in (model, reference):
            module.zero_grad()
            x = torch.linspace(-1, 1, 3 * WIDTH, device=rank.device).view(3, WIDTH).requires_grad_()
            (force,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            (force.square().sum() + module(x).sum()).backward()
        assert_same_grads(model, reference, rtol=1e-4, atol=1e-4)
    assert not model[0]._get_fsdp_state().groups[0].model_weight.is_materialized


@spmd(2)
def test_data_kept_for_a_backward_is_not_taken_for_the_present(rank: Rank) -> None:
    model = shard(make_net(rank.device), mesh=rank.mesh())
    tokens = batch(rank.device, 0, 2).chunk(2)[rank.rank]
    for _ in range(2):
        loss_of(model, tokens).backward()
    loss = loss_of(model, tokens)  # ends with the last block kept
    block = model.blocks[-1]
    with torch.no_grad():
        block.up.weight.mul_(0.5)
    expected = full(block.up.weight.detach())
    block.unshard()
    assert torch.equal(block.up.weight, expected)
    model.zero_grad()  # the root is still gathered: the sharded gradients must go all the same
    groups = [group for module in (model, *model.blocks) for group in module._get_fsdp_state().groups]
    assert all(param.sharded.grad is None for group in groups for param in group.params)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@spmd(2)
def test_steps_leave_nothing_behind_and_a_dropped_model_is_freed(rank: Rank) -> None:
    gc.collect()
    buffers_before = len(registry._BUFFERS)
    model = shard(make_net(rank.device), mesh=rank.mesh())

    def train(model: nn.Module, steps: int) -> int:
        for step in range(steps):
            loss_of(model, batch(rank.device, step, 2).chunk(2)[rank.rank]).backward()
            model.zero_grad()
        gc.collect()
        return len(gc.get_objects())

    train(model, 3)
    root = model._get_fsdp_state().root
    buffers, objects = len(registry._BUFFERS), train(model, 2)
    more = train(model, 10) - objects
    remembered = sum(len(launched) for launched in root.comm.watch._launched.values())
    assert more <= 50 + 3 * remembered  # with streams the last launches are remembered, with their events
    assert len(registry._BUFFERS) == buffers
    assert not root.comm.pending and not root.backward_order
    gone = [weakref.ref(model), weakref.ref(model.blocks[0]._get_fsdp_state().groups[0]), weakref.ref(root)]
    del model, root
    gc.collect()
    assert all(reference() is None for reference in gone)
    assert len(registry._BUFFERS) == buffers_before
