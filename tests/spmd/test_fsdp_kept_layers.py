"""Weights that stay gathered between forward and backward, and when they may not be taken for the present."""

import pytest
import torch
from torch import nn

from collective_calls import count
from fsdp_cases import (
    GatheredMemory,
    Transformer,
    assert_same,
    average_gradients,
    build,
    full,
    fully_shard,
    is_sharded,
    ragged_only,
    shard_blocks,
    tokens,
)
from rank_pool import Rank, spmd

pytestmark = ragged_only
LAYERS = 5


@pytest.mark.parametrize("kept", [2, 3])
@spmd(2)
def test_the_end_of_the_forward_stays_gathered(rank: Rank, kept: int) -> None:
    """From the second step on backward does not gather its first two groups again, or as many as fit."""
    model, reference = build(lambda: Transformer(layers=LAYERS), rank.device)
    layer_bytes = 4 * sum(p.numel() for p in reference.layers[0].parameters())
    budget = {"reshard_after_forward": "auto", "gathered_budget_bytes": int(3.5 * layer_bytes)}
    shard_blocks(model, mesh=rank.mesh(), **(budget if kept == 3 else {}))
    memory = GatheredMemory(*model.layers)
    for step in range(3):
        loss, forward = count(lambda step=step: model(tokens(rank, step)))
        held = [memory.nbytes(layer) > 0 for layer in model.layers]
        now = kept if step else 0
        assert held == [False] * (LAYERS - now) + [True] * now
        assert is_sharded(model.layers.parameters())  # what is kept is not registered
        _, backward = count(loss.backward)
        assert forward == {"gather": LAYERS + 1}
        assert backward == {"gather": LAYERS - now, "reduce_scatter": LAYERS + 1}
        assert not any(memory.nbytes(layer) for layer in model.layers)
        reference(tokens(rank, step)).backward()
    average_gradients(reference)
    assert_same(model, reference, tolerance=1e-6, grads=True)
    with pytest.raises(ValueError, match="go together"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward="auto")
    with pytest.raises(ValueError, match="must be an int >= 0"):
        fully_shard(nn.Linear(2, 2), reshard_after_forward="auto", gathered_budget_bytes=-1)


def _after_two_steps(rank: Rank) -> tuple[nn.Module, nn.Module, GatheredMemory]:
    """A model whose next forward keeps its last layers."""
    model, reference = build(lambda: Transformer(layers=3), rank.device)
    shard_blocks(model, mesh=rank.mesh())
    memory = GatheredMemory(*model.layers)
    for step in range(2):
        model(tokens(rank, step)).backward()
    model.zero_grad()
    return model, reference, memory


@spmd(2)
def test_kept_data_is_dropped_if_no_backward_follows(rank: Rank) -> None:
    """A change of parameters must be seen by the next forward."""
    model, reference, memory = _after_two_steps(rank)
    before = model(tokens(rank, 0))
    assert memory.nbytes(model.layers[-1]) and is_sharded(model.layers[-1].parameters())
    model.reshard()  # the root stays unsharded after forward, as in FSDP2
    with torch.no_grad():
        for parameter in (*model.parameters(), *reference.parameters()):
            parameter.mul_(0.5)
    after = model(tokens(rank, 0))
    torch.testing.assert_close(after, reference(tokens(rank, 0)))
    assert not torch.equal(before, after)


@pytest.mark.parametrize("how", ["no_grad forward", "reshard", "state_dict", "cast"])
@spmd(2)
def test_what_gives_kept_data_up(rank: Rank, how: str) -> None:
    model, _, memory = _after_two_steps(rank)
    model(tokens(rank, 0))
    last = model.layers[-1]
    assert memory.nbytes(last)
    if how == "no_grad forward":
        with torch.no_grad():
            model(tokens(rank, 1))
    elif how == "reshard":
        last.reshard()
    elif how == "state_dict":
        model.state_dict()
    else:
        model.double()
    assert not memory.nbytes(last)
    assert is_sharded(last.parameters())


@spmd(2)
def test_data_kept_for_a_backward_is_not_taken_for_the_present(rank: Rank) -> None:
    model, _, _ = _after_two_steps(rank)
    parameters = list(model.parameters())
    model(tokens(rank, 0)).backward()
    assert all(p.grad is not None for p in parameters)
    loss = model(tokens(rank, 0))
    layer = model.layers[-1]
    with torch.no_grad():
        layer.mlp.up.weight.mul_(0.5)
    expected = full(layer.mlp.up.weight)
    layer.unshard()
    assert torch.equal(layer.mlp.up.weight, expected)
    model.zero_grad()  # the root is still gathered: the sharded gradients must go all the same
    assert all(p.grad is None for p in parameters)
    loss.backward()
    assert all(p.grad is not None for p in parameters)
