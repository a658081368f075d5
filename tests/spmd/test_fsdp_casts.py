"""``module.to(dtype)`` after ``fully_shard``: parameters follow, policies stay, items may differ in size."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from collective_calls import noted
from fsdp_cases import (
    Stack,
    Transformer,
    assert_same,
    average_gradients,
    build,
    full,
    ragged_only,
    rows,
    shard_blocks,
    tokens,
)
from ragged_fsdp import Tiles, fully_shard
from rank_pool import Rank, spmd

pytestmark = ragged_only
FROZEN = {"int8": torch.int8, "int32": torch.int32, "bf16": torch.bfloat16}


class Adapted(nn.Module):
    """A frozen base of its own dtype; on four ranks ``up`` covers a shard, wherever it lies."""

    def __init__(self, frozen: torch.dtype) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 40), nn.Linear(40, 64)
        self.base = nn.Parameter((torch.arange(40 * 40) % 7 - 3).view(40, 40).to(frozen), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.storages: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.storages = {p.untyped_storage().data_ptr() for p in self.parameters() if p.numel()}
        hidden = self.down(x)
        return self.up(F.linear(hidden, self.base.to(hidden.dtype))) + self.empty.sum()


def _in_one_buffer(model: Adapted, **options: Any) -> None:
    """Shard ``model`` while nothing trains: else what trains has a buffer, and one item size, of its own."""
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    fully_shard(model.requires_grad_(False), **options)
    for name in trainable:
        model.get_parameter(name).requires_grad_(True)


@pytest.mark.parametrize("frozen", list(FROZEN))
@spmd(1, 3, 4)
def test_casts_between_steps(rank: Rank, frozen: str) -> None:
    """Cuts stay where they are, values follow: equal to the unsharded module under the same casts."""
    model, reference = build(lambda: Adapted(FROZEN[frozen]), rank.device)
    _in_one_buffer(model, mesh=rank.mesh())
    placements = [p.placements for p in model.parameters()]
    objects = list(model.parameters())
    x = torch.linspace(-1, 1, 64, device=rank.device).view(4, 16)
    storages = []
    for dtype in (None, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16):
        for module in (model, reference):
            module.zero_grad()
            if dtype is not None:
                module.to(dtype)
            module(x.to(dtype or torch.float32)).square().sum().backward()
        average_gradients(reference)
        assert [p.placements for p in model.parameters()] == placements
        assert all(a is b for a, b in zip(model.parameters(), objects))
        assert model.base.dtype == reference.base.dtype and torch.equal(full(model.base), reference.base)
        assert model.up.weight.dtype == model.up.weight.grad.dtype == reference.up.weight.dtype
        assert_same(model, reference, tolerance=3e-2 if dtype == torch.bfloat16 else 1e-5, grads=True)
        storages.append(len(model.storages))
    assert storages[0] == 1
    if rank.world_size == 4 and frozen != "int8":
        assert max(storages) > 1  # a shard of ``up`` alone is not the largest any more: it is copied together
    assert torch.equal(full(model.state_dict()["base"]), reference.base)


@pytest.mark.parametrize("tiles", [False, True])
@spmd(1, 2)
def test_a_list_is_cast_module_by_module(rank: Rank, tiles: bool) -> None:
    """Between steps: until the last of its modules has been cast its parameters have two dtypes."""
    model, reference = build(Stack, rank.device)
    policy = (lambda name, param: Tiles(4, 4) if param.ndim == 2 else None) if tiles else None
    fully_shard(list(model.layers), mesh=rank.mesh(), orig_param_policy=policy)
    fully_shard(model, mesh=rank.mesh())
    for dtype in (torch.float32, torch.float64, torch.float32):
        for module in (model, reference):
            module.zero_grad()
            module.to(dtype)(rows(rank, 0).to(dtype)).square().sum().backward()
        average_gradients(reference)
        assert all(p.dtype == p.grad.dtype == dtype for p in model.parameters())
        assert_same(model, reference, tolerance=1e-5, grads=True)
    model.layers[0].double()
    with pytest.raises((AssertionError, RuntimeError), match=r"uniform original parameter dtype|one dtype"):
        model(rows(rank, 0))


@spmd(4)
def test_larger_shards_of_items_of_different_sizes_are_refused(rank: Rank) -> None:
    model, _ = build(lambda: Adapted(torch.int8), rank.device)
    _in_one_buffer(model, mesh=rank.mesh(), reshard_after_forward=2)
    model.bfloat16()
    with pytest.raises(RuntimeError, match="items of different sizes; reshard_after_forward=int"):
        model(torch.ones(2, 16, dtype=torch.bfloat16, device=rank.device))


@spmd(2)
def test_a_bf16_model_moved_to_fp32_keeps_its_policy(rank: Rank) -> None:
    """Parameters follow the cast; compute and reduction follow the policy."""
    model, _ = build(lambda: Transformer().bfloat16(), rank.device)
    shard_blocks(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.float()
    with noted() as notes:
        model(tokens(rank, 0)).backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    assert {call.written.dtype for call in notes.of("gather")} == {torch.bfloat16}
    assert {call.read.dtype for call in notes.of("reduce_scatter")} == {torch.float32}
