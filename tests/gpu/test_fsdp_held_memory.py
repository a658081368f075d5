"""Memory that a reduction still uses goes to nobody else, whoever drops it.

Each test stops the reduce stream between a write and a read of the memory in question, and lets the compute
stream fill all the free memory it can get with NaN in between.

Run with ``RAGGED_FSDP_TEST_DEVICE=cuda``.
"""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_inside
from fsdp_cases import build, fully_shard, rows
from rank_pool import DEVICE, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")

WIDTH, LAYERS = 1024, 3
SLEEP_CYCLES = 200_000_000  # about 100 ms


def _model(rank, dtype, **options):
    linears = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS))
    model, _ = build(lambda: nn.Sequential(*linears), rank.device)
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _input(rank, dtype):
    return rows(rank, 0, dim=WIDTH, batch=8).to(dtype)


class _Spoiler:
    """Before the backward of each layer, behind ``event``: NaN in all free memory of the size of a shard."""

    def __init__(self, model, nbytes):
        self.event, self.nbytes, self.taken = None, nbytes, []
        for layer in model:
            layer.register_full_backward_pre_hook(self.spoil)

    def spoil(self, *_):
        if self.event is None:
            return
        torch.cuda.current_stream().wait_event(self.event)
        reserved = torch.cuda.memory_reserved()
        while torch.cuda.memory_reserved() == reserved:
            self.taken.append(torch.full((self.nbytes // 4,), torch.nan, device="cuda"))


@spmd(2)
def test_the_sum_of_an_exchange(rank):
    """bf16 parameters: the fp32 sum lies beside the gradients until it is cast."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    results = []
    for spoiled in (False, True):
        gc.collect()
        model = _model(rank, torch.bfloat16, mp_policy=policy, reduction="all_to_all")
        spoiler = _Spoiler(model, WIDTH * (WIDTH + 1) // rank.world_size * 4)

        def wait(spoiler=spoiler):
            spoiler.event = torch.cuda.current_stream().record_event()
            torch.cuda._sleep(SLEEP_CYCLES)

        with pytest.MonkeyPatch.context() as patch:
            if spoiled:
                fsdp_inside.on_sum_of_exchange(patch, wait)
            model(_input(rank, torch.bfloat16)).square().sum().backward()
        assert bool(spoiler.taken) == spoiled
        results.append([p.grad.to_local().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@spmd(2)
def test_a_gradient_that_a_hook_drops(rank):
    """As an optimizer that steps in backward does, here with gradients of an earlier backward to add to."""
    results = []
    for spoiled in (False, True):
        gc.collect()
        model = _model(rank, torch.float32)
        spoiler = _Spoiler(model, WIDTH * (WIDTH + 1) // rank.world_size * 4)
        seen = []

        def take(param, spoiler=spoiler, seen=seen, spoiled=spoiled):
            if spoiled and param.ndim == 2:
                spoiler.event = torch.cuda.current_stream().record_event()
                torch.cuda._sleep(SLEEP_CYCLES)
            seen.append(param.grad.to_local().clone())
            param.grad = None

        x = _input(rank, torch.float32)
        model(x).square().sum().backward()
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(take)
        model(x).square().sum().backward()
        assert bool(spoiler.taken) == spoiled and len(seen) == 2 * LAYERS
        results.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*results))
