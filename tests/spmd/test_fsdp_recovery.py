"""What happens after an exception, in a second backward, to stale data, and to a model that is dropped."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import fsdp_inside
from collective_calls import GATHER, count, failing
from fsdp_cases import (
    DIM,
    GatheredMemory,
    Stack,
    Transformer,
    assert_same,
    average_gradients,
    backward_both,
    build,
    fully_shard,
    logged,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
)
from ragged_fsdp import register_fsdp_forward_method
from rank_pool import Rank, spmd

pytestmark = ragged_only


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error=RuntimeError):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error("planted")


@contextmanager
def _planted(where: str, module: nn.Module, error: type[BaseException]) -> Iterator[None]:
    """Let the forward or the backward of ``module`` raise, every reduction, or all gathers but the first.

    A rail raises after the level inside the node, which is one call.
    """
    if where in ("reduction", "rail"):
        with failing(("reduce_scatter", "all_to_all"), lambda: error("planted"), spared=int(where == "rail")):
            yield
        return
    if where == "gather":
        with failing(("gather",), lambda: error("planted"), spared=1):
            yield
        return

    def fail(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        if where == "backward":
            return _RaisesInBackward.apply(output, error)
        raise error("planted")

    hook = module.register_forward_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("where", ["forward", "backward", "forward, then an update", "reduction", "gather"])
@spmd(2)
def test_the_step_after_a_failed_one_needs_no_reset(rank: Rank, where: str, reduction: str) -> None:
    """Nothing of the failed step is left: no gathered weights, no collected gradients, no open backward.

    Whatever was raised: hooks of a module see no ``KeyboardInterrupt``.
    """
    _fail_and_go_on(rank, where, reduction)


@pytest.mark.parametrize("where", ["backward", "reduction", "rail"])
@spmd(4)
def test_the_step_after_a_failed_one_over_two_levels(rank: Rank, where: str) -> None:
    _fail_and_go_on(rank, where, "two_level")


def _fail_and_go_on(rank: Rank, where: str, reduction: str) -> None:
    model, reference = build(lambda: Transformer(layers=3), rank.device)
    shard_blocks(model, mesh=rank.mesh(), reduction=reduction, ranks_per_node=2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, reference)]
    parameters = list(model.parameters())
    memory = GatheredMemory(*model.layers)
    for step in range(4):  # the first fails before the order of the groups is known
        error = (RuntimeError, KeyboardInterrupt)[step % 2]
        with pytest.raises(error, match="planted"), _planted(where, model.layers[1].mlp.up, error):
            model(tokens(rank, 50)).backward()
        model.zero_grad()
        if where == "forward, then an update":
            with torch.no_grad():
                for parameter in (*parameters, *reference.parameters()):
                    parameter.mul_(0.9)
        backward_both(model, reference, tokens(rank, step))
        assert_same(model, reference, tolerance=1e-5, grads=True)
        assert not any(memory.nbytes(layer) for layer in model.layers)
        for optimizer in optimizers:
            optimizer.step()
    assert fsdp_inside.gradient_memory_lent(model) == 0


class _Guarded(nn.Module):
    """Falls back to another layer if the first one raises, and goes on in the handler."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
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
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
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
    model, reference = build(_Broken, rank.device)
    for modules in ([model.first, model.second],) if kind == "one group" else (model.first, model.second):
        fully_shard(modules, mesh=rank.mesh(), reshard_after_forward=kind != "stay gathered")
    fully_shard(model, mesh=rank.mesh())
    if kind == "prefetched":
        model.first.set_modules_to_forward_prefetch([model.second])
    parameters = list(model.parameters())
    for step in range(2):
        model.broken = True
        with pytest.raises(RuntimeError, match="planted"):
            model(rows(rank, step))
        model.broken = False
        with torch.no_grad():
            for parameter in (*parameters, *reference.parameters()):
                parameter.mul_(0.5)
        output = model(rows(rank, step))
        torch.testing.assert_close(output, reference(rows(rank, step)))
        output.sum().backward()


@spmd(2)
def test_errors_that_a_forward_handles_itself(rank: Rank) -> None:
    model, reference = build(_Guarded, rank.device)
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=rank.mesh())
    register_fsdp_forward_method(model, "other")
    for step, broken in enumerate((True, False, True)):
        model.broken = reference.broken = broken
        backward_both(model, reference, rows(rank, step))
        assert_same(model, reference, tolerance=1e-6, grads=True)
    with pytest.raises(RuntimeError):
        model.other(rows(rank, 0))
    model.broken = False
    assert torch.equal(model.other(rows(rank, 0)), reference.first(rows(rank, 0)))
    assert not fsdp_inside.forward_is_running(model)


