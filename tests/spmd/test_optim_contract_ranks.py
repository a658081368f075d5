"""The optimizers beside torch's own FSDP2, and a checkpoint that moves to other world sizes."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
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
from ragged_fsdp.optim import AdamW8bit, FusedAdamW, Muon, Shampoo, clip_grad_norm_
from rank_pool import spmd

OPTIMIZERS = {
    "8bit": lambda p: AdamW8bit(p, lr=1e-2, weight_decay=0.1),
    "fused": lambda p: FusedAdamW(p, lr=1e-2),
    "shampoo": lambda p: Shampoo(p, lr=1e-2, block_shape=(32, 32), start_step=1),
}


@spmd(4)
@pytest.mark.parametrize("kind", ["8bit", "fused"])
def test_checkpoint_of_four_ranks_on_three_and_on_two(rank, kind):
    """State is created by a step, loaded over, and continues with the bits of one process."""
    plain = plain_parameters(rank.device)
    reference, sharded = OPTIMIZERS[kind](plain.items()), ragged_parameters(rank.mesh(), plain)
    ours = OPTIMIZERS[kind](sharded.items())
    for params, optimizer in ((plain, reference), (sharded, ours)):
        for step in range(2):
            set_grads(params, gradients(step, rank.device))
            optimizer.step()
    path = rank.shared_dir / "checkpoint"
    dcp.save({"model": dict(sharded), "optim": ours.state_dict()}, checkpoint_id=path)
    set_grads(plain, gradients(5, rank.device))
    reference.step()
    for count in (3, 2):
        mesh = DeviceMesh(rank.device, list(range(count)))  # made by all ranks, held by some
        if rank.rank < count:
            resumed = ragged_parameters(mesh, plain_parameters(rank.device))
            optimizer = OPTIMIZERS[kind](resumed.items())
            set_grads(resumed, gradients(9, rank.device))
            optimizer.step()
            state = {"model": dict(resumed), "optim": optimizer.state_dict()}
            dcp.load(state, checkpoint_id=path, process_group=mesh.get_group())
            optimizer.load_state_dict(copy.deepcopy(state["optim"]))
            set_grads(resumed, gradients(5, rank.device))
            optimizer.step()
            close = torch.equal if kind == "8bit" else lambda a, b: torch.allclose(a, b, rtol=1e-6, atol=1e-7)
            assert_same_numbers(optimizer, reference, list(SHAPES), equal=close)
        dist.barrier()


@spmd(2, 4)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_of_torchs_fsdp2(rank, kind):
    """Shard(0) parameters and their gradients, replicated too on 4 ranks: the numbers of one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128, bias=False)).to(rank.device)
    plain = copy.deepcopy(model)
    mesh = rank.mesh() if rank.world_size == 2 else rank.mesh(2, 2, names=("replicate", "shard"))
    for module in (model[0], model):
        torch_fully_shard(module, mesh=mesh)
    optimizers = [OPTIMIZERS[kind](m.named_parameters()) for m in (plain, model)]
    for step in range(2):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(rank.device)
        model(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters()):
            theirs.grad = full(ours.grad)  # equal gradients, to the bit
        with CommDebugMode() as comm:
            optimizers[1].step()
        assert comm.get_total_counts() == 0
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    equal = torch.equal if kind == "8bit" else lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    assert_same_numbers(optimizers[1], optimizers[0], [n for n, _ in plain.named_parameters()], equal=equal)


@spmd(2)
@pytest.mark.parametrize("kind", [*OPTIMIZERS, "muon"])
def test_whole_state_is_not_taken_for_a_part(rank, kind):
    """State of one process, loaded as it is: the first rank of "lopsided" holds nothing, the last all."""
    make = OPTIMIZERS.get(kind, lambda p: Muon(p, lr=1e-2))
    plain = plain_parameters(rank.device)
    reference = make(plain.items())
    set_grads(plain, gradients(0, rank.device))
    reference.step()
    optimizer = make(ragged_parameters(rank.mesh(), plain).items())
    with pytest.raises(RuntimeError, match=r"wide: state \w+ must be a DTensor under .*, got a plain tensor"):
        optimizer.load_state_dict(reference.state_dict())
    assert not optimizer.state


@spmd(2)
def test_clip_where_one_rank_has_no_gradient(rank):
    """An expert that no token reached on one rank: the others must not wait for it in vain."""
    device = rank.device
    whole = detached_copy(plain_parameters(device, {"dense": (8, 4), "expert": (6, 4)}))
    sharded = {
        name: nn.Parameter(distribute_tensor(param.detach(), rank.mesh(), [Shard(0)]))
        for name, param in whole.items()
    }
    grads = gradients(0, device, {"dense": (8, 4), "expert": (6, 4)})
    set_grads(sharded, grads)
    if rank.rank == 1:
        sharded["expert"].grad = None
    expected = torch.linalg.vector_norm(torch.cat([grads["dense"].flatten(), grads["expert"][:3].flatten()]))
    torch.testing.assert_close(clip_grad_norm_(sharded.values(), 1e9), expected)
    if rank.rank == 1:
        sharded["dense"].grad = None
    first = torch.linalg.vector_norm(torch.cat([grads["dense"][:4].flatten(), grads["expert"][:3].flatten()]))
    torch.testing.assert_close(clip_grad_norm_(sharded.values(), 1e9).cpu(), first.cpu())
