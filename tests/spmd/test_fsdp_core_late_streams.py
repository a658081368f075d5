"""Nothing is read before it was waited for, and no memory goes while a stream still uses it."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from late_streams import make_streams_late
from ragged_fsdp import BlockCodes, fully_shard
from ragged_fsdp.fsdp.schedule import CommContext
from rank_pool import DEVICE, Rank, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="a device has streams of its own")
WIDTH = 16
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CASES = {
    "plain": {},
    "bf16": {"mp_policy": BF16},
    "exchange": {"mp_policy": BF16, "reduction": "all_to_all"},
    "codes": {"gather_policy": lambda name, p: BlockCodes("int8", (8, 8)) if p.ndim == 2 else None},
    "parts": {"gather_policy": lambda name, p: BlockCodes("int8", (8, 8)) if name == "up.weight" else None},
}
CASES["parts"] |= {"reduction": "all_to_all", "max_buffers": 2}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Failing(torch.autograd.Function):
    """An error in the middle of a backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")


def _model(mesh: object, options: dict, buffers: int) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block() for _ in range(4)], nn.Linear(WIDTH, 8))
    for block in net[:4]:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)
    net.set_reduce_scatter_max_input_buffers(buffers)
    return net


def _train(net: nn.Module, rank: Rank) -> list[torch.Tensor]:
    """Losses, gradients and parameters of steps, each with something that happens to users."""
    seen: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def backward(step: int) -> torch.Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank.rank))
        loss = net(x).float().square().mean()
        loss.backward()
        return loss.detach()

    def take(param: nn.Parameter) -> None:
        seen.append(param.grad.to_local().clone())
        param.grad = None

    def finish_step() -> None:
        seen.extend(p.grad.to_local().clone() for p in net.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()

    seen.append(backward(0))
    finish_step()
    net.set_requires_gradient_sync(False)
    seen.append(backward(1))
    net.set_requires_gradient_sync(True)
    seen.extend([backward(2), backward(3)])  # the second adds to the gradients of the first
    finish_step()
    hook = net[2].register_forward_hook(lambda module, args, output: Failing.apply(output))
    with pytest.raises(RuntimeError, match="on purpose"):
        backward(4)
    hook.remove()
    net.reset_iter_state()
    net.zero_grad()
    taking = [p.register_post_accumulate_grad_hook(take) for p in net.parameters()]
    seen.append(backward(5))
    for handle in taking:
        handle.remove()
    with torch.no_grad():
        seen.append(net(torch.ones(1, WIDTH)).clone())
    seen.append(backward(6))
    finish_step()
    return seen + [p.to_local().clone() for p in net.parameters()]


@spmd(1, 2, 4)
def test_streams_that_are_late_change_nothing(rank: Rank) -> None:
    hsdp = rank.world_size == 4
    mesh = rank.mesh(2, 2, names=("replicate", "shard")) if hsdp else rank.mesh()
    everything = rank.world_size == 2
    for case in CASES if everything else ("bf16", "parts"):
        for buffers in (1, 2) if everything else (1,):
            expected = _train(_model(mesh, CASES[case], buffers), rank)
            with pytest.MonkeyPatch.context() as patch:
                make_streams_late(patch)
                found = _train(_model(mesh, CASES[case], buffers), rank)
            assert len(found) == len(expected)
            for index, (ours, theirs) in enumerate(zip(found, expected)):
                assert torch.equal(ours, theirs), f"{case}, {buffers} buffers: result {index}"


def _no_wait(context: CommContext, entry: object) -> None:
    entry.release()


def _hold_nothing(context: CommContext, *args: object) -> None:
    for entry in context.pending:
        entry.held = None
        entry.release()
    context.pending.clear()


BROKEN = {
    "waits for no reduction": ("_finish", _no_wait),
    "frees what is reduced": ("make_room", _hold_nothing),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("case", ["plain", "exchange", "codes"])
@spmd(2)
def test_a_runtime_that_is_broken_is_found(rank: Rank, case: str, broken: str) -> None:
    """So that the test above can fail."""
    with pytest.MonkeyPatch.context() as patch:
        expected = _train(_model(rank.mesh(), CASES[case], 1), rank)
        make_streams_late(patch)
        patch.setattr(CommContext, *BROKEN[broken])
        try:
            found = _train(_model(rank.mesh(), CASES[case], 1), rank)
        except AssertionError:
            return
        assert not all(torch.equal(a, b) for a, b in zip(found, expected))
