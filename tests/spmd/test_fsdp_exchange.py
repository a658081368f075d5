"""``reduction="all_to_all"``: the gradients of the reduce-scatter, summed on arrival."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ragged_fsdp import MixedPrecisionPolicy, fully_shard
from rank_pool import Rank, spmd


class Net(nn.Module):
    """Uneven shapes, a frozen and a sometimes unused parameter, one larger than the eager threshold."""

    def __init__(self, wide: int = 5) -> None:
        super().__init__()
        self.first = nn.Linear(7, wide)
        self.second = nn.Linear(wide, 3, bias=False)
        self.frozen = nn.Parameter(torch.randn(11), requires_grad=False)
        self.extra = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, use_extra: bool = True) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return self.extra(y) if use_extra else y


def _net(seed: int = 0, wide: int = 5) -> Net:
    torch.manual_seed(seed)
    return Net(wide)


def _grads(net: nn.Module) -> dict[str, torch.Tensor | None]:
    """This rank's part of each gradient; local, since a parameter may have one on some ranks only."""
    return {n: None if p.grad is None else p.grad.to_local() for n, p in net.named_parameters()}


def _through_views(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Send views in three rounds, also on the CPU: over sends and receives, gloo has no list all-to-all."""
    from ragged_fsdp import collectives
    from ragged_fsdp.fsdp import exchange

    def pieces(received: list, sent: list, group: dist.ProcessGroup, async_op: bool) -> None:
        ranks, me = dist.get_process_group_ranks(group), group.rank()
        received[me].copy_(sent[me])
        works = []
        for peer in range(len(ranks)):
            if peer != me and sent[peer].numel():
                works.append(dist.isend(sent[peer].contiguous(), ranks[peer], group=group))
            if peer != me and received[peer].numel():
                works.append(dist.irecv(received[peer], ranks[peer], group=group))
        for work in works:
            work.wait()

    plan = exchange.plan_sends
    monkeypatch.setattr(exchange, "packs_all", lambda device, shard_numel: False)
    monkeypatch.setattr(exchange, "plan_sends", lambda layout, ranks, rounds: plan(layout, ranks, rounds=3))
    if device == "cpu":
        monkeypatch.setattr(collectives, "all_to_all_pieces", pieces)


@spmd(1, 2, 3, 4)
@pytest.mark.parametrize("views", [False, True])
def test_gradients_equal_those_of_the_reduce_scatter(rank: Rank, views: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if views:
            _through_views(patch, str(rank.device))
        found = {}
        for reduction in ("reduce_scatter", "all_to_all"):
            net = fully_shard(_net().to(rank.device), mesh=rank.mesh(), reduction=reduction)
            for step in range(2):
                torch.manual_seed(10 * step + rank.rank)
                net.zero_grad()
                # a rank-dependent use of a module: where it is unused on some ranks they send zeros
                net(torch.randn(4, 7, device=rank.device), use_extra=rank.rank == 0).sum().backward()
            found[reduction] = _grads(net)
    for name, grad in found["reduce_scatter"].items():
        ours = found["all_to_all"][name]
        assert (grad is None) == (ours is None), name
        if grad is not None:
            torch.testing.assert_close(ours, grad, rtol=1e-6, atol=1e-7, msg=name)


@spmd(2, 4)
@pytest.mark.parametrize("wide", [5, 300_000])
def test_bf16_gradients_are_summed_in_fp32(rank: Rank, wide: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = fully_shard(
        _net(wide=wide).to(rank.device), mesh=rank.mesh(), mp_policy=policy, reduction="all_to_all"
    )
    plain = _net(wide=wide).to(rank.device, torch.bfloat16)
    torch.manual_seed(rank.rank)
    x = torch.randn(4, 7, device=rank.device)
    net(x).float().sum().backward()
    plain(x.bfloat16()).float().sum().backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            continue
        exact = parameter.grad.double()
        dist.all_reduce(exact)
        got = dict(net.named_parameters())[name].grad.full_tensor()
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact / rank.world_size, rtol=1e-6, atol=1e-8, msg=name)


@spmd(4)
def test_accumulation_and_replicas(rank: Rank) -> None:
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    found = {}
    for reduction in ("reduce_scatter", "all_to_all"):
        net = fully_shard(_net().to(rank.device), mesh=mesh, reduction=reduction)
        for micro in range(3):
            net.set_requires_gradient_sync(micro == 2)
            torch.manual_seed(10 * micro + rank.rank)
            net(torch.randn(4, 7, device=rank.device)).sum().backward()
        found[reduction] = _grads(net)
    for name, grad in found["reduce_scatter"].items():
        if grad is not None:
            torch.testing.assert_close(found["all_to_all"][name], grad, rtol=1e-6, atol=1e-7, msg=name)


@spmd(2)
def test_memory_of_gradients_is_dropped_and_bad_values_raise(rank: Rank) -> None:
    with pytest.raises(ValueError, match="reduction must be one of"):
        fully_shard(_net(), mesh=rank.mesh(), reduction="ring")
    net = fully_shard(_net().to(rank.device), mesh=rank.mesh(), reduction="all_to_all")
    net(torch.randn(4, 7, device=rank.device)).sum().backward()
    (group,) = net._get_fsdp_state().groups if hasattr(net, "_get_fsdp_state") else net.fsdp_groups()
    reducer = group.reducer
    assert not reducer.written and not reducer._grads and not reducer._sends and reducer._memory is None
    assert not group.context.pending
