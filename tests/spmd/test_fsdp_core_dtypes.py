"""``module.to(dtype)`` after ``fully_shard`` where a group has items of different sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core_cases import assert_same_grads, clone, full
from ragged_fsdp import fully_shard
from ragged_fsdp.fsdp.recast import RecastWeight
from rank_pool import Rank, spmd

FROZEN = {"int8": torch.int8, "int32": torch.int32, "bf16": torch.bfloat16}


class Adapted(nn.Module):
    """A frozen base of its own dtype; on four ranks ``up`` covers a shard, wherever it lies."""

    def __init__(self, frozen: torch.dtype) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 40), nn.Linear(40, 64)
        self.base = nn.Parameter((torch.arange(40 * 40) % 7 - 3).view(40, 40).to(frozen), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.down(x)
        return self.up(F.linear(hidden, self.base.to(hidden.dtype))) + self.empty.sum()


@pytest.mark.parametrize("frozen", list(FROZEN))
@spmd(1, 3, 4)
def test_casts_between_steps(rank: Rank, frozen: str) -> None:
    """Cuts stay where they are, values follow: equal to the unsharded module under the same casts."""
    torch.manual_seed(5)
    model = Adapted(FROZEN[frozen]).to(rank.device)
    reference = clone(model)
    fully_shard(model, mesh=rank.mesh())
    placements = {name: p.placements for name, p in model.named_parameters()}
    objects = list(model.parameters())
    x = torch.linspace(-1, 1, 64, device=rank.device).view(4, 16)
    recast, copied = 0, 0
    for dtype in (None, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16):
        for module in (model, reference):
            module.zero_grad()
            if dtype is not None:
                module.to(dtype)
            out = module(x.to(dtype or torch.float32))
            out.square().sum().backward()
        assert [p.placements for p in model.parameters()] == list(placements.values())
        assert all(a is b for a, b in zip(model.parameters(), objects))
        assert model.base.dtype == reference.base.dtype and torch.equal(full(model.base), reference.base)
        tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5
        assert_same_grads(model, reference, rtol=tolerance, atol=tolerance)
        weight = model._get_fsdp_state().groups[0].model_weight
        recast += isinstance(weight, RecastWeight)
        copied += bool(getattr(weight, "_together", None))
    assert recast >= 2
    if rank.world_size == 4 and frozen != "int8":
        assert copied  # a shard of ``up`` alone is not the largest any more: it is copied together
    state = model.state_dict()
    assert torch.equal(full(state["base"]), reference.base)


@spmd(2)
def test_parking_of_recast_weights_is_refused(rank: Rank) -> None:
    mesh = rank.mesh()
    model = Adapted(torch.int8).to(rank.device)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    model._get_fsdp_state().groups[0].parking = object()  # as reshard_after_forward=int has it
    model.bfloat16()
    with pytest.raises(RuntimeError, match="items of different sizes; reshard_after_forward=int"):
        model(torch.ones(2, 16, dtype=torch.bfloat16, device=rank.device))
