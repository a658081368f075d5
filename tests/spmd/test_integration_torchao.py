"""torchao's float8 linear layers under our ``fully_shard``: they get ordinary weights, or use hooks."""

import copy

import pytest
import torch
from torch import nn

from fsdp_cases import full, fully_shard, ragged_only
from rank_pool import spmd

pytestmark = ragged_only
WIDE, TOKENS = 64, 48


def converted(recipe):
    """A model whose linear layers are torchao's, emulated: its products want a GPU."""
    float8 = pytest.importorskip("torchao.float8")
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, 2 * WIDE), nn.ReLU(), nn.Linear(2 * WIDE, WIDE, bias=False)]
    model = nn.Sequential(nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers)))
    if recipe == "gathered":  # codes travel, through the hooks of torch's FSDP2
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    else:
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", True)
    made = float8.convert_to_float8_training(model, config=config)
    kinds = [type(m).__name__ for m in made.modules()]
    assert kinds.count("Float8Linear") == 4
    return made


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "gathered"])
@spmd(3)
def test_recipes_compute_as_without_sharding(rank, recipe):
    reference, model = (converted(recipe).to(rank.device) for _ in range(2))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.randn(TOKENS, WIDE, generator=torch.Generator().manual_seed(1)).to(rank.device)
    losses = []
    for one in (reference, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            loss = one(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert torch.equal(losses[0], losses[2])
    torch.testing.assert_close(losses[1], losses[3], rtol=1e-5, atol=1e-7)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name)).to(p.device), p, rtol=1e-4, atol=1e-6)
