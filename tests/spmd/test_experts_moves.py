"""Experts that move between ranks while a model trains, and runs that never notice."""

import pytest
import torch
from torch import nn

import experts_cases as cases
from fsdp_inside import group_names
from ragged_fsdp import BlockCodes, fp8, fully_shard
from ragged_fsdp.block_codes import quantize_dequantize
from ragged_fsdp.experts import (
    ExpertSplit,
    balanced_splits,
    divide_gradients,
    expert_parallel,
    load_of,
    move_experts,
    split_experts_of,
)
from ragged_fsdp.models import MoEConfig
from ragged_fsdp.models.moe import Experts
from ragged_fsdp.optim import AdamW8bit, Muon, block_policy
from rank_pool import DEVICE, spmd

ROUNDS = [(2, 3), (5, 0), (0, 5), (4, 1)]


def _wholes(model, optimizer):
    """Parameters and optimizer state, whole, by name."""
    names = {p: n for n, p in model.named_parameters()}
    found = {n: p.detach().full_tensor() for p, n in names.items()}
    for p, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{names[p]}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {n: t.clone() for n, t in found.items()}


def _model(rank, family, optimizer):
    model = cases.build(family, torch.float32)
    mesh = rank.mesh(rank.world_size // 2, 2, names=("dp", "ep"))
    expert_parallel(model, mesh["ep"])
    policy = {"orig_param_policy": block_policy((8, 8))} if optimizer is AdamW8bit else {}
    cases.shard(model, mesh["dp"], rank.mesh(), rank.world_size, fully_shard, **policy)
    options = {"block_shape": (8, 8)} if optimizer is AdamW8bit else {}
    return model, optimizer(model.parameters(), lr=1e-2, **options)


def _step(model, optimizer, rank):
    ids = cases.batch().tensor_split(rank.world_size)[rank.rank]
    (cases.loss_of(model, ids, 60) * rank.world_size).backward()
    optimizer.step()
    optimizer.zero_grad()


@spmd(2, 4)
def test_experts_move_with_their_state_bit_for_bit(rank):
    """Values and state are the same whole tensors after every move, and the steps after it as if none was."""
    for optimizer in (torch.optim.AdamW, AdamW8bit, Muon):
        still, its = _model(rank, "ours", optimizer)
        model, own = _model(rank, "ours", optimizer)
        for held in ROUNDS:
            _step(model, own, rank)
            _step(still, its, rank)
            before, objects = _wholes(model, own), list(model.parameters())
            names, groups = list(split_experts_of(model)), group_names(model)
            moved = move_experts(model, {names[0]: ExpertSplit(held)}, own)
            assert moved == ([names[0]] if held != (3, 2) else [])
            after = _wholes(model, own)
            assert before.keys() == after.keys()
            assert all(torch.equal(before[n], after[n]) for n in before), optimizer
            assert all(p is q for p, q in zip(objects, model.parameters()))
            assert group_names(model) == groups
            first = split_experts_of(model)[names[0]].module
            rows = first.gate_up_proj.to_local().shape
            assert held[rank.rank % 2] or not rows.numel()
        _step(model, own, rank)
        _step(still, its, rank)
        got, expected = _wholes(model, own), _wholes(still, its)
        bound = {"rtol": 0.2, "atol": 2e-2} if optimizer is AdamW8bit else {"rtol": 1e-4, "atol": 1e-5}
        for name in expected:
            if "codes" not in name and "scales" not in name:
                assert torch.allclose(got[name].float(), expected[name].float(), **bound), (optimizer, name)


def _coded(rank, kind, split):
    """A layer of five experts that travels as codes; its width; what it computes with of a whole weight."""
    wide = 128 if kind == "fp8" else 16
    torch.manual_seed(0)
    layer = nn.ModuleDict({"experts": Experts(MoEConfig(hidden=wide, expert_hidden=wide, experts=5))})
    mesh = rank.mesh(rank.world_size // 2, 2, names=("dp", "ep"))
    expert_parallel(layer.to(DEVICE), mesh["ep"], split=split)
    codes = BlockCodes("int8", (8, 8))
    if kind == "fp8":
        fp8.fp8_training(layer)
    policy = fp8.gather_policy if kind == "fp8" else lambda name, p: codes
    fully_shard(layer["experts"], mesh=mesh["dp"], gather_policy=policy, reshard_after_forward=True)
    divide_gradients([layer["experts"]], rank.world_size)
    return layer, wide, lambda p: p if kind == "fp8" else quantize_dequantize(p, codes)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@spmd(2, 4)
def test_any_number_of_experts_travels_as_codes_and_moves(rank, kind):
    """Outputs and gradients of the whole weights' codes, on a rank without experts too, before and after."""
    layer, wide, computed = _coded(rank, kind, ExpertSplit((0, 5)))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for step, held in enumerate(((3, 2), (5, 0), (1, 4))):
        plain = nn.ModuleDict({"experts": Experts(MoEConfig(hidden=wide, expert_hidden=wide, experts=5))})
        for p, q in zip(plain.to(DEVICE).parameters(), layer.parameters()):
            p.data = computed(q.detach().full_tensor())
        if kind == "fp8":
            fp8.fp8_training(plain)
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randn(rank.world_size, 6, wide, generator=generator).to(DEVICE)
        chosen = torch.randint(5, (rank.world_size, 6, 2), generator=generator).to(DEVICE)
        weights = torch.full((6, 2), 0.5, device=DEVICE)
        outputs = [plain["experts"](x, c, weights) for x, c in zip(tokens, chosen)]
        (sum(out.sum() for out in outputs) / rank.world_size).backward()
        out = layer["experts"](tokens[rank.rank], chosen[rank.rank], weights)
        out.sum().backward()
        torch.testing.assert_close(out, outputs[rank.rank], rtol=1e-4, atol=1e-6)
        for p, q in zip(layer.parameters(), plain.parameters()):
            # the 1 x 128 blocks of FP8's weight gradient lie along the rows of all ranks here, of one there
            error = (p.grad.full_tensor() - q.grad).norm() / q.grad.norm()
            assert error < (0.05 if kind == "fp8" else 1e-5)
        optimizer.step()
        optimizer.zero_grad()
        before = _wholes(layer, optimizer)
        assert move_experts(layer, {"experts": ExpertSplit(held)}, optimizer) == ["experts"]
        after = _wholes(layer, optimizer)
        assert all(torch.equal(before[name], after[name]) for name in before)


@spmd(2)
def test_load_is_counted_once_and_splits_follow_it(rank):
    model, optimizer = _model(rank, "ours", torch.optim.AdamW)
    assert all(not rows.any() and rows.device.type == DEVICE for rows in load_of(model).rows.values())
    _step(model, optimizer, rank)
    load = load_of(model)
    assert {int(rows.sum()) for rows in load.rows.values()} == {60 * 2} and int(load.dropped) == 0
    summary = load.summary()
    assert summary["busiest_rank"] >= 1 and summary["busiest_expert"] >= summary["busiest_rank"] / 2
    splits = balanced_splits(load)
    for name, rows in load.rows.items():
        assert splits[name].busiest(rows.tolist()) <= load.splits[name].busiest(rows.tolist())
    move_experts(model, splits, optimizer)
    _step(model, optimizer, rank)
    again = load_of(model)
    assert again.splits == splits and {int(rows.sum()) for rows in again.rows.values()} == {60 * 2}
    model.eval()
    with torch.no_grad():
        model(cases.batch())
    assert all(not rows.any() for rows in load_of(model).rows.values())  # evaluation is not counted


@spmd(2)
def test_impossible_moves_change_nothing(rank):
    model, optimizer = _model(rank, "ours", torch.optim.AdamW)
    name = next(iter(split_experts_of(model)))
    for splits, error in (
        ({"nothing": ExpertSplit((3, 2))}, "is not spread"),
        ({name: ExpertSplit((3, 3))}, "cannot become"),
        ({name: ExpertSplit((5,))}, "cannot become"),
        ({name: ExpertSplit((1 + rank.rank, 4 - rank.rank))}, "do not move experts the same: rank 0 has"),
        # on one rank: the other must not wait for it
        (
            {("nothing", name)[rank.rank]: ExpertSplit((1, 4))},
            "is not spread|rank 0 cannot move experts: Val",
        ),
    ):
        with pytest.raises(ValueError, match=error):
            move_experts(model, splits, optimizer)
    ids = cases.batch(4)
    cases.loss_of(model, ids, 60).backward()
    if rank.rank:
        optimizer.zero_grad()
    with pytest.raises((RuntimeError, ValueError), match="has a gradient"):
        move_experts(model, {name: ExpertSplit((1, 4))}, optimizer)
    cases.loss_of(model, ids, 60).backward()
    with pytest.raises(RuntimeError, match="has a gradient"):
        move_experts(model, {name: ExpertSplit((1, 4))}, optimizer)
    assert split_experts_of(model)[name].split == ExpertSplit((3, 2))
    for parameter in split_experts_of(model)[name].module.parameters():
        parameter.grad = None
    with pytest.raises(RuntimeError, match="has a gradient"):  # of the second: the first must not move either
        move_experts(model, dict.fromkeys(split_experts_of(model), ExpertSplit((1, 4))), optimizer)
    assert {experts.split for experts in split_experts_of(model).values()} == {ExpertSplit((3, 2))}
    optimizer.zero_grad()
    _step(model, optimizer, rank)
    splits = {name: ExpertSplit(held) for name, held in zip(split_experts_of(model), ((1, 4), (5, 0)))}
    given = dict(reversed(splits.items())) if rank.rank else splits  # in another order
    assert move_experts(model, given, optimizer) == list(splits)
    _step(model, optimizer, rank)


@spmd(4)
def test_groups_that_hold_the_same_experts_must_move_them_alike(rank):
    """Splits by the load of one group alone: the first layer's are the same, and must stay as they are."""
    model, optimizer = _model(rank, "ours", torch.optim.AdamW)
    first, second = split_experts_of(model)
    with pytest.raises(ValueError, match="do not move experts the same: rank"):
        others = ExpertSplit((1, 4) if rank.rank < 2 else (4, 1))
        move_experts(model, {first: ExpertSplit((5, 0)), second: others}, optimizer)
    assert {experts.split for experts in split_experts_of(model).values()} == {ExpertSplit((3, 2))}
    _step(model, optimizer, rank)
