"""``reduction="all_to_all"``: the gradients of the reduce-scatter, summed on arrival."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp_inside
from fsdp_cases import average_gradients, build, fully_shard, ragged_only, rows
from ragged_fsdp import MixedPrecisionPolicy
from rank_pool import Rank, spmd

pytestmark = ragged_only
REDUCTIONS = ("reduce_scatter", "all_to_all")


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


def _net(rank: Rank, wide: int = 5, **options: object) -> tuple[nn.Module, nn.Module]:
    net, plain = build(lambda: Net(wide), rank.device)
    return fully_shard(net, **{"mesh": rank.mesh(), **options}), plain


def _grads(net: nn.Module) -> dict[str, torch.Tensor | None]:
    """This rank's part of each gradient; local, since a parameter may have one on some ranks only."""
    return {n: None if p.grad is None else p.grad.to_local() for n, p in net.named_parameters()}


def _assert_alike(found: dict[str, dict[str, torch.Tensor | None]]) -> None:
    """The gradients of the two reductions, this rank's part of each."""
    for name, grad in found["reduce_scatter"].items():
        ours = found["all_to_all"][name]
        assert (grad is None) == (ours is None), name
        if grad is not None:
            torch.testing.assert_close(ours, grad, rtol=1e-6, atol=1e-7, msg=name)


@spmd(1, 2, 3, 4)
@pytest.mark.parametrize("views", [False, True])
def test_gradients_equal_those_of_the_reduce_scatter(rank: Rank, views: bool) -> None:
    """A module is used on one rank only: the others send zeros, and have its gradient if they ask for it."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAGGED_FSDP_DEBUG", raising=False)  # it refuses ranks without a gradient of others
        if views:
            fsdp_inside.exchange_in_rounds(patch, rounds=3)
        for reduction in REDUCTIONS:
            net, _ = _net(rank, reduction=reduction)
            found[reduction] = {}
            for step, unused in enumerate((False, True, True)):
                net.zero_grad()
                net.set_reduce_scatter_unused_params(unused)
                net(rows(rank, step, dim=7), use_extra=rank.rank == 0).sum().backward()
                found[reduction] |= {f"{name} in step {step}": grad for name, grad in _grads(net).items()}
    _assert_alike(found)
    if rank.rank:
        assert found["all_to_all"]["extra.weight in step 0"] is None
    assert found["all_to_all"]["extra.weight in step 1"] is not None


@spmd(2)
def test_gradients_that_are_packed_are_let_go(rank: Rank) -> None:
    """Of the second weight nothing is sent but its share of a packed row; of the first, views."""
    with pytest.MonkeyPatch.context() as patch:
        fsdp_inside.exchange_in_rounds(patch, rounds=2)
        held = fsdp_inside.gradients_held_by_exchanges(patch)
        net, _ = _net(rank, wide=40, reduction="all_to_all")
        net(rows(rank, 0, dim=7)).sum().backward()
    assert held == [["first.weight"]]


@spmd(2, 4)
@pytest.mark.parametrize("wide", [5, 300_000])
def test_bf16_gradients_are_summed_in_fp32(rank: Rank, wide: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net, plain = _net(rank, wide, mp_policy=policy, reduction="all_to_all")
    plain.bfloat16()
    x = rows(rank, 0, dim=7)
    net(x).float().sum().backward()
    plain(x.bfloat16()).float().sum().backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is None:
            continue
        exact = parameter.grad.double()
        dist.all_reduce(exact)
        got = net.get_parameter(name).grad.full_tensor()
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact / rank.world_size, rtol=1e-6, atol=1e-8, msg=name)


@spmd(4)
def test_accumulation_and_replicas(rank: Rank) -> None:
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    found = {}
    for reduction in REDUCTIONS:
        net, _ = _net(rank, mesh=mesh, reduction=reduction)
        for micro in range(3):
            net.set_requires_gradient_sync(micro == 2)
            net(rows(rank, micro, dim=7)).sum().backward()
        found[reduction] = _grads(net)
    _assert_alike(found)


@spmd(2)
def test_other_values_are_refused(rank: Rank) -> None:
    with pytest.raises(ValueError, match="reduction must be one of"):
        _net(rank, reduction="ring")


@spmd(1, 2, 4)
@pytest.mark.parametrize("views", [False, True])
def test_complex_gradients(rank: Rank, views: bool) -> None:
    """Both parts of a number arrive, also between nodes in a dtype that has no room for them."""
    for options in ({"reduction": "all_to_all"}, {"reduction": "two_level", "ranks_per_node": 2}):
        with pytest.MonkeyPatch.context() as patch:
            if views:
                fsdp_inside.exchange_in_rounds(patch, rounds=2)
            net, plain = build(lambda: nn.Linear(7, 5, dtype=torch.complex64), rank.device)
            fully_shard(net, mesh=rank.mesh(), internode_dtype=torch.float32, **options)
            x = torch.complex(rows(rank, 0, dim=7), rows(rank, 1, dim=7))
            for module in (net, plain):
                module(x).abs().square().sum().backward()
            average_gradients(plain)
            for ours, expected in zip(net.parameters(), plain.parameters()):
                torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)