class _FailsOnce:
    """An all-gather whose second call raises."""

    calls = 0

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("planted")
        return getattr(dist, GATHER)(output_tensor, input_tensor, group=group, async_op=async_op)


@spmd(2)
def test_a_gather_whose_failure_a_forward_handles(rank: Rank) -> None:
    """What the module's other groups had gathered is given up too: later it would be stale."""
    model, reference = build(_Guarded, rank.device)
    biases_apart = {"shard_placement_fn": lambda p: Shard(0) if p.ndim == 1 else None}
    for module in (model.first, model.second):
        fully_shard(module, mesh=rank.mesh(), **biases_apart)
    fully_shard(model, mesh=rank.mesh())
    model.first.set_custom_all_gather(_FailsOnce())
    with torch.no_grad():
        for step, expected in enumerate((reference.second, reference)):
            torch.testing.assert_close(model(rows(rank, step)), expected(rows(rank, step)))
            for parameter in (*model.parameters(), *reference.parameters()):
                parameter.mul_(0.5)


@spmd(2)
def test_one_rank_may_fail_alone_while_weights_are_unsharded_by_hand(rank: Rank) -> None:
    """As when serving requests: no rank communicates, so an error on one of them concerns no other."""
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh(), reshard_after_forward=False)
    with torch.no_grad():
        model(tokens(rank, 0))  # everything stays gathered
        if rank.rank == 0:
            with pytest.raises(RuntimeError, match="indices"):
                model(tokens(rank, 0).float())
        found, seen = count(lambda: model(tokens(rank, 1)))
        assert torch.equal(found, reference(tokens(rank, 1)))
        assert not seen


@spmd(2)
def test_a_second_backward_after_a_failed_one_without_a_forward_between(rank: Rank) -> None:
    model, reference = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh())
    with _planted("backward", model.layers[1].mlp.up, RuntimeError):
        bad = model(tokens(rank, 1))
    good = model(tokens(rank, 1))
    with logged() as said:
        with pytest.raises(RuntimeError, match="planted"):
            bad.backward()
        model.zero_grad()
        good.backward()
    assert any("the last backward raised" in line for line in said)
    reference(tokens(rank, 1)).backward()
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-5, grads=True)


@spmd(2)
def test_gradients_of_gradients(rank: Rank) -> None:
    """As for gradient penalties and forces: the second backward gathers the weights again."""
    model, reference = build(lambda: Stack(layers=3), rank.device)
    shard_blocks(model, mesh=rank.mesh())
    memory = GatheredMemory(*model.layers)
    for step in range(2):
        for module in (model, reference):
            module.zero_grad()
            x = rows(rank, step).requires_grad_()
            (force,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            (force.square().sum() + module(x).sum()).backward()
        average_gradients(reference)
        assert_same(model, reference, tolerance=1e-5, grads=True)
    assert not any(memory.nbytes(layer) for layer in model.layers)


def _alive() -> Counter[str]:
    """Buffers and objects of the runtime that something still refers to, by type."""
    gc.collect()
    parts = ("ragged_fsdp.fsdp", "ragged_fsdp.dbuffer")
    kinds = (type(found) for found in gc.get_objects())
    return Counter(kind.__name__ for kind in kinds if str(kind.__module__).startswith(parts))


def _train(model: nn.Module, rank: Rank, steps: int) -> int:
    """The number of objects there are after some steps."""
    for step in range(steps):
        model(tokens(rank, step)).backward()
        model.zero_grad()
    gc.collect()
    return len(gc.get_objects())


@spmd(2)
def test_steps_leave_nothing_behind_and_a_dropped_model_is_freed(rank: Rank) -> None:
    def make() -> nn.Module:
        return shard_blocks(build(Transformer, rank.device)[0], mesh=rank.mesh())

    make()(tokens(rank, 0)).backward()  # fills the caches of what belongs to no model
    gc.collect()
    gc.freeze()  # what was there before is not looked at again, which would take most of the time
    before, model = _alive(), make()
    _train(model, rank, 3)
    own, objects = _alive(), _train(model, rank, 2)
    more = _train(model, rank, 10) - objects
    _, launches = count(partial(_train, model, rank, 1))
    # with streams the last launches are remembered, with their events: three objects each
    remembered = 3 * 13 * sum(launches.values()) if rank.device == "cuda" else 0
    assert more <= 50 + remembered, f"{more} objects more"
    assert _alive().total() <= own.total() + remembered, _alive() - own
    assert not fsdp_inside.remembered_of_a_step(model)
    gone = weakref.ref(model)
    del model
    left = _alive() - before
    gc.unfreeze()
    assert gone() is None and not left, left
