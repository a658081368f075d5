"""All-gather extensions: a tensor subclass decides what travels and what is computed with."""

import pytest
import torch
from torch import nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from collective_calls import count
from fsdp_cases import (
    DIM,
    RAGGED,
    FeedForward,
    assert_same,
    average_gradients,
    build,
    full,
    fully_shard,
    relative_error,
    rows,
)
from rank_pool import spmd


class HalfOnTheWire(torch.Tensor):
    """Holds float32, sends bfloat16 and a scale, computes with what arrives."""

    meshes: list = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self._data = data

    def __tensor_flatten__(self):
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return HalfOnTheWire(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._data, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out)

    def __repr__(self):
        return f"HalfOnTheWire({tuple(self.shape)})"

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(module, nn.Linear) and len(outer_stride) == len(outer_size) == 2
        self.meshes.append(mesh)
        half = self._data.to(torch.bfloat16)
        padded = half.new_zeros(-(-outer_size[0] // mesh.size()), outer_size[1])
        padded[: len(half)] = half
        return (padded, torch.ones(1, device=self.device)), "note"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        half, scales = outputs
        assert metadata == "note" and scales.numel() == self.meshes[-1].size()
        whole = half.to(param_dtype) * scales[0]
        if out is not None:
            with _unsafe_preserve_version_counter(out):
                out.copy_(whole[: len(out)])
            return None
        return whole, (whole,)


def _wrap(model):
    for linear in (model.up, model.down):
        linear.weight = nn.Parameter(HalfOnTheWire(linear.weight.detach()))


@pytest.mark.parametrize("reshard", [True, False])
@spmd(1, 2, 3)
def test_training_computes_with_what_was_sent(rank, reshard):
    if not RAGGED and rank.world_size == 1:
        return  # stock FSDP2 passes on the first input only
    model, reference = build(FeedForward, rank.device)
    _wrap(model)
    fully_shard(model, reshard_after_forward=reshard)
    ours = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        half = {n: p.detach().clone().requires_grad_() for n, p in reference.named_parameters()}
        for name in ("up.weight", "down.weight"):
            half[name] = half[name].detach().bfloat16().float().requires_grad_()
        loss = model(rows(rank, step)).square().sum()
        expected = torch.func.functional_call(reference, half, (rows(rank, step),)).square().sum()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        loss.backward()
        expected.backward()
        for name, parameter in reference.named_parameters():
            parameter.grad = half[name].grad
        average_gradients(reference)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in reference.named_parameters():
        local = model.get_parameter(name)
        assert relative_error(_plain(full(local)), parameter.detach()) < 1e-5, name


def _plain(tensor):
    return tensor._data if isinstance(tensor, HalfOnTheWire) else tensor


@spmd(4)
def test_hsdp_passes_the_mesh_that_shards(rank):
    model, _ = build(FeedForward, rank.device)
    _wrap(model)
    HalfOnTheWire.meshes.clear()
    fully_shard(model, mesh=rank.mesh(2, 2, names=("r", "s")))
    model(rows(rank, 0)).sum().backward()
    assert {(mesh.ndim, mesh.size()) for mesh in HalfOnTheWire.meshes} == {(1, 2)}


@spmd(2)
def test_frozen_beside_trainable(rank):
    model, reference = build(FeedForward, rank.device)
    _wrap(model)
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


@pytest.mark.skipif(not RAGGED, reason="stock FSDP2 fails later and elsewhere")
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
