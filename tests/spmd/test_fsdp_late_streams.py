"""Nothing is read before it was waited for, and no memory goes while a stream still uses it.

On streams that are late, which give wrong results then, and on streams whose every use of memory is watched.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_inside
from fsdp_cases import Stack, build, ragged_only, rows, shard_blocks
from late_streams import make_streams_late
from ordered_streams import OrderedStreams
from ragged_fsdp import BlockCodes, share_comm_ctx
from rank_pool import DEVICE, Rank, spmd

pytestmark = [
    ragged_only,
    pytest.mark.skipif(DEVICE != "cpu", reason="a device has streams of its own"),
]
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CASES = {
    "plain": {},
    "bf16": {"mp_policy": BF16},
    "exchange": {"mp_policy": BF16, "reduction": "all_to_all"},
    "levels": {"mp_policy": BF16, "reduction": "two_level", "ranks_per_node": 2},
    "codes": {"gather_policy": lambda name, p: BlockCodes("int8", (4, 4)) if p.ndim == 2 else None},
    "parts": {"gather_policy": lambda name, p: BlockCodes("int8", (4, 4)) if name == "up.weight" else None},
}
CASES["parts"] |= {"reduction": "all_to_all", "max_buffers": 2}
CASES["bf16 weights"] = {
    "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    "reduction": "all_to_all",
}


class Failing(torch.autograd.Function):
    """An error in the middle of a backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")


@contextmanager
def _streams(kind: str) -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        if kind == "ordered":
            with OrderedStreams().install(patch):
                yield patch
        else:
            if kind == "late":
                make_streams_late(patch)
            yield patch


def _model(rank: Rank, case: str, buffers: int = 1) -> nn.Module:
    hsdp = rank.world_size == 4 and case != "levels"
    mesh = rank.mesh(2, 2, names=("replicate", "shard")) if hsdp else rank.mesh()
    dtype = torch.bfloat16 if case == "bf16 weights" else torch.float32
    model, _ = build(lambda: Stack(layers=4).to(dtype), rank.device)
    shard_blocks(model, mesh=mesh, **CASES[case])
    model.set_reduce_scatter_max_input_buffers(buffers)
    return model


def _train(net: nn.Module, rank: Rank) -> list[torch.Tensor]:
    """Losses, gradients and parameters of steps, each with something that happens to users."""
    seen: list[torch.Tensor] = []
    dtype = next(net.parameters()).dtype
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def backward(step: int) -> torch.Tensor:
        loss = net(rows(rank, step).to(dtype)).float().square().mean()
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
    hook = net.layers[2].register_forward_hook(lambda module, args, output: Failing.apply(output))
    with pytest.raises(RuntimeError, match="on purpose"):
        backward(4)
    hook.remove()
    net.reset_iter_state()
    net.zero_grad()
    seen.append(backward(5))
    taking = [p.register_post_accumulate_grad_hook(take) for p in net.parameters()]
    seen.append(backward(6))  # adds to gradients that the user then drops
    for handle in taking:
        handle.remove()
    with torch.no_grad():
        seen.append(net(rows(rank, 6).to(dtype)).clone())
    seen.append(backward(7))
    finish_step()
    return seen + [p.to_local().clone() for p in net.parameters()]


@spmd(1, 2, 4)
def test_streams_that_are_late_change_nothing(rank: Rank) -> None:
    everything = rank.world_size == 2
    levels = ("levels",) if rank.world_size == 4 else ()  # on two ranks there is nothing between nodes
    for case in CASES if everything else ("bf16", "parts", *levels):
        for buffers in (1, 2) if everything and case in ("plain", "exchange", "parts") else (1,):
            expected = _train(_model(rank, case, buffers), rank)
            for kind in ("late", "ordered"):
                with _streams(kind):
                    found = _train(_model(rank, case, buffers), rank)
                assert len(found) == len(expected)
                for index, (ours, theirs) in enumerate(zip(found, expected)):
                    assert torch.equal(ours, theirs), f"{case}, {buffers} buffers, {kind}: result {index}"


@spmd(4)
def test_gradients_that_travel_as_views(rank: Rank) -> None:
    """Over both levels, step by step: sums are sent on while the rows of the next step arrive."""
    found = []
    for kind in ("none", "late", "ordered"):
        with _streams(kind) as patch:
            fsdp_inside.exchange_in_rounds(patch, rounds=2)
            found.append(_train(_model(rank, "levels"), rank))
    for other in found[1:]:
        assert len(other) == len(found[0]) and all(torch.equal(*pair) for pair in zip(found[0], other))


