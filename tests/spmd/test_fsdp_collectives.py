"""How many collectives run, and how many elements they carry."""

import pytest
import torch

from collective_calls import count, noted
from fsdp_cases import RAGGED, Transformer, build, fsdp, fully_shard, ragged_only, shard_blocks, tokens
from rank_pool import spmd

GROUPS = 3


def _collectives_of_a_step(model, rank, step=0):
    """By kind, in forward and in backward."""
    loss, forward = count(lambda: model(tokens(rank, step)))
    return forward, count(loss.backward)[1]


@pytest.mark.parametrize(
    ("reshard", "backward_gathers"),
    [(True, 3), (False, 0), (None, 2), (2, 3)],
    ids=["true", "false", "none", "int"],
)
@spmd(4)
def test_one_collective_per_group(rank, reshard, backward_gathers):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=reshard)
    for step in range(2):
        forward, backward = _collectives_of_a_step(model, rank, step)
        assert forward == {"gather": GROUPS}
        # where the choice is ours, the two groups backward starts with stay gathered from the second step on
        spared = 2 if RAGGED and reshard is None and step else 0
        expected = {"gather": backward_gathers - spared, "reduce_scatter": GROUPS}
        assert backward == {k: n for k, n in expected.items() if n}


@spmd(4)
def test_hsdp_adds_one_all_reduce_per_group(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh(2, 2, names=("r", "s")))
    forward, backward = _collectives_of_a_step(model, rank)
    assert forward == {"gather": GROUPS}
    assert backward == {"gather": GROUPS - 1, "reduce_scatter": GROUPS, "all_reduce": GROUPS}


@spmd(1)
def test_world_size_one_communicates_nothing(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model)
    forward, backward = _collectives_of_a_step(model, rank)
    assert forward == backward == {}


@spmd(2)
def test_shard_size_one_only_all_reduces(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh(2, 1, names=("r", "s")))
    forward, backward = _collectives_of_a_step(model, rank)
    assert forward == {}
    assert backward == {"all_reduce": GROUPS}


@spmd(2)
def test_reshard_can_change_at_run_time(rank):
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, reshard_after_forward=True)
    for reshard in (False, True):
        model.set_reshard_after_forward(reshard)
        model(tokens(rank, 0)).backward()
        loss = model(tokens(rank, 1))
        _, backward = count(loss.backward)
        assert backward.get("gather", 0) == (GROUPS if reshard else 0)


@ragged_only
@pytest.mark.parametrize("moe", [False, True])
@spmd(3)
def test_collectives_carry_the_padded_group_once(rank, moe):
    """The gather moves exactly ranks x shard elements, padding below a unit of 128 per rank."""
    model, _ = build(lambda: Transformer(moe=moe), rank.device)
    group_numels = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    root_numel = sum(p.numel() for p in model.parameters()) - sum(group_numels)
    shard_blocks(
        model, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    with noted() as notes:
        model(tokens(rank, 0)).backward()
    gathers, reductions = notes.of("gather"), notes.of("reduce_scatter")
    for call, numel in zip(gathers, [root_numel, *group_numels]):
        total, shard = call.written.numel(), call.read.numel()
        assert call.written.dtype == torch.bfloat16
        assert total == rank.world_size * shard
        assert numel <= total < numel + rank.world_size * 128
    assert sorted(c.read.numel() for c in reductions) == sorted(c.written.numel() for c in gathers[:GROUPS])
    assert all(call.written.dtype == torch.float32 for call in reductions)


@ragged_only
@spmd(2)
def test_the_gather_is_in_place(rank):
    """The input of the all-gather is the rank's own slot of its output: no copy-in, no copy-out."""
    model, _ = build(Transformer, rank.device)
    shard_blocks(model)
    with noted() as notes:
        model(tokens(rank, 0))
    for call in notes.of("gather"):
        offset = call.read.data_ptr() - call.written.data_ptr()
        assert offset == rank.rank * call.read.nbytes
    assert len(notes.of("gather")) == GROUPS
    weight = model.norm.weight  # the root stays unsharded
    assert weight.untyped_storage().data_ptr() == model.head.weight.untyped_storage().data_ptr()


@spmd(2)
def test_a_single_group_for_a_list_of_modules(rank):
    model, _ = build(Transformer, rank.device)
    fully_shard(list(model.layers))
    fully_shard(model)
    _, forward = count(lambda: model(tokens(rank, 0)))
    assert forward == {"gather": 2}
