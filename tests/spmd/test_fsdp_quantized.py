"""Weights gathered as block codes: the numbers of a model whose weights were quantised unsharded."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_inside
from collective_calls import noted
from fsdp_cases import (
    Blocked,
    average_gradients,
    backward_through,
    build,
    full,
    fully_shard,
    ragged_only,
    relative_error,
    rows,
)
from ragged_fsdp import BlockCodes, Rows
from ragged_fsdp.block_codes import quantize_dequantize
from rank_pool import spmd

pytestmark = ragged_only
WIDE = 16


Net = partial(Blocked, WIDE)


def codes_of(kind):
    tile = BlockCodes(kind, (8, 4))
    return lambda name, p: None if p.ndim < 2 else BlockCodes(kind, (4, 8)) if name == "experts" else tile


def quantised(reference, policy, dtype=None):
    """The parameters that a forward uses, by name."""
    return {
        name: p.detach().to(dtype or p.dtype)
        if (codes := policy(name, p)) is None
        else quantize_dequantize(p, codes, dtype)
        for name, p in reference.named_parameters()
    }


def _loss(out):
    return out.float().square().sum()


def step_both(model, reference, batch, policy, dtype=None):
    """Losses of both; the reference gets the gradients of its quantised copies, averaged."""
    inputs = batch if dtype is None else batch.to(dtype)
    expected = backward_through(reference, quantised(reference, policy, dtype), inputs, _loss)
    average_gradients(reference)
    loss = _loss(model(batch))
    loss.backward()
    return loss.detach(), expected


CASES = {
    "int8": {},
    "float8": {"kind": "float8_e4m3fn"},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "kept": {"reshard_after_forward": False},
    "all-to-all": {"reduction": "all_to_all"},
    "offload": {"offload_policy": CPUOffloadPolicy()},
    "rows": {"orig_param_policy": lambda name, p: Rows(2) if p.ndim == 2 else None, "max_buffers": 2},
}


@spmd(1, 2, 3, 4)
def test_training_equals_that_of_quantised_weights(rank):
    for case, options in CASES.items():
        options = dict(options)
        policy = codes_of(options.pop("kind", "int8"))
        dtype = torch.bfloat16 if case == "bf16" else None
        model, reference = build(Net, rank.device)
        fully_shard(model, gather_policy=policy, **options)
        ours = torch.optim.SGD(model.parameters(), lr=0.05)
        theirs = torch.optim.SGD(reference.parameters(), lr=0.05)
        for step in range(3):
            loss, expected = step_both(model, reference, rows(rank, step, WIDE), policy, dtype)
            if step == 0:  # the same weights: the same codes, and so the same bits
                assert torch.equal(loss, expected), case
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        tolerance = 2e-3 if dtype else 1e-5
        for name, p in reference.named_parameters():
            got = model.get_parameter(name)
            assert got.dtype == torch.float32, "the main weights are not quantised"
            assert relative_error(full(got).to(rank.device), p.detach()) < tolerance, (case, name)


@spmd(4)
def test_meshes_parking_and_asynchronous_gathers(rank):
    policy = codes_of("int8")
    for case, options in {
        "hsdp": {"mesh": rank.mesh(2, 2, names=("r", "s"))},
        "parked": {"reshard_after_forward": 2},
        "async": {},
    }.items():
        model, reference = build(Net, rank.device)
        fully_shard(model, gather_policy=policy, **options)
        if case == "async":
            model.unshard(async_op=True).wait()
            assert torch.equal(model.up.weight, quantised(reference, policy)["up.weight"])
        loss, expected = step_both(model, reference, rows(rank, 0, WIDE), policy)
        assert torch.equal(loss, expected), case
        for name, p in reference.named_parameters():
            assert relative_error(full(model.get_parameter(name).grad), p.grad) < 1e-6, (case, name)


@spmd(4)
def test_beside_tensor_parallelism_each_rank_encodes_its_part(rank):
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    whole = torch.randn(32, WIDE, device=rank.device)
    codes = BlockCodes("int8", (8, 8))
    for dim in (0, 1):
        module = nn.Linear(WIDE, 32, bias=False, device=rank.device)
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(dim)]))
        fully_shard(module, mesh=mesh["dp"], gather_policy=lambda name, p: codes)
        module.unshard()
        assert torch.equal(full(module.weight), quantize_dequantize(whole, codes))


@spmd(2, 3)
def test_one_gather_of_one_byte_per_element_and_a_scale_per_tile(rank):
    model, _ = build(lambda: nn.Linear(64, 96, bias=False), rank.device)
    fully_shard(model, gather_policy=lambda name, p: BlockCodes("int8", (16, 16)))
    with noted() as notes:
        model(rows(rank, 0, 64))
    shard_rows = -(-96 // 16 // rank.world_size) * 16  # 6 bands over the ranks
    scales = shard_rows // 16 * 4 * 4
    sent = [call.written.nbytes for call in notes.of("gather")]
    assert sent == [rank.world_size * (shard_rows * 64 + scales)]


@spmd(2)
def test_checkpoints_hold_the_main_weights(rank):
    """Nothing of the codes is stored: the checkpoint of a quantised model is read by a plain one."""
    models = []
    for policy in (codes_of("int8"), None):
        model, _ = build(Net, rank.device, seed=len(models))
        fully_shard(model, gather_policy=policy)
        models.append((model, torch.optim.AdamW(model.parameters(), foreach=True)))
    for (source, target), folder in zip(itertools.permutations(models), ("first", "second")):
        source[0](rows(rank, 0, WIDE)).sum().backward()
        source[1].step()
        target[0](rows(rank, 0, WIDE)).sum().backward()  # so that there is a state to load into
        target[1].step()
        state = dict(zip(("model", "optim"), get_state_dict(*source)))
        dcp.save(state, checkpoint_id=rank.shared_dir / folder)
        loaded = dict(zip(("model", "optim"), get_state_dict(*target)))
        dcp.load(loaded, checkpoint_id=rank.shared_dir / folder)
        set_state_dict(*target, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        for name, p in source[0].named_parameters():
            assert torch.equal(full(p), full(target[0].get_parameter(name))), name


@spmd(2)
def test_what_cannot_be_coded_is_refused_by_name(rank):
    def refuse(error, match, policy, module=None):
        module = module or nn.Linear(24, 20, device=rank.device)
        with pytest.raises(error, match=match):
            fully_shard(module, gather_policy=policy)
        assert not hasattr(module, "unshard"), "a refused module is left as it was"

    every = lambda name, p: BlockCodes("int8", (8, 8))  # noqa: E731
    refuse(ValueError, r"weight: tiles of 8 x 8 do not cover shape \(20, 24\)", every)
    refuse(
        ValueError,
        r"bias: tiles of 4 x 8 do not cover shape \(20,\)",
        lambda n, p: BlockCodes("int8", (4, 8)),
    )
    refuse(
        TypeError, r"weight: gather_policy must return BlockCodes or None, got 'int8'", lambda n, p: "int8"
    )
    refuse(TypeError, r"gather_policy must be callable", "int8")
    whole_numbers = nn.Module()
    whole_numbers.table = nn.Parameter(torch.zeros(8, 8, dtype=torch.int32, device=rank.device), False)
    refuse(ValueError, r"table: no codes are made of a Tensor of torch.int32", every, whole_numbers)
    differ = BlockCodes("int8" if rank.rank else "float8_e4m3fn", (4, 8))
    refuse(ValueError, "the ranks disagree", lambda n, p: differ if p.ndim == 2 else None)


@spmd(2)
def test_a_lack_of_memory_for_what_is_decoded_is_told_as_such(rank):
    """And the next forward is whole."""
    policy = codes_of("int8")
    model, reference = build(Net, rank.device)
    fully_shard(model, gather_policy=policy)
    with fsdp_inside.no_memory_to_decode(), pytest.raises(torch.OutOfMemoryError, match="what is decoded"):
        model(rows(rank, 0, WIDE))
    loss, expected = step_both(model, reference, rows(rank, 0, WIDE), policy)
    assert torch.equal(loss, expected)


@spmd(3)
def test_a_rank_without_a_tile_and_a_nan_in_one(rank):
    module = nn.Linear(16, 16, bias=False, device=rank.device)
    with torch.no_grad():
        module.weight.copy_(torch.arange(256.0).view(16, 16))
        module.weight[9, 3] = float("nan")
        module.weight[:8] = 0
    fully_shard(module, gather_policy=lambda name, p: BlockCodes("int8", (8, 8)))
    assert 0 in [module.weight.placements[0].local_units[r] for r in range(3)]
    module.unshard()
    weight = module.weight.detach()
    assert not weight[:8].any() and weight[8:, :8].isnan().all() and weight[8:, 8:].isfinite().all()
