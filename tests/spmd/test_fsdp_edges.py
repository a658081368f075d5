"""Corners that have no other home: empty groups, shared streams, modules that do nothing, odd inputs."""

import io
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp_inside
from collective_calls import count
from fsdp_cases import (
    GatheredMemory,
    Transformer,
    assert_same,
    backward_both,
    build,
    fully_shard,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
)
from ragged_fsdp import share_comm_ctx
from rank_pool import Rank, spmd

pytestmark = ragged_only


class _OnlyEmpty(nn.Module):
    """The root's own group has no element at all."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.inner = nn.Parameter(torch.empty(0, 3)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.nothing.sum()


@spmd(1, 3)
def test_a_group_without_elements(rank: Rank) -> None:
    model, reference = build(_OnlyEmpty, rank.device)
    fully_shard(model.inner, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    for step in range(2):
        backward_both(model, reference, rows(rank, step, dim=3))
        assert_same(model, reference, tolerance=1e-6, grads=True)
    assert model.nothing.grad.shape == (0, 3)


@spmd(2)
def test_reused_ids_are_no_shared_parameters(rank: Rank) -> None:
    """A parameter freed by one call may leave its id to a parameter of the next one."""
    model, _ = build(lambda: nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(20))), rank.device)
    for layer in model:
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    model(rows(rank, 0, dim=8)).sum().backward()


@spmd(2)
def test_a_copy_from_a_file_shares_no_parameter(rank: Rank) -> None:
    """Also if ``fully_shard`` has looked at the model before it was saved."""
    layer = nn.Linear(8, 8)
    with pytest.raises(TypeError, match="orig_param_policy must return"):
        fully_shard(layer, mesh=rank.mesh(), orig_param_policy=lambda name, param: 3)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    model = nn.Sequential(layer, torch.load(saved, weights_only=False)).to(rank.device)
    for each in (*model, model):
        fully_shard(each, mesh=rank.mesh())
    model(rows(rank, 0, dim=8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@spmd(1, 2)
def test_a_model_that_was_refused_can_be_cast(rank: Rank) -> None:
    """Its parameters may be DTensors, which ``Module.to`` swaps: nothing of ours must point at them."""
    mesh = rank.mesh(1, rank.world_size, names=("dp", "tp"))
    layer = parallelize_module(nn.Linear(8, 8).to(rank.device), mesh["tp"], ColwiseParallel())
    with pytest.raises(TypeError, match="orig_param_policy must return"):
        fully_shard(layer, mesh=mesh["dp"], orig_param_policy=lambda name, param: 3)
    fully_shard(layer.to(torch.float64), mesh=mesh["dp"])
    layer(rows(rank, 0, dim=8).double()).sum().backward()
    assert layer.weight.grad.dtype is torch.float64


@spmd(2)
def test_streams_shared_after_the_first_forward(rank: Rank) -> None:
    """All states below each root follow, also those found in the meantime."""
    stages = [shard_blocks(build(Transformer, rank.device)[0], mesh=rank.mesh()) for _ in range(2)]
    for stage in stages:
        stage(tokens(rank, 0)).backward()
    share_comm_ctx(stages)
    modules = [module for stage in stages for module in (stage, *stage.layers)]
    assert len({id(context) for module in modules for context in fsdp_inside.comm_contexts_of(module)}) == 1
    for stage in stages:
        stage.zero_grad()
        loss, seen = count(lambda stage=stage: stage(tokens(rank, 0)))
        assert seen["gather"] == 3
        loss.backward()
    first, second = (list(stage.parameters()) for stage in stages)
    assert all(torch.equal(a.grad.to_local(), b.grad.to_local()) for a, b in zip(first, second))


@spmd(2)
def test_one_communication_context_below_a_root(rank: Rank) -> None:
    with pytest.MonkeyPatch.context() as patch:
        made = fsdp_inside.contexts_made(patch)
        model, _ = build(lambda: Transformer(layers=4), rank.device)
        shard_blocks(model, mesh=rank.mesh())
        for step in range(2):
            model(tokens(rank, step)).backward()
    assert len(made) == 1, f"five calls of fully_shard made {len(made)}"
    for module in (model, *model.layers):
        assert all(context is made[0] for context in fsdp_inside.comm_contexts_of(module))


class _Dropped(nn.Module):
    """A layer that may be left out: it then returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.drop else self.linear(x)


class _Spy(nn.Module):
    """Notes the gathered memory of a module when a gradient passes."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Callable[[], int] | None = None
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda _: self.seen.append(self.look()))
        return x * 1


@spmd(2)
def test_a_module_that_returns_its_input(rank: Rank) -> None:
    """Its backward starts and ends at one gradient: it is gathered for nothing, but not left gathered."""
    model, _ = build(lambda: nn.Sequential(_Dropped(), _Spy(), _Dropped(), _Dropped()), rank.device)
    first, spy, dropped, last = model
    for layer in (first, dropped, last):
        fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=rank.mesh())
    memory = GatheredMemory(dropped)
    spy.look = lambda: memory.nbytes(dropped)
    for step in range(3):
        dropped.drop = step > 0
        model(rows(rank, step, dim=4)).sum().backward()
        assert spy.seen.pop() == 0 and not spy.seen
        assert (dropped.linear.weight.grad is None) == dropped.drop
        model.zero_grad()


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.linear(x.mul_(2) if y is None else x.mul_(2) + y)


@spmd(1, 2)
@pytest.mark.parametrize("inputs", [1, 2])
def test_an_input_changed_in_place_raises(rank: Rank, inputs: int) -> None:
    """The change would cut off the end of the module's backward; with one input or several, torch says so."""
    model, _ = build(_InPlace, rank.device)
    fully_shard(model, mesh=rank.mesh())
    tensors = [rows(rank, step, dim=4).requires_grad_() * 1 for step in range(inputs)]
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(*tensors)


@spmd(2)
def test_tensors_without_values(rank: Rank) -> None:
    """As tools do that estimate the memory of a model without having it."""
    mesh = rank.mesh()
    with FakeTensorMode():
        net = nn.Sequential(nn.Linear(8, 8, device=rank.device), nn.Linear(8, 4, device=rank.device))
        for layer in (*net, net):
            fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            net(torch.ones(2, 8, device=rank.device)).sum().backward()
            optimizer.step()
        assert all(isinstance(p.grad.to_local(), FakeTensor) for p in net.parameters())
