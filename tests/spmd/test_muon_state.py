"""Muon's state through state dicts and checkpoints, and Muon under fully_shard."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

import muon_cases as cases
from ragged_fsdp.optim.muon import Muon
from rank_pool import spmd

SHAPES = {"0.weight": (12, 20), "0.bias": (12,), "1.weight": (9, 12), "1.bias": (9,)}
OPTIONS = {"lr": 0.05, "adamw_lr": 0.01, "ns_dtype": torch.float32, "bucket_numel": 200}


class Holder(nn.Module):
    """Parameters under the names of SHAPES, placed as asked."""

    def __init__(self, place) -> None:
        super().__init__()
        for name, value in cases.full_tensors(0, SHAPES).items():
            module, leaf = name.split(".")
            if module not in self._modules:
                self.add_module(module, nn.Module())
            self.get_submodule(module).register_parameter(leaf, nn.Parameter(place(value)))


def take_steps(model: nn.Module, optimizer: Muon, place, steps: range) -> None:
    for step in steps:
        gradients = cases.full_tensors(50 + step, SHAPES)
        for name, parameter in model.named_parameters():
            parameter.grad = place(gradients[name])
        optimizer.step()
        optimizer.zero_grad()


def assert_same(model: nn.Module, expected: nn.Module, device: str) -> None:
    wanted = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        found = cases.whole(parameter.detach())
        if device == "cpu":
            error = (found - wanted[name].detach()).abs().max()
            assert torch.equal(found, wanted[name].detach()), f"{name}: {error}"
        else:
            torch.testing.assert_close(found, wanted[name].detach(), rtol=1e-4, atol=1e-5)


@spmd(4)
def test_resume_on_fewer_ranks(rank):
    """Saved from four ranks with uneven shards, resumed by three of them with others, and by one process."""
    mesh = rank.mesh()
    path = str(rank.shared_dir / "checkpoint")

    def ragged(value):
        return cases.place(value, mesh, "ragged")

    def plain(value):
        return value.to(rank.device)

    expected = Holder(plain)
    take_steps(expected, Muon(expected.named_parameters(), **OPTIONS), plain, range(4))
    model = Holder(ragged)
    optimizer = Muon(model.named_parameters(), **OPTIONS)
    take_steps(model, optimizer, ragged, range(2))
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    assert {n for n, s in state["optimizer"]["state"].items() if "momentum_buffer" in s} == {
        "0.weight",
        "1.weight",
    }
    dcp.save(state, checkpoint_id=path)

    ranks = [0, 1, 3]
    group = dist.new_group(ranks)
    if rank.rank in ranks:
        fewer = DeviceMesh.from_group(group, rank.device)

        def resharded(value):
            return cases.place(value, fewer, "ragged_rows" if value.ndim > 1 else "shard0")

        resume(Holder(resharded), path, resharded, expected, rank.device, group)
    dist.barrier()
    resume(Holder(plain), path, plain, expected, rank.device, None)


def resume(model: nn.Module, path: str, place, expected: nn.Module, device: str, group) -> None:
    """Load into a fresh model and optimizer, take the remaining steps."""
    optimizer = Muon(model.named_parameters(), **{**OPTIONS, "lr": 9.0})
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path, process_group=group, no_dist=group is None)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == OPTIONS["lr"]
    take_steps(model, optimizer, place, range(2, 4))
    assert_same(model, expected, device)


@spmd(2)
def test_full_state_dict(rank):
    """A full state dict from ragged shards equals that of one process, and loads back into other shards."""
    mesh = rank.mesh()

    def ragged(value):
        return cases.place(value, mesh, "ragged")

    def plain(value):
        return value.to(rank.device)

    single = Holder(plain)
    single_optimizer = Muon(single.named_parameters(), **OPTIONS)
    take_steps(single, single_optimizer, plain, range(2))
    model = Holder(ragged)
    optimizer = Muon(model.named_parameters(), **OPTIONS)
    take_steps(model, optimizer, ragged, range(2))
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    wanted = get_optimizer_state_dict(single, single_optimizer, options=options)
    for name, states in wanted["state"].items():
        for key, value in states.items():
            torch.testing.assert_close(full["state"][name][key], value, rtol=1e-5, atol=1e-6)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    flattened = get_optimizer_state_dict(model, optimizer, options=flat)
    assert (
        flattened["state.0.weight.momentum_buffer"].placements == model.get_parameter("0.weight").placements
    )
    set_optimizer_state_dict(model, optimizer, flattened, options=flat)
    # A copy: loading keeps tensors such as `step` that need no conversion, and steps change them in place.
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(wanted), options=options)
    local = optimizer.state_dict()
    fresh = Muon(model.named_parameters(), **OPTIONS)
    fresh.load_state_dict(local)
    take_steps(model, fresh, ragged, range(2, 3))
    take_steps(single, single_optimizer, plain, range(2, 3))
    assert_same(model, single, rank.device)


def small_transformer() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.TransformerEncoderLayer(16, 2, 40, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.Linear(16, 5))


@pytest.mark.parametrize("implementation", ["fsdp2", "ragged_fsdp", "ragged_fsdp with replicas"])
@spmd(2, 4)
def test_under_fully_shard(rank, implementation):
    """Two steps of a small transformer, sharded, equal those of one process with the same batch."""
    if implementation == "fsdp2":
        from torch.distributed.fsdp import fully_shard
    else:
        from ragged_fsdp import fully_shard
    mesh = rank.mesh()
    if implementation.endswith("replicas"):
        mesh = rank.mesh(2, rank.world_size // 2, names=("replicas", "shards"))
    batch = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(1)).to(rank.device)
    single, model = small_transformer().to(rank.device), small_transformer().to(rank.device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for network in (single, model):
        optimizer = Muon(
            network.named_parameters(), **{**OPTIONS, "adjust_lr_fn": "match_rms_adamw", "lr": 0.01}
        )
        for _ in range(2):
            network(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    wanted = dict(single.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            cases.whole(parameter.detach()), wanted[name].detach(), rtol=1e-4, atol=1e-5
        )


@spmd(2)
def test_sharded_after_the_optimizer_was_made(rank):
    """Libraries that shard later put the new parameters into the groups; nothing is planned before a step."""
    from ragged_fsdp import fully_shard

    batch = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(1)).to(rank.device)
    single, model = small_transformer().to(rank.device), small_transformer().to(rank.device)
    optimizers = [Muon(network.named_parameters(), **OPTIONS) for network in (single, model)]
    fully_shard(model, mesh=rank.mesh())
    named = dict(model.named_parameters())
    for group in optimizers[1].param_groups:
        group["params"] = [named[name] for name in group["param_names"]]
    for network, optimizer in zip((single, model), optimizers):
        for _ in range(2):
            network(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in single.named_parameters():
        found = cases.whole(named[name].detach())
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-4, atol=1e-5)
