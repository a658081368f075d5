"""Checkpoints travel between this package, stock FSDP2, plain models and world sizes."""

import dataclasses

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from fsdp_cases import (
    RAGGED,
    Transformer,
    assert_same,
    build,
    full,
    fully_shard,
    ragged_only,
    shard_blocks,
    train,
)
from rank_pool import spmd

STEPS = 4


def _stock(model):
    for layer in model.layers:
        stock_fully_shard(layer)
    stock_fully_shard(model)


SHARDERS = {"ours": shard_blocks, "stock": _stock, "plain": lambda model: None}


def _make(kind, rank, seed):
    model, reference = build(lambda: Transformer(moe=True), rank.device, seed=seed)
    SHARDERS[kind](model)
    return model, reference


PAIRS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours"), ("ours", "plain"), ("plain", "ours")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
@spmd(3)
def test_checkpoint_written_by_one_is_read_by_the_other(rank, source, target):
    """The model alone, through ``dcp.save`` / ``dcp.load`` and the model's own state dict."""
    writer, reference = _make(source, rank, seed=1)
    dcp.save({"model": writer.state_dict()}, checkpoint_id=rank.shared_dir / "ckpt")
    reader, _ = _make(target, rank, seed=2)
    states = reader.state_dict()
    dcp.load({"model": states}, checkpoint_id=rank.shared_dir / "ckpt")
    reader.load_state_dict(states)
    assert_same(reader, reference)


@pytest.mark.parametrize(("source", "target"), [("ours", "stock"), ("stock", "ours")])
@spmd(2)
def test_full_state_dicts_are_exchanged_in_memory(rank, source, target):
    writer, reference = _make(source, rank, seed=1)
    reader, _ = _make(target, rank, seed=2)
    states = get_model_state_dict(writer, options=StateDictOptions(full_state_dict=True))
    set_model_state_dict(reader, states, options=StateDictOptions(full_state_dict=True))
    assert_same(reader, reference)


@ragged_only
@pytest.mark.parametrize(("source", "target"), [("ours", "stock"), ("stock", "ours")])
@spmd(2)
def test_training_goes_on_in_the_other_with_its_optimizer_state(rank, source, target):
    """Two steps, a checkpoint of model and optimizer, two more steps in the other implementation."""
    writer, _ = _make(source, rank, seed=1)
    reader, _ = _make(target, rank, seed=2)
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (writer, reader)}
    straight, _ = _make(source, rank, seed=1)
    straight_optimizer = torch.optim.AdamW(straight.parameters(), lr=1e-3)
    train(straight, straight_optimizer, rank, range(STEPS))
    train(writer, optimizers[writer], rank, range(2))
    states = dict(zip(("model", "optim"), get_state_dict(writer, optimizers[writer])))
    dcp.save(states, checkpoint_id=rank.shared_dir / "ckpt")
    states = dict(zip(("model", "optim"), get_state_dict(reader, optimizers[reader])))
    dcp.load(states, checkpoint_id=rank.shared_dir / "ckpt")
    set_state_dict(
        reader, optimizers[reader], model_state_dict=states["model"], optim_state_dict=states["optim"]
    )
    train(reader, optimizers[reader], rank, range(2, STEPS))
    for (name, p), q in zip(reader.named_parameters(), straight.parameters()):
        torch.testing.assert_close(full(p), full(q), rtol=1e-6, atol=1e-8, msg=name)


def _same_data(rank):
    """As if it were the first rank: every rank sees its batches, so results do not depend on their number."""
    return dataclasses.replace(rank, rank=0)


def _save_after_two_steps(rank, policy_rows=None):
    model, _ = build(lambda: Transformer(moe=True), rank.device)
    shard_blocks(model, **_granularity(policy_rows))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, _same_data(rank), range(2))
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=rank.shared_dir / "ckpt")


def _resume_for_two_steps(rank, policy_rows=None):
    model, reference = build(lambda: Transformer(moe=True), rank.device)
    shard_blocks(model, **_granularity(policy_rows))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id=rank.shared_dir / "ckpt")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    train(model, optimizer, _same_data(rank), range(2, STEPS))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    train(reference, theirs, _same_data(rank), range(STEPS))
    assert_same(model, reference, tolerance=1e-6)


def _granularity(policy_rows):
    if policy_rows is None:
        return {}
    from ragged_fsdp import Rows

    return {"orig_param_policy": lambda name, p: Rows(policy_rows) if p.ndim > 1 else None}


@pytest.mark.parametrize(("saved", "resumed", "blocks"), [(2, 3, None), (4, 1, 3), (1, 4, 3)])
def test_resume_at_another_world_size(tmp_path, saved, resumed, blocks):
    """The layout changes with the world size (and the granularity); the training does not."""
    blocks = blocks if RAGGED else None
    spmd(saved)(_save_after_two_steps)(world_size=saved, tmp_path=tmp_path, policy_rows=blocks)
    blocks = None if blocks is None else 1
    spmd(resumed)(_resume_for_two_steps)(world_size=resumed, tmp_path=tmp_path, policy_rows=blocks)


@spmd(2)
def test_a_checkpoint_of_a_different_shape_is_refused(rank):
    writer, _ = _make("ours", rank, seed=1)
    dcp.save({"model": writer.state_dict()}, checkpoint_id=rank.shared_dir / "ckpt")
    reader = torch.nn.Linear(5, 7, bias=False).to(rank.device)
    fully_shard(reader)
    states = {"model": {"norm.weight": reader.state_dict()["weight"]}}
    with pytest.raises(dcp.CheckpointException, match=r"[Ss]ize mismatch"):
        dcp.load(states, checkpoint_id=rank.shared_dir / "ckpt")