@spmd(2)
@pytest.mark.parametrize("case", ["bf16", "exchange"])
def test_a_hook_that_raises_while_its_gradient_is_reduced(rank: Rank, case: str) -> None:
    """What the reduction writes stays until it has been waited for: the step that failed let go of it."""

    def fail(param: nn.Parameter) -> None:
        param.grad = None
        raise RuntimeError("on purpose")

    found = []
    for kind in ("none", "late", "ordered"):
        with _streams(kind):
            net = _model(rank, case)
            hook = next(net.layers[1].parameters()).register_post_accumulate_grad_hook(fail)
            with pytest.raises(RuntimeError, match="on purpose"):
                net(rows(rank, 0)).float().square().mean().backward()
            hook.remove()
            net.zero_grad()
            net(rows(rank, 1)).float().square().mean().backward()
            found.append([p.grad.to_local().clone() for p in net.parameters()])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other))


@spmd(4)
@pytest.mark.parametrize("case", ["exchange", "levels"])
def test_an_exchange_that_is_interrupted(rank: Rank, case: str) -> None:
    """What it has on the wire is over before its memory is used again."""
    sums = iter(range(3))

    def interrupt() -> None:
        if next(sums, None) == 2:
            raise KeyboardInterrupt("on purpose")

    with _streams("ordered") as patch:
        fsdp_inside.exchange_in_rounds(patch, rounds=2)
        fsdp_inside.on_sum_of_exchange(patch, interrupt)
        net = _model(rank, case)
        with pytest.raises(KeyboardInterrupt, match="on purpose"):
            net(rows(rank, 0)).float().square().mean().backward()
        net.zero_grad()
        net(rows(rank, 1)).float().square().mean().backward()


@spmd(2)
def test_an_exchange_whose_messages_fail(rank: Rank) -> None:
    """It raises once; what was on the wire behind it is forgotten with it."""
    net = _model(rank, "exchange")
    with pytest.MonkeyPatch.context() as patch:
        fsdp_inside.exchange_in_rounds(patch, rounds=2)
        fsdp_inside.fail_messages(patch)
        with pytest.raises(RuntimeError, match="on purpose"):
            net(rows(rank, 0)).float().square().mean().backward()
    net.reset_iter_state()
    net.zero_grad()
    net(rows(rank, 1)).float().square().mean().backward()
    expected = _model(rank, "exchange")
    expected(rows(rank, 1)).float().square().mean().backward()
    for ours, theirs in zip(net.parameters(), expected.parameters()):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


@pytest.mark.parametrize("fault", fsdp_inside.BROKEN)
@pytest.mark.parametrize("case", ["plain", "exchange", "codes"])
@spmd(2)
def test_a_runtime_that_is_broken_is_found(rank: Rank, case: str, fault: str) -> None:
    """So that the tests above can fail."""
    if fault in fsdp_inside.BROKEN[:2]:
        expected = _train(_model(rank, case), rank)
        with _streams("late") as patch:
            fsdp_inside.break_streams(patch, fault)
            try:
                found = _train(_model(rank, case), rank)
            except AssertionError:
                found = []
            assert not found or not all(torch.equal(a, b) for a, b in zip(found, expected))
    with _streams("ordered") as patch:
        fsdp_inside.break_streams(patch, fault)
        with pytest.raises(AssertionError, match=r"not waited for|did not wait for"):
            _train(_model(rank, case), rank)


@pytest.mark.parametrize("case", ["exchange", "levels", "codes"])
@spmd(4)
def test_roots_that_share_a_context_and_compute_on_streams_of_their_own(rank: Rank, case: str) -> None:
    """They share memory for gradients, and each may wait for the reductions of the other."""
    with pytest.MonkeyPatch.context() as patch:
        streams = OrderedStreams()
        with streams.install(patch):
            nets = [_model(rank, case) for _ in range(2)]
            share_comm_ctx(nets)
            own = [streams.named_stream(f"compute {index}") for index in range(2)]
            for stream in own:
                stream.wait_stream(streams.compute)
            for step in range(2):
                for stream, net in zip(own, nets):
                    with stream:
                        net(rows(rank, step)).float().square().mean().backward()
            for stream, net in zip(own, nets):
                with stream:
                    torch.optim.SGD(net.parameters(), lr=0.1).step()
