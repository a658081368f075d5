"""Gradient buffers: when they are allocated, ``max_buffers``, and what reductions of a module wait for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_core_cases import assert_same_grads, assert_same_params, clone
from ragged_fsdp import BlockCodes, Rows, fully_shard
from ragged_fsdp.fsdp.arena import Arena
from ragged_fsdp.fsdp.schedule import CommContext
from rank_pool import Rank, spmd


class Mixed(nn.Module):
    """Nine blocks of 80 elements and one of 3584 for each rank: together they would pad by most of a rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 45), nn.Linear(56, 64 * ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.pad(self.first(x).tanh(), (0, 11)))


def policy(name: str, param: nn.Parameter) -> Rows | None:
    return {"first.weight": Rows(5), "second.weight": Rows(64)}.get(name)


def _padding(model: nn.Module) -> int:
    return sum(group.plan.layout.padding_numel for group in model._get_fsdp_state().groups)


@spmd(1, 3, 4)
def test_split_groups_pad_less_and_train_alike(rank: Rank) -> None:
    torch.manual_seed(1)
    ranks = rank.world_size
    net = nn.Sequential(Mixed(ranks), nn.Linear(64 * ranks, 16), Mixed(ranks)).to(rank.device)
    reference = clone(net)
    single = clone(net)
    fully_shard(single[0], mesh=rank.mesh(), orig_param_policy=policy)
    for index in (0, 2):
        fully_shard(net[index], mesh=rank.mesh(), orig_param_policy=policy, max_buffers=3)
    fully_shard(net, mesh=rank.mesh())
    groups = net[0]._get_fsdp_state().groups
    if rank.world_size > 2:
        assert len(groups) > 1 and _padding(net[0]) < _padding(single[0])
        assert [group.label_suffix for group in groups[:2]] == [f" ({i} of {len(groups)})" for i in (1, 2)]
    else:
        assert len(groups) == 1
    assert sorted(p.name for g in groups for p in g.params) == sorted(
        n for n, _ in Mixed(ranks).named_parameters()
    )
    for name, block in (("first", 5 * 16), ("second", 64 * 56)):
        assert getattr(net[0], name).weight.to_local().numel() % block == 0
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, reference)]
    for step in range(3):
        x = torch.linspace(-1, 1, 64, device=rank.device).view(4, 16) + step
        for module in (net, reference):
            module.zero_grad()
            module(x).square().mean().backward()
        assert_same_grads(net, reference, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_params(net, reference, rtol=1e-4, atol=1e-6)
    net[0].set_custom_reduce_scatter(None)  # all groups have one mesh
    with pytest.raises(ValueError, match="max_buffers must be an int >= 1, got 0"):
        fully_shard(nn.Linear(2, 2), max_buffers=0)


def codes(name: str, param: nn.Parameter) -> BlockCodes | None:
    return BlockCodes("int8", (8, 8)) if param.ndim == 2 else None


@spmd(1, 3)
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
def test_a_small_group_does_not_wait_for_the_reduction_of_its_module(rank: Rank, reduction: str) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(3)]
    net = nn.Sequential(*blocks, nn.Linear(16, 1)).to(rank.device)
    for block in blocks:
        fully_shard(block, mesh=rank.mesh(), gather_policy=codes, reduction=reduction)
    fully_shard(net, mesh=rank.mesh(), reduction=reduction)
    left = []
    make_room = CommContext.make_room

    def watched(context: CommContext, companion: bool) -> None:
        make_room(context, companion)
        left.append((companion, sorted(entry.owner.companion for entry in context.pending)))

    with pytest.MonkeyPatch.context() as patch:  # a fixture would not be undone on the ranks
        patch.setattr(CommContext, "make_room", watched)
        for _ in range(2):
            left.clear()
            x = torch.ones(4, 16, device=rank.device, requires_grad=True)
            net(x).sum().backward()
            small = (True, [False, True])  # goes on while the large one of its module is reduced
            large = (False, [True])
            assert left == [(False, []), (True, [False]), large, small, large, small, large]
            assert not net._get_fsdp_state().root.comm.pending
    one = nn.Sequential(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))).to(rank.device)
    fully_shard(one[0], mesh=rank.mesh(), gather_policy=codes, reduction=reduction)
    fully_shard(one, mesh=rank.mesh(), reduction=reduction)
    one(torch.ones(4, 16, device=rank.device)).sum().backward()
    assert not _arena(one).nbytes  # nobody would take it: a small group does not, the large one is alone


def _arena(net: nn.Module) -> Arena:
    return net._get_fsdp_state().root.comm.arena


@spmd(1, 2)
@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all"])
def test_the_arena_is_allocated_before_the_step_and_only_if_it_will_be_used(
    rank: Rank, reduction: str
) -> None:
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]).to(rank.device)
    for layer in net:
        fully_shard(layer, mesh=rank.mesh(), reduction=reduction)
    fully_shard(net, mesh=rank.mesh(), reduction=reduction)
    held = []

    def look(*_: object) -> None:
        held.append([storage.is_materialized for storage in _arena(net)._free])

    net[0].register_forward_pre_hook(look)
    x = torch.ones(2, 32, device=rank.device)
    with torch.no_grad():
        net(x)
    net(x).sum().backward()
    with torch.no_grad():
        net(x)
    net(x).sum().backward()
    assert held == [[], [True], [False], [True]]
    assert _arena(net).nbytes and not _arena(net)._lent

    own_memory = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]).to(rank.device)
    for layer in own_memory:
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(own_memory, mesh=rank.mesh())
    own_memory.set_requires_gradient_sync(False)
    own_memory(x).sum().backward()
    assert not _arena(own_memory)._free
