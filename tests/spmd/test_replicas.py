"""Gradients averaged over replicas and state copied between them, without an engine that knows who lives."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_cases import Stack, build, fully_shard, ragged_only, rows, shard_blocks
from late_streams import make_streams_late
from ragged_fsdp.optim import AdamW8bit, FusedAdamW, Muon, Shampoo, block_policy, offload_state
from ragged_fsdp.replicas import ReplicaGradients, ReplicaState, StateServer, receive
from ragged_fsdp.replicas.attempts import replica_store
from rank_pool import DEVICE, Rank, spmd

pytestmark = ragged_only
TOKEN = b"a token of the tests"
BLOCKS = {"block_shape": (4, 4), "run": 8, "min_8bit_numel": 16}
OPTIMIZERS = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1),
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "fused": lambda net: FusedAdamW(net.parameters(), lr=0.1),
    "8 bit": lambda net: AdamW8bit(net.parameters(), lr=0.1, **BLOCKS),
    "muon": lambda net: Muon(net.named_parameters(), lr=0.1),
    "shampoo": lambda net: Shampoo(net.parameters(), block_shape=(4, 4), min_numel=16, start_step=1),
    "offloaded": lambda net: offload_state(AdamW8bit(net.parameters(), lr=0.1, **BLOCKS), part_numel=64),
}


def _locals(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = [value for param in net.parameters() for value in [param, *optimizer.state[param].values()]]
    found = [value for value in found if isinstance(value, torch.Tensor)]
    return [(v.to_local() if hasattr(v, "to_local") else v).detach().cpu().clone() for v in found]


class Parts(nn.Module):
    """Of its three layers one is used by replica 0 only, and one by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.first, self.never = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, replica: int) -> torch.Tensor:
        return self.used(x) + (self.first(x) if replica == 0 else 0)


@spmd(4)
def test_averages_are_those_of_hsdp(rank: Rank) -> None:
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    replica = rank.rank // 2
    whole, _ = build(lambda: Stack(layers=2), rank.device)
    shard_blocks(whole, mesh=mesh)
    parts, _ = build(lambda: Stack(layers=2), rank.device)
    shard_blocks(parts, mesh=mesh["shard"])
    gradients = ReplicaGradients(parts)
    for step in range(2):
        for net in (whole, parts):
            net.zero_grad()
            net(rows(rank, step)).square().mean().backward()
        present, flats = gradients.collect()
        assert len(flats) <= 3  # one for each group of which this rank holds something
        for flat in flats:
            dist.all_reduce(flat, group=mesh["replicate"].get_group())
            flat /= 2
        before = [p.grad.to_local().clone() for p in parts.parameters()]
        assert all(torch.equal(p.grad.to_local(), kept) for p, kept in zip(parts.parameters(), before))
        dist.all_reduce(present, group=mesh["replicate"].get_group())
        gradients.hand_over(present)
        for ours, theirs in zip(parts.parameters(), whole.parameters()):
            assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())
    net, _ = build(Parts, rank.device)
    fully_shard(net, mesh=mesh["shard"])
    gradients = ReplicaGradients(net)
    net(torch.ones(2, 6, device=rank.device), replica).sum().backward()
    present, flats = gradients.collect()
    for flat in flats:
        dist.all_reduce(flat, group=mesh["replicate"].get_group())
        flat /= 2
    dist.all_reduce(present, group=mesh["replicate"].get_group())
    gradients.hand_over(present)
    assert net.never.weight.grad is None
    assert torch.equal(net.used.weight.grad.full_tensor(), torch.full((5, 6), 2.0, device=rank.device))
    assert torch.equal(net.first.weight.grad.full_tensor(), torch.full((5, 6), 1.0, device=rank.device))


@spmd(4)
def test_a_copy_beside_a_forward_is_exact(rank: Rank) -> None:
    """Streams are as late as they can be; both replicas are in the middle of a forward."""
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    for name, make in OPTIMIZERS.items():
        with pytest.MonkeyPatch.context() as patch:
            if DEVICE == "cpu":
                make_streams_late(patch)
            _copy(rank, mesh, name, make)


def _copy(rank: Rank, mesh, name, make) -> None:
    replica = rank.rank // 2
    net, _ = build(lambda: Stack(layers=2), rank.device)
    shard_blocks(net, mesh=mesh["shard"], orig_param_policy=block_policy((4, 4), 8, 16))
    optimizer = make(net)
    extra = {"number": [3, "a"] if replica == 0 else None}
    state = ReplicaState(net, optimizer, {"x": (lambda: extra["number"], lambda v: extra.update(number=v))})

    def step(number: int, hook=None) -> None:
        net.zero_grad()
        handle = net.layers[1].register_forward_pre_hook(hook) if hook else None
        loss = net(rows(rank, number)).square().mean()
        if handle is not None:
            handle.remove()
        loss.backward()

    server = StateServer(TOKEN, "127.0.0.1", 30.0, torch.device(rank.device))
    addresses = [None] * 4
    dist.all_gather_object(addresses, server.address)
    if replica == 0:
        for number in range(2):
            step(number)
            optimizer.step()
        expected = _locals(net, optimizer)
        ready = torch.accelerator.current_stream().record_event() if DEVICE != "cpu" else None
        step(2, hook=lambda *_: server.offer(2, state.offer(ready)))
        dist.barrier()  # the other replica has it
        server.withdraw()
        assert all(map(torch.equal, _locals(net, optimizer), expected))
    else:
        with torch.no_grad():
            for param in net.parameters():
                param.fill_(5)  # a fresh replica has other weights, and no optimizer state
        got = []
        hook = lambda *_: got.append(receive(addresses[rank.rank - 2], TOKEN, 2, 30.0, state.check))  # noqa: E731
        step(2, hook=hook)
        dist.barrier()
        state.load(got[0].header, got[0].runs)
        assert extra["number"] == [3, "a"]
        if name == "fused":  # each group's shard is one run, and so is each of its flat states
            runs = [run.numel() for run in got[0].runs if run.numel()]
            assert len(runs) <= 3 * (1 + 2) + 3, runs
    for _ in range(2):  # data differ between replicas, gradients may not: what is not copied would show
        step(3)
        for param in net.parameters():
            dist.all_reduce(param.grad.to_local(), group=mesh["replicate"].get_group())
        optimizer.step()
        theirs = [None] * 4
        dist.all_gather_object(theirs, _locals(net, optimizer))
        mine, peer = theirs[rank.rank], theirs[(rank.rank + 2) % 4]
        assert len(mine) == len(peer) and all(map(torch.equal, mine, peer)), name
    server.close()


@spmd(2)
def test_a_store_is_of_one_replica_alone(rank: Rank) -> None:
    """Another one in these processes, or the life before this, may have the same keys."""
    one, other = (replica_store("127.0.0.1", 30.0) for _ in "ab")
    one.set(f"from {rank.rank}", "one")
    one.wait(["from 0", "from 1"])
    assert (one.host, one.port) != (other.host, other.port)
    assert not other.check(["from 0"])
    dist.barrier()
    with pytest.raises(
        ValueError, match="host: expected a name under which others reach this rank, got 'no "
    ):
        replica_store("no such host", 0.5)
