"""How far each way of reducing bf16 gradients is from the exact mean.

Autograd hands over bf16 gradients, one per rank. Three ways to average them:

* ``fp32 reduce-scatter``: cast to fp32, then the ring adds in fp32. 4 bytes per element on the wire.
* ``bf16 reduce-scatter``: the ring adds in bf16, rounding at every hop. 2 bytes.
* ``bf16 all-to-all, fp32 sum``: the parts travel as they are, the owner adds them in fp32. 2 bytes.

The reference is the fp64 mean of the same bf16 gradients. Few ranks are run for real over gloo; many
are emulated hop by hop. Gradients are a common signal plus noise of each rank, the noise ``noise`` times
as large: small batches per rank make it large.
"""

from __future__ import annotations

import math
import multiprocessing as mp
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["METHODS", "draw_gradients", "emulated", "real", "relative_error"]

_NUMEL_PER_RANK = 4096


def draw_gradients(ranks: int, numel: int, noise: float, seed: int = 0) -> torch.Tensor:
    """bf16 gradients of every rank, (ranks, numel), sizes spread over two decades as in real layers."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (-4 + 2 * torch.rand(numel, generator=generator))
    signal = torch.randn(numel, generator=generator)
    own = torch.randn(ranks, numel, generator=generator)
    return (scale * (signal + noise * own)).bfloat16()


def relative_error(result: torch.Tensor, gradients: torch.Tensor) -> float:
    """Distance from the fp64 mean, relative to it."""
    exact = gradients.double().mean(0)
    return ((result.double() - exact).norm() / exact.norm()).item()


def _ring(gradients: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add hop by hop, rounding to ``dtype`` after each; the hop itself computes in fp32, as NCCL does."""
    total = gradients[0].to(dtype)
    for part in gradients[1:]:
        total = (total.float() + part.to(dtype).float()).to(dtype)
    return total.float() / len(gradients)


def _exchange(gradients: torch.Tensor) -> torch.Tensor:
    """What the owner of a part does with the pieces an all-to-all brought."""
    return gradients.sum(0, dtype=torch.float32) / len(gradients)


METHODS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32 reduce-scatter": lambda gradients: _ring(gradients, torch.float32),
    "bf16 reduce-scatter": lambda gradients: _ring(gradients, torch.bfloat16),
    "bf16 all-to-all, fp32 sum": _exchange,
}


def emulated(ranks: int, noise: float, numel: int = 1 << 16) -> dict[str, float]:
    """Relative error of each method, hop by hop, for any number of ranks."""
    gradients = draw_gradients(ranks, numel, noise)
    return {name: relative_error(method(gradients), gradients) for name, method in METHODS.items()}


def real(ranks: int, noise: float) -> dict[str, float]:
    """Relative error of each method over gloo, one process per rank."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_rank, args=(rank, ranks, store.port, noise, theirs)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    squares: dict[str, list[float]] = {name: [0.0, 0.0] for name in METHODS}
    try:
        for _ in range(ranks):
            if not ours.poll(300):
                raise RuntimeError("real: a rank did not answer within 300 s")
            for name, (error, exact) in ours.recv().items():
                squares[name][0] += error
                squares[name][1] += exact
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    return {name: math.sqrt(error / exact) for name, (error, exact) in squares.items()}


def _rank(rank: int, ranks: int, port: int, noise: float, pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    gradients = draw_gradients(ranks, ranks * _NUMEL_PER_RANK, noise)
    own = slice(rank * _NUMEL_PER_RANK, (rank + 1) * _NUMEL_PER_RANK)
    exact = gradients[:, own].double().mean(0)
    found = {}
    for name, dtype in (("fp32 reduce-scatter", torch.float32), ("bf16 reduce-scatter", torch.bfloat16)):
        part = torch.empty(_NUMEL_PER_RANK, dtype=dtype)
        dist.reduce_scatter_tensor(part, gradients[rank].to(dtype))
        found[name] = part.double() / ranks
    pieces = torch.empty(ranks, _NUMEL_PER_RANK, dtype=torch.bfloat16)
    dist.all_to_all_single(pieces, gradients[rank])
    found["bf16 all-to-all, fp32 sum"] = _exchange(pieces).double()
    pipe.send({n: ((v - exact).square().sum().item(), exact.square().sum().item()) for n, v in found.items()})
    dist.destroy_process_group()
