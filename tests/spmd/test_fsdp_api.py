"""What ``fully_shard`` makes of a module: class, state, registered parameters, inputs and outputs."""

import dataclasses
from collections import defaultdict
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as StockModule
from torch.distributed.tensor import DTensor

from fsdp_cases import (
    DIM,
    RAGGED,
    FeedForward,
    Transformer,
    assert_same,
    average_gradients,
    backward_both,
    build,
    fsdp,
    fully_shard,
    is_sharded,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
)
from rank_pool import spmd


@spmd(1)
def test_the_class_is_swapped_in_place(rank):
    model = FeedForward()
    sharded = fully_shard(model)
    assert sharded is model
    assert type(model).__name__ == "FSDPFeedForward"
    assert isinstance(model, FeedForward)
    assert isinstance(model, fsdp.FSDPModule)
    assert isinstance(model, StockModule)
    other = fully_shard(FeedForward())
    assert type(other) is type(model)
    stack = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)))
    assert type(stack).__name__ == "FSDPSequential"
    assert type(stack[:2]) is nn.Sequential


@spmd(1)
def test_state_is_found_by_module(rank):
    first, second = FeedForward(), FeedForward()
    fully_shard([first, second])
    third = fully_shard(FeedForward())
    assert fully_shard.state(first) is not None
    assert fully_shard.state(first) is fully_shard.state(second)
    assert fully_shard.state(third) is not fully_shard.state(first)


@spmd(2)
def test_a_list_returns_the_list(rank):
    modules = [FeedForward(), FeedForward()]
    assert fully_shard(modules) is modules
    assert all(isinstance(m, fsdp.FSDPModule) for m in modules)


@pytest.mark.parametrize("reshard", [True, False, 2, None], ids=str)
@spmd(4)
def test_what_is_registered_after_each_phase(rank, reshard):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=reshard)
    inner = list(model.layers.parameters())
    assert is_sharded(model.parameters())
    for step in range(2):
        loss = model(tokens(rank, step))
        assert is_sharded(model.layers.parameters()) == (reshard is not False)
        assert is_sharded([model.norm.weight, model.head.weight]) == (reshard in (True, 2))
        loss.backward()
        assert is_sharded(model.parameters())
    if reshard is not False:
        assert all(a is b for a, b in zip(inner, model.layers.parameters()))


@spmd(1, 3)
def test_parameters_keep_shape_dtype_and_identity_for_the_optimizer(rank):
    model, reference = build(lambda: Transformer(moe=True), rank.device)
    shard_blocks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    held = list(optimizer.param_groups[0]["params"])
    model(tokens(rank, 0)).backward()
    for parameter, (name, now), expected in zip(held, model.named_parameters(), reference.parameters()):
        assert parameter is now, name
        assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
        assert parameter.shape == parameter.grad.shape == expected.shape
        assert parameter.dtype == expected.dtype
        assert parameter.stride() == expected.stride()


@dataclasses.dataclass
class _Out:
    logits: torch.Tensor
    extra: dict


class _Pair(NamedTuple):
    left: torch.Tensor
    right: list


class _Structured(nn.Module):
    """Nested containers in and out."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.inner, self.kind = FeedForward(), kind

    def forward(self, first, *, options):
        y = self.inner(first["x"]) * options[0][1]
        if self.kind == "dataclass":
            return _Out(y, {"y2": [y * 2]})
        if self.kind == "namedtuple":
            return _Pair(y, [y * 2, None])
        if self.kind == "set":
            return defaultdict(list, y={y, y * 2})
        return {"y": (y, [y * 2]), "n": 3}


@pytest.mark.parametrize("kind", ["dataclass", "namedtuple", "dict", pytest.param("set", marks=ragged_only)])
@spmd(2)
def test_structured_inputs_and_outputs(rank, kind):
    """Backward hooks are found through containers: gradients are reduced and parameters resharded."""
    model, reference = build(lambda: nn.Sequential(_Structured(kind)), rank.device)
    fully_shard(model[0].inner)
    fully_shard(model[0])
    fully_shard(model)
    scale = torch.full((1,), 2.0, device=rank.device)
    for module in (model, reference):
        out = module[0]({"x": rows(rank, 0)}, options=[("a", scale)])
        if kind == "dataclass":
            total = out.logits.sum() + out.extra["y2"][0].square().sum()
        elif kind == "namedtuple":
            total = out.left.sum() + out.right[0].square().sum()
        elif kind == "set":
            assert type(out) is defaultdict
            total = sum(y.square().sum() for y in out["y"])
        else:
            total = out["y"][0].sum() + out["y"][1][0].square().sum()
        total.backward()
    average_gradients(reference)
    assert is_sharded(model.parameters())
    assert_same(model, reference, grads=True)


@spmd(2)
def test_forward_without_inputs(rank):
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 5))

        def forward(self):
            return self.weight @ self.weight

    model, reference = build(Constant, rank.device)
    fully_shard(model)
    for module in (model, reference):
        module().sum().backward()
    average_gradients(reference)
    assert_same(model, reference, grads=True)


@spmd(2)
def test_modules_without_parameters(rank):
    model, reference = build(lambda: nn.Sequential(nn.ReLU(), FeedForward(), nn.Identity()), rank.device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    backward_both(model, reference, rows(rank, 0))
    assert_same(model, reference, grads=True)


@spmd(3)
def test_ranks_that_own_nothing(rank):
    """Two elements in all, on three ranks."""
    model, reference = build(lambda: nn.Linear(1, 1), rank.device)
    fully_shard(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference))
    for step in range(3):
        for module, optimizer in ((model, ours), (reference, theirs)):
            module(rows(rank, step, dim=1)).square().sum().backward()
            if module is reference:
                average_gradients(reference)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, reference, tolerance=1e-6)


@ragged_only
@spmd(2)
def test_zero_element_parameters(rank):
    """Stock FSDP2 raises in the backward."""

    class Hollow(FeedForward):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, DIM))

        def forward(self, x):
            return super().forward(x) + self.nothing.sum()

    model, reference = build(Hollow, rank.device)
    fully_shard(model)
    backward_both(model, reference, rows(rank, 0))
    for name in ("up.weight", "down.bias"):
        assert torch.equal(model.get_parameter(name).grad.full_tensor(), reference.get_parameter(name).grad)
    assert model.nothing.shape == (0, DIM)


@spmd(2)
def test_a_shared_module_is_sharded_once(rank):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = FeedForward()
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    model, reference = build(Shared, rank.device)
    fully_shard(model)
    backward_both(model, reference, rows(rank, 0))
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_the_default_mesh_is_all_ranks(rank):
    model = fully_shard(FeedForward())
    assert model.up.weight.device_mesh.size() == rank.world_size
    assert model.up.weight.device_mesh.device_type == rank.device
    if RAGGED:
        from ragged_fsdp import RaggedShard

        assert isinstance(model.up.weight.placements[0], RaggedShard)


@ragged_only
@spmd(1)
def test_policies_are_torchs_own(rank):
    import torch.distributed.fsdp as stock

    for name in ("MixedPrecisionPolicy", "OffloadPolicy", "CPUOffloadPolicy"):
        assert getattr(fsdp, name) is getattr(stock, name)
