"""All-gather extensions: a tensor subclass decides what travels and what is computed with."""

import pytest
import torch
from torch import nn

from collective_calls import count
from fsdp_cases import (
    DIM,
    RAGGED,
    Extended,
    FeedForward,
    HalfOnTheWire,
    assert_same,
    average_gradients,
    backward_through,
    build,
    full,
    fully_shard,
    ragged_only,
    relative_error,
    rows,
)
from rank_pool import spmd


def _plain(tensor):
    return tensor._data if isinstance(tensor, HalfOnTheWire) else tensor


def _halved(reference):
    """What arrives of the reference's weights."""
    return {
        name: p.detach().bfloat16().float() if p.ndim == 2 else p.detach()
        for name, p in reference.named_parameters()
    }


def _pair(rank):
    """A layer with extensions and a plain one of equal values."""
    return build(Extended, rank.device)[0], build(FeedForward, rank.device)[0]


@pytest.mark.parametrize("reshard", [True, False])
@spmd(1, 2, 3)
def test_training_computes_with_what_was_sent(rank, reshard):
    if not RAGGED and rank.world_size == 1:
        return  # stock FSDP2 passes on the first input only
    model, reference = _pair(rank)
    fully_shard(model, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, reference)]
    for step in range(3):
        loss = model(rows(rank, step)).square().sum()
        expected = backward_through(
            reference, _halved(reference), rows(rank, step), lambda out: out.square().sum()
        )
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        loss.backward()
        average_gradients(reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in reference.named_parameters():
        local = model.get_parameter(name)
        assert relative_error(_plain(full(local)), parameter.detach()) < 1e-5, name


@spmd(4)
def test_hsdp_passes_the_mesh_that_shards(rank):
    model, _ = build(Extended, rank.device)
    HalfOnTheWire.meshes.clear()
    fully_shard(model, mesh=rank.mesh(2, 2, names=("r", "s")))
    model(rows(rank, 0)).sum().backward()
    assert {(mesh.ndim, mesh.size()) for mesh in HalfOnTheWire.meshes} == {(1, 2)}


@spmd(2)
def test_frozen_beside_trainable(rank):
    model, reference = _pair(rank)
    model.up.weight.requires_grad_(False)
    reference.up.weight.requires_grad_(False)
    fully_shard(model)
    with torch.no_grad():
        reference.up.weight.copy_(reference.up.weight.bfloat16())
        reference.down.weight.copy_(reference.down.weight.bfloat16())
    for module in (model, reference):
        module(rows(rank, 0)).square().sum().backward()
    average_gradients(reference)
    assert model.up.weight.grad is None
    for name in ("up.bias", "down.weight", "down.bias"):
        got = full(model.get_parameter(name).grad)
        assert relative_error(_plain(got), reference.get_parameter(name).grad) < 1e-6, name


@ragged_only  # stock FSDP2 fails later and elsewhere
@spmd(2)
def test_a_subclass_without_hooks_is_named(rank):
    class Mute(HalfOnTheWire):
        fsdp_pre_all_gather = property(lambda self: (_ for _ in ()).throw(AttributeError()))
        fsdp_post_all_gather = property(lambda self: (_ for _ in ()).throw(AttributeError()))

    model = nn.Linear(DIM, DIM).to(rank.device)
    model.weight = nn.Parameter(Mute(model.weight.detach()))
    fully_shard(model)
    with pytest.raises(NotImplementedError, match=r"weight: a Mute has no fsdp_pre_all_gather"):
        model(rows(rank, 0))


@spmd(2)
def test_plain_groups_are_gathered_as_before(rank):
    model, reference = build(FeedForward, rank.device)
    fully_shard(model)
    _, seen = count(lambda: model(rows(rank, 0)))
    assert seen["gather"] == 1, seen
    model.reshard()
    assert_same(model, reference)
