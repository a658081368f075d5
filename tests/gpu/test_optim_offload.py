"""Optimizer state on the host, on a device: no state there after a step, the same bits, overlapped copies.

Run with ``RAGGED_FSDP_TEST_DEVICE=cuda``.
"""

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ragged_fsdp.optim import AdamW8bit, FusedAdamW, Muon, Shampoo, offload_state
from rank_pool import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "fused": lambda p: FusedAdamW(p, lr=1e-2),
    "8bit": lambda p: AdamW8bit(p, lr=1e-2),
    "shampoo": lambda p: Shampoo(p, lr=1e-2, start_step=1, root_interval=2),
    "muon": lambda p: Muon(p, lr=1e-2, ns_dtype=torch.float32),
}
_SIDE, _COUNT = 512, 8


def parameters() -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        (f"layers.{i}.weight", nn.Parameter(torch.randn(_SIDE, _SIDE, device="cuda", generator=generator)))
        for i in range(_COUNT)
    ]


def step(named: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator("cuda").manual_seed(seed)
    for _, parameter in named:
        parameter.grad = torch.randn(_SIDE, _SIDE, device="cuda", generator=generator)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_state_on_the_device_and_the_same_bits(kind):
    plain, ours = parameters(), parameters()
    expected = OPTIMIZERS[kind](plain)
    optimizer = offload_state(OPTIMIZERS[kind](ours), part_numel=2 * _SIDE * _SIDE)
    gc.disable()  # nothing may wait for it
    try:
        for seed in range(4):
            step(plain, expected, seed)
            before = torch.cuda.memory_allocated()
            step(ours, optimizer, seed)
            kept = torch.cuda.memory_allocated() - before
            assert kept < 64 << 10, f"{kept} bytes of state after step {seed}"  # scalars and tables
    finally:
        gc.enable()
    for (_, left), (_, right) in zip(ours, plain):
        assert torch.equal(left, right)
        for key, value in expected.state[right].items():
            held = optimizer.state[left][key]
            assert held.is_pinned() or not held.ndim
            assert torch.equal(held.cpu(), value.cpu()), key


def test_copies_run_beside_updates():
    """Copies in and out are on streams of their own, and each direction beside the other."""
    named = parameters()
    optimizer = offload_state(torch.optim.AdamW(named, lr=1e-2, fused=True), part_numel=_SIDE * _SIDE)
    for seed in range(2):
        step(named, optimizer, seed)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(named, optimizer, 2)
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[int, int]]] = {"HtoD": [], "DtoH": []}
    for event in profiler.events():
        for way, found in spans.items():
            if f"Memcpy {way}" in event.name:
                found.append((event.time_range.start, event.time_range.end))
    assert all(len(found) >= _COUNT for found in spans.values())
    beside = [1 for a, b in spans["HtoD"] for c, d in spans["DtoH"] if a < d and c < b]
    assert beside
