"""What becomes of gradients: when they move, where they lie, what the user may do with them."""

import copy
import io
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from fsdp_cases import (
    DIM,
    Stack,
    Transformer,
    average_gradients,
    build,
    full,
    fully_shard,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
    train_both,
)
from ragged_fsdp import DBuffer, Rows
from rank_pool import Rank, spmd

pytestmark = ragged_only
LARGE = 520  # a square matrix of fp32 is above the size from which gradients move one by one


def _large(layers: int = 2) -> nn.Module:
    return Stack(layers, dim=LARGE, hidden=LARGE)


def _batches(rank: Rank, step: int) -> torch.Tensor:
    return rows(rank, step, dim=LARGE) / LARGE


class _Seen:
    """Whether a layer's ``down`` still had its gradient when that of its ``up`` was computed."""

    def __init__(self, model: nn.Module) -> None:
        self.waited: list[bool] = []
        for layer in model.layers:
            layer.up.register_forward_hook(lambda module, args, out, layer=layer: self._watch(layer, out))

    def _watch(self, layer: nn.Module, out: torch.Tensor) -> None:
        weight = layer.down.weight
        assert not isinstance(weight, DTensor)
        if out.requires_grad:
            out.register_hook(lambda _: self.waited.append(weight.grad is not None))


@pytest.mark.parametrize("buffers", [1, 2])
@spmd(2, 3)
def test_large_gradients_move_as_they_come(rank: Rank, buffers: int) -> None:
    """At once with several buffers; with one only if they are added to what an earlier backward left."""
    model, reference = build(_large, rank.device)
    shard_blocks(model, mesh=rank.mesh())
    model.set_reduce_scatter_max_input_buffers(buffers)
    seen = _Seen(model)
    train_both(model, reference, rank, steps=3, batches=_batches, tolerance=1e-5)
    assert set(seen.waited) == {buffers == 1}
    alone = {}
    for sync in (True, False, True):
        seen.waited.clear()
        model.set_requires_gradient_sync(sync)
        model(_batches(rank, 0)).sum().backward()
        if not alone:
            alone = {name: full(p.grad) for name, p in model.named_parameters()}
            model.zero_grad()
    assert set(seen.waited) == {False}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), 2 * alone[name], msg=name)


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
@spmd(2)
def test_whole_gradients_are_dropped_after_the_backward(rank: Rank, reduction: str) -> None:
    """Autograd's own, and what the collective read and did not keep for the next step."""
    model, _ = build(Stack, rank.device)
    shard_blocks(model, mesh=rank.mesh(), reduction=reduction)
    made: list[weakref.ref[torch.Tensor]] = []
    watched: list[torch.Tensor] = []

    def watch(module: nn.Module, args: object) -> None:
        if not any(module.weight is weight for weight in watched):
            watched.append(module.weight)
            module.weight.register_post_accumulate_grad_hook(lambda p: made.append(weakref.ref(p.grad)))

    for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
        linear.register_forward_pre_hook(watch)
    for step in range(2):
        model(rows(rank, step)).sum().backward()
    assert len(made) == 2 * 5 and not any(ref() is not None for ref in made)


@spmd(3)
def test_parameters_lie_in_buffers(rank: Rank) -> None:
    model, _ = build(lambda: Transformer(layers=3), rank.device)
    shard_blocks(model, mesh=rank.mesh())
    model(tokens(rank, 0)).backward()
    for layer in model.layers:
        found = [DBuffer.of(p) for p in layer.parameters()]
        assert len({id(buffer) for buffer, _ in found}) == 1
        for (buffer, index), param in zip(found, layer.parameters()):
            assert torch.equal(buffer.tensor(index).view(-1), param.to_local().view(-1))
            assert not param.to_local().numel() or DBuffer.of(param.to_local())[0] is buffer
    assert DBuffer.of(torch.zeros(3)) is None


@spmd(2, 3)
@pytest.mark.parametrize("rowwise", [False, True])
def test_parameter_gradient_and_buffer_agree_on_the_placement(rank: Rank, rowwise: bool) -> None:
    """One truth: whoever is asked where a tensor was cut says the same, and shows the same local part."""
    model, _ = build(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 5)), rank.device)
    policy = (lambda name, p: Rows(1) if p.ndim == 2 else None) if rowwise else None
    fully_shard(model, mesh=rank.mesh(), orig_param_policy=policy)
    model(rows(rank, 0, dim=64)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements, name
        assert parameter.grad.to_local().shape == parameter.to_local().shape, name
        if parameter.to_local().numel():
            buffer, index = DBuffer.of(parameter.detach())
            again = buffer.dtensor(index)
            assert again.placements == parameter.placements, name
            assert again.to_local().shape == parameter.to_local().shape, name
            assert torch.equal(again.to_local(), parameter.to_local()), name


@spmd(3)
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
def test_a_gradient_the_user_keeps_stays_as_it_is(rank: Rank, reduction: str) -> None:
    """Also where a rank has no part of it and so the same object in the next step, and after a cast."""
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh(), reduction=reduction)
    kept, values = [], []
    for step in range(3):
        if step == 2:
            model.double()
        model(tokens(rank, step)).backward()
        kept.append([p.grad for p in model.parameters()])
        values.append([full(grad) for grad in kept[-1]])
        assert {grad.dtype for grad in kept[-1]} == {p.dtype for p in model.parameters()}
        model.zero_grad()
    assert any(not grad.to_local().numel() for grad in kept[0])
    for grads, expected in zip(kept, values):
        assert all(torch.equal(full(grad), value) for grad, value in zip(grads, expected))


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("dim", [None, 0], ids=["ragged", "Shard(0)"])
@spmd(2)
def test_gradients_can_be_copied_and_saved(rank: Rank, dim: int | None, offload: bool) -> None:
    model, _ = build(Transformer, rank.device)
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    if dim is not None:
        options["shard_placement_fn"] = lambda param: Shard(dim)
    shard_blocks(model, mesh=rank.mesh(), **options)
    model(tokens(rank, 0)).backward()
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


class _HeadBesideItsModule(nn.Module):
    """Multiplies with the weight of a sharded module that it does not call, as losses in chunks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, 7, bias=False)

    def forward(self, x, placements=None):
        weight = self.head.weight
        if isinstance(weight, DTensor):
            weight = weight.full_tensor(grad_placements=placements)
        return self.body(x) @ weight.T


@spmd(1, 2, 3)
def test_a_weight_gathered_by_hand_needs_the_placement_of_its_gradient(rank):
    """Without it a DTensor takes the gradient for the same on all ranks: each keeps its part of its own."""
    model, reference = build(_HeadBesideItsModule, rank.device)
    fully_shard(model.head)
    fully_shard(model)
    x = rows(rank, 0)
    reference(x).square().sum().backward()
    own = reference.head.weight.grad.clone()
    average_gradients(reference)
    for placements, expected in (([Partial("avg")], reference.head.weight.grad), (None, own)):
        model(x, placements).square().sum().backward()
        grad = model.head.weight.grad
        whole = distribute_tensor(expected, grad.device_mesh, grad.placements, src_data_rank=None)
        assert torch.allclose(grad.to_local(), whole.to_local(), atol=1e-5)
        assert torch.allclose(full(model.body.weight.grad), reference.body.weight.grad, atol=1e-5)
        model.zero_grad()
