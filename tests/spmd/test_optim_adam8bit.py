"""8-bit Adam on sharded parameters: the same bits as one process, without communication."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from optim_cases import (
    SHAPES,
    assert_same_numbers,
    detached_copy,
    full,
    gradients,
    plain_parameters,
    ragged_parameters,
    set_grads,
)
from ragged_fsdp.optim import Adam8bit, AdamW8bit
from rank_pool import spmd


def _train(pairs, device, steps=range(3), shapes=SHAPES):
    """Step every (optimizer, parameters) pair on the same gradients."""
    for step in steps:
        for optimizer, params in pairs:
            set_grads(params, gradients(step, device, shapes))
            optimizer.step()


@spmd(1, 2, 3, 4)
@pytest.mark.parametrize("stochastic", [False, True])
def test_bit_identical_at_any_world_size(rank, stochastic):
    plain = plain_parameters(rank.device)
    sharded = ragged_parameters(rank.mesh(), plain)
    options = {"lr": 1e-2, "weight_decay": 0.1, "stochastic_rounding": stochastic, "seed": 5}
    reference = AdamW8bit(plain.items(), **options)
    ours = AdamW8bit(sharded.items(), **options)
    _train([(reference, plain)], rank.device)
    for step in range(3):
        set_grads(sharded, gradients(step, rank.device))
        with CommDebugMode() as comm:
            ours.step()
        assert comm.get_total_counts() == 0
    assert_same_numbers(ours, reference, list(SHAPES))
    assert set(reference.state[plain["bias"]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert reference.state[plain["wide"]]["exp_avg_codes"].dtype == torch.uint8


@spmd(4)
def test_hsdp_and_fsdp2_shards_and_tensor_parallel_columns(rank):
    plain = plain_parameters(rank.device)
    hybrid = ragged_parameters(rank.mesh(2, 2, names=("replicate", "shard")), plain)
    reference, ours = (Adam8bit(p.items(), weight_decay=0.1) for p in (plain, hybrid))
    _train([(reference, plain), (ours, hybrid)], rank.device, range(2))
    assert_same_numbers(ours, reference, list(SHAPES))

    shapes = {"rows": (256, 64), "cols": (64, 128), "experts": (2, 64, 64), "mid": (2, 128, 32)}
    cuts = {"rows": (0, 0), "cols": (0, 1), "experts": (0, 2), "mid": (0, 1)}
    mesh = rank.mesh(2, 2, names=("fsdp", "tp"))
    plain = plain_parameters(rank.device, shapes)
    sharded = {
        name: torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(d) for d in cuts[name]]))
        for name, p in plain.items()
    }
    reference, ours = (AdamW8bit(p.items(), stochastic_rounding=True) for p in (plain, sharded))
    _train([(reference, plain), (ours, sharded)], rank.device, range(2), shapes)
    assert_same_numbers(ours, reference, list(shapes))


@spmd(3)
def test_cut_blocks_raise_on_every_rank_and_change_nothing(rank):
    mesh = rank.mesh()
    plain = plain_parameters(rank.device, {"fine": (96, 64), "cut": (128, 64)})
    sharded = {
        n: torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for n, p in plain.items()
    }
    optimizer = AdamW8bit([("fine", sharded["fine"])])
    with pytest.raises(ValueError, match=r"cut: .*cuts 32 x 32 blocks.*Rows\(count=32\)"):
        optimizer.add_param_group({"params": [("cut", sharded["cut"])]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("cut", sharded["cut"])], "exclude": ("c*",)})


@spmd(3)
def test_checkpoint_reshards_to_another_layout_and_to_one_process(rank):
    plain = plain_parameters(rank.device)
    sharded = ragged_parameters(rank.mesh(), plain)
    reference, ours = AdamW8bit(plain.items()), AdamW8bit(sharded.items())
    _train([(reference, plain), (ours, sharded)], rank.device, range(2))
    path = rank.shared_dir / "checkpoint"
    dcp.save({"model": dict(sharded), "optim": ours.state_dict()}, checkpoint_id=path)

    for layout in ("other ranks", "one process"):
        if layout == "one process":
            resumed = detached_copy(plain)
        else:
            resumed = ragged_parameters(rank.mesh(), plain, roll=1)
        optimizer = AdamW8bit(resumed.items())
        _train([(optimizer, resumed)], rank.device, [7])  # creates state, to be overwritten
        state = {"model": dict(resumed), "optim": optimizer.state_dict()}
        dcp.load(state, checkpoint_id=path, no_dist=layout == "one process")
        optimizer.load_state_dict(state["optim"])
        expected = AdamW8bit(detached_copy(plain).items())
        expected.load_state_dict(copy.deepcopy(reference.state_dict()))
        continued = dict(zip(plain, expected.param_groups[0]["params"]))
        _train([(optimizer, resumed), (expected, continued)], rank.device, [2])
        assert_same_numbers(optimizer, expected, list(SHAPES))


@spmd(2)
def test_memory_per_element(rank):
    shapes = {"matrix": (512, 384), "experts": (4, 96, 160), "vector": (8192,), "odd": (1001, 130)}
    params = ragged_parameters(rank.mesh(), plain_parameters(rank.device, shapes))
    optimizer = AdamW8bit(params.items())
    _train([(optimizer, params)], rank.device, range(1), shapes)
    for name, param in params.items():
        held = sum(full(v).nbytes for k, v in optimizer.state[param].items() if k != "step")
        assert held <= 2.1 * param.numel(), name
