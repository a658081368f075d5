"""Parameters that are written while their weights are gathered: the next forward gathers what was written."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_cases import Transformer, build, is_sharded, ragged_only, shard_blocks, tokens
from ragged_fsdp.optim import AdamW8bit, FusedAdamW
from rank_pool import Rank, spmd

pytestmark = ragged_only

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),  # none of its writes is counted by torch
    "fused": partial(torch.optim.AdamW, lr=0.1, fused=True),  # nor of this one's, compiled or not
    "ours": partial(FusedAdamW, lr=0.1),
    "8 bits": partial(AdamW8bit, lr=0.1),
}


def _evaluate(model: nn.Module, rank: Rank) -> None:
    """The root stays gathered."""
    with torch.no_grad():
        model(tokens(rank, 5))


def _unshard(model: nn.Module, rank: Rank) -> None:
    for module in (model, *model.layers):
        module.unshard()


def _train(model: nn.Module, rank: Rank) -> None:
    """All layers stay gathered."""
    model.set_reshard_after_backward(False)
    model(tokens(rank, 5)).backward()


def _assert_the_present_is_seen(
    rank: Rank, keep: Callable[..., None], write: Callable[[list[nn.Parameter]], Any]
) -> None:
    """A forward after ``write`` is that of a model which was resharded before it."""
    model, _ = build(Transformer, rank.device)
    shard_blocks(model, mesh=rank.mesh())
    params = list(model.parameters())
    model(tokens(rank, 1)).backward()
    keep(model, rank)
    assert not is_sharded(model.head.parameters())
    before = [p.full_tensor() for p in params]
    write(params)
    assert all(not torch.equal(p.full_tensor(), old) for p, old in zip(params, before))
    losses: list[Tensor] = []
    for resharded in (False, True):
        for module in (model, *model.layers) if resharded else ():
            module.reshard()
        with torch.no_grad():
            losses.append(model(tokens(rank, 2)))
    assert torch.equal(*losses)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
@spmd(2, timeout=170)
def test_by_an_optimizer(rank: Rank, name: str, compiled: bool) -> None:
    """Also where a compiler traces the step."""

    def write(params: list[nn.Parameter]) -> None:
        torch._dynamo.reset()  # of cases before this one, after many of which it compiles no more
        step = OPTIMIZERS[name](params).step
        (torch.compile(step, backend="aot_eager") if compiled else step)()

    _assert_the_present_is_seen(rank, _train, write)


def _in_inference_mode(params: Iterable[Tensor]) -> None:
    with torch.inference_mode():
        for param in params:
            param.add_(1)


def _by_hand(write: Callable[[Tensor], Any]) -> Callable[[Iterable[Tensor]], None]:
    def written(params: Iterable[Tensor]) -> None:
        with torch.no_grad():
            for param in params:
                write(param)

    return written


HANDS = {
    "in inference mode": _in_inference_mode,
    "op": _by_hand(lambda p: p.add_(1)),
    "copy": _by_hand(lambda p: p.copy_(torch.full_like(p, 0.25))),
    "detached": _by_hand(lambda p: p.detach().mul_(0.5).add_(1)),
    "init": _by_hand(lambda p: nn.init.constant_(p, 0.5)),
    "compiled": _by_hand(torch.compile(lambda p: p.add_(1), backend="aot_eager", dynamic=True)),
}


@pytest.mark.parametrize("how", HANDS)
@spmd(1, 2, timeout=170)
def test_by_hand(rank: Rank, how: str) -> None:
    for keep in (_evaluate, _unshard, _train):
        _assert_the_present_is_seen(rank, keep, HANDS[how])
