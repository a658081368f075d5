"""Models created on the meta device."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor

from fsdp_cases import (
    RAGGED,
    FeedForward,
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
from rank_pool import spmd


def _on_meta(factory):
    with torch.device("meta"):
        return factory()


@spmd(1, 3)
def test_materialised_shards_train_like_the_loaded_model(rank):
    model = _on_meta(Transformer)
    shard_blocks(model)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device.type == "meta"
    model.to_empty(device=rank.device)
    _, reference = build(Transformer, rank.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, reference.state_dict() if rank.rank == 0 else {}, options=options)
    assert_same(model, reference)
    backward_both(model, reference, tokens(rank, 0))
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(3)
def test_only_the_shards_are_materialised(rank):
    model = _on_meta(Transformer)
    total = sum(p.numel() for p in model.parameters())
    shard_blocks(model)
    model.to_empty(device=rank.device)
    held = {
        p.to_local().untyped_storage().data_ptr(): p.to_local().untyped_storage().nbytes()
        for p in model.parameters()
    }
    groups = 3
    assert sum(held.values()) <= 4 * (total / rank.world_size + groups * 16 * 40)


@ragged_only
@spmd(1, 2)
def test_reset_parameters_gives_the_values_of_the_unsharded_model(rank):
    """The same seed gives the same values, sharded or not (stock FSDP2 draws others on the CPU)."""
    _, reference = build(lambda: nn.Sequential(FeedForward(), FeedForward()), rank.device)
    model = _on_meta(lambda: nn.Sequential(FeedForward(), FeedForward()))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=rank.device)
    states = []
    for module in (reference, model):
        torch.manual_seed(7)
        for child in module.modules():
            if isinstance(child, nn.Linear):
                with torch.no_grad():
                    nn.init.normal_(child.weight, std=0.02)
                    nn.init.uniform_(child.bias)
        states.append(torch.get_rng_state() if rank.device == "cpu" else torch.cuda.get_rng_state())
    assert_same(model, reference)
    assert torch.equal(*states)
    assert torch.equal(model(rows(rank, 0)), reference(rows(rank, 0)))


@spmd(2)
def test_forward_before_materialisation_names_the_parameters(rank):
    model = _on_meta(lambda: nn.Sequential(FeedForward(), FeedForward()))
    fully_shard(model[0])
    fully_shard(model)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"should be materialized from meta device(.|\n)*1\.up\.weight"
        ):
            model(rows(rank, 0))
    if not RAGGED:
        return  # FSDP2 stays half initialised
    model.to_empty(device=rank.device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model(rows(rank, 0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@spmd(3)
def test_empty_shards_are_materialised_too(rank):
    """One element on three ranks: two of them own nothing."""
    model = _on_meta(lambda: nn.Linear(1, 1, bias=False))
    fully_shard(model)
    model.to_empty(device=rank.device)
    with torch.no_grad():
        model.weight.fill_(3.0)
    out = model(torch.ones(1, 1, device=rank.device))
    assert out.item() == 3.0
    out.backward()
    assert model.weight.grad.full_tensor().item() == 1.0
