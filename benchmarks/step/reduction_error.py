"""How far each way of reducing bf16 gradients is from the exact mean.

Autograd hands over bf16 gradients, one per rank. Five ways to average them:

* ``fp32 reduce-scatter``: cast to fp32, then the ring adds in fp32. 4 bytes per element on the wire.
* ``bf16 reduce-scatter``: the ring adds in bf16, rounding at every hop. 2 bytes.
* ``bf16 all-to-all, fp32 sum``: the parts travel as they are, the owner adds them in fp32. 2 bytes.
* ``two-level, bf16 between``: so inside each node; the nodes' sums are rounded to bf16, travel, and are added
  in fp32. 2 bytes.
* ``two-level, fp32 between``: the same with sums that are not rounded. 2 bytes inside nodes, 4 between.

The error of a way is the distance of its result from the fp64 mean of the bf16 gradients it was given,
relative to that mean. Beside it stands what nobody can avoid who hands over bf16: ``rounding to bf16``, the
distance of the fp64 mean of gradients rounded once to bf16 from the fp64 mean of these gradients unrounded,
relative to the latter.

Gradients are *drawn*, a common signal plus noise of each rank, or those of a *real* model: a small
transformer on the sources of Python's library, a micro-batch per rank, at the start and after some training.
Real gradients are computed twice, in fp32 (which are rounded for ``rounding to bf16``) and in bf16 as
training would, from fp32 weights; ``bf16 autograd`` is the distance between the fp64 means of the two. The
noise of a rank is given for drawn gradients and measured for real ones, in units of the common signal.

Few ranks run for real over gloo, through ``fully_shard``; many are emulated hop by hop.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

__all__ = [
    "COLUMNS",
    "METHODS",
    "Gradients",
    "autograd_error",
    "draw_gradients",
    "errors",
    "over_gloo",
    "real_gradients",
    "study",
]

_NUMEL = 1 << 16
_MODEL = {"hidden": "64", "expert_hidden": "64"}
_SEQ_LEN = 64
_MICRO_BATCH = 2
_TRAINING_BATCH = 32


@dataclass(frozen=True)
class Gradients:
    """The gradients of every rank, (ranks, numel)."""

    exact: torch.Tensor
    """In fp32."""
    sent: torch.Tensor
    """In bf16, as autograd hands them over."""

    def of_first(self, ranks: int) -> Gradients:
        """Those of the first ranks alone."""
        return Gradients(self.exact[:ranks], self.sent[:ranks])

    @property
    def noise(self) -> float:
        """What ranks have of their own over what they have in common, by their norms."""
        ranks, mean = len(self.exact), self.exact.double().mean(0)
        own = sum((row - mean).square().sum().item() for row in self.exact) / (ranks - 1)
        common = mean.square().sum().item() - own / ranks  # without the noise that is left in the mean
        return math.sqrt(own / common) if common > 0 else math.inf


def draw_gradients(ranks: int, numel: int, noise: float, seed: int = 0) -> Gradients:
    """Gradients whose sizes are spread over two decades, as in layers."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10 ** (-4 + 2 * torch.rand(numel, generator=generator))
    signal = torch.randn(numel, generator=generator)
    own = torch.randn(ranks, numel, generator=generator)
    exact = scale * (signal + noise * own)
    return Gradients(exact, exact.bfloat16())


def real_gradients(ranks: int, after_steps: Sequence[int]) -> Iterator[Gradients]:
    """Gradients of a small model on Python's library, after so many steps of training each."""
    from ragged_fsdp.models.materialize import materialize
    from ragged_fsdp.models.source import find_model
    from ragged_fsdp.trainer.batches import Batches

    source = find_model("nano", _MODEL)
    model, twin = source.build(), source.build()
    materialize(model, twin, source.init_with(twin), seed=0, device=torch.device("cpu"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in files), dtype=np.uint8)
    batches = Batches(text, _SEQ_LEN, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(max(after_steps, default=-1) + 1):
        if step in after_steps:
            first = (max(after_steps) + 1) * _TRAINING_BATCH  # sequences that training never sees
            micro_batches = [
                batches.sequences(range(first + i * _MICRO_BATCH, first + (i + 1) * _MICRO_BATCH))
                for i in range(ranks)
            ]
            exact, sent = (
                torch.stack([_gradient(model, ids, dtype) for ids in micro_batches])
                for dtype in (torch.float32, torch.bfloat16)
            )
            yield Gradients(exact, sent)
        ids = batches.sequences(range(step * _TRAINING_BATCH, (step + 1) * _TRAINING_BATCH))
        _loss(model(ids[:, :-1]), ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def _loss(output: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = output.logits.flatten(0, 1).float()
    return F.cross_entropy(logits, ids[:, 1:].flatten()) + output.balance_loss.mean()


def _gradient(model: nn.Module, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of one micro-batch, all parameters in a row, computed and returned in ``dtype``."""
    weights = {name: p.detach().to(dtype).requires_grad_() for name, p in model.named_parameters()}
    loss = _loss(torch.func.functional_call(model, weights, ids[:, :-1]), ids)
    found = torch.autograd.grad(loss, list(weights.values()))
    return torch.cat([gradient.flatten() for gradient in found])


def _ring(gradients: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add hop by hop, rounding to ``dtype`` after each; the hop itself computes in fp32, as NCCL does."""
    total = gradients[0].to(dtype)
    for part in gradients[1:]:
        total = (total.float() + part.to(dtype).float()).to(dtype)
    return total.float() / len(gradients)


def _exchange(gradients: torch.Tensor) -> torch.Tensor:
    """What the owner of a part does with the pieces an all-to-all brought."""
    return gradients.sum(0, dtype=torch.float32) / len(gradients)


def _two_level(gradients: torch.Tensor, ranks_per_node: int, between: torch.dtype) -> torch.Tensor:
    """The owner adds what its node's ranks have in fp32, rounds it once, and adds the nodes' sums in fp32."""
    nodes = [node.sum(0, dtype=torch.float32).to(between) for node in gradients.split(ranks_per_node)]
    return torch.stack(nodes).sum(0, dtype=torch.float32) / len(gradients)


METHODS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "fp32 reduce-scatter": lambda sent, _: _ring(sent, torch.float32),
    "bf16 reduce-scatter": lambda sent, _: _ring(sent, torch.bfloat16),
    "bf16 all-to-all, fp32 sum": lambda sent, _: _exchange(sent),
    "two-level, bf16 between": lambda sent, node: _two_level(sent, node, torch.bfloat16),
    "two-level, fp32 between": lambda sent, node: _two_level(sent, node, torch.float32),
}

COLUMNS = (*METHODS, "rounding to bf16", "bf16 autograd")
"""Everything a row may have an error for."""


def errors(gradients: Gradients, ranks_per_node: int) -> dict[str, float]:
    """Relative error of each method, emulated for any number of ranks, and of the rounding before it."""
    if len(gradients.sent) % ranks_per_node:
        raise ValueError(f"ranks: expected a multiple of {ranks_per_node}, got {len(gradients.sent)}")
    sent, exact = gradients.sent.double().mean(0), gradients.exact.double().mean(0)
    found = {name: _distance(way(gradients.sent, ranks_per_node), sent) for name, way in METHODS.items()}
    found["rounding to bf16"] = _distance(gradients.exact.bfloat16().double().mean(0), exact)
    return found


def autograd_error(gradients: Gradients) -> float:
    """What computing in bf16 changes: the distance of the mean of the bf16 gradients from the fp32 ones'."""
    return _distance(gradients.sent.double().mean(0), gradients.exact.double().mean(0))


def study(
    sizes: Sequence[int],
    ranks_per_node: int,
    noises: Sequence[float],
    after_steps: Sequence[int],
    gloo_ranks: int,
) -> list[dict[str, Any]]:
    """A row for each number of ranks with drawn gradients of each noise, and with real ones at each step."""
    rows: list[dict[str, Any]] = []
    for noise in noises:
        kind: dict[str, Any] = {"gradients": "drawn", "noise": noise}
        if gloo_ranks > 1:
            node = gloo_ranks // 2
            found = over_gloo(gloo_ranks, node, noise)
            rows.append({"ranks": gloo_ranks, "ranks_per_node": node, "over_gloo": True, **kind, **found})
        for ranks in sizes:
            found = errors(draw_gradients(ranks, _NUMEL, noise), ranks_per_node)
            rows.append({"ranks": ranks, "ranks_per_node": ranks_per_node, **kind, **found})
    for step, every in zip(after_steps, real_gradients(max(sizes), after_steps)):
        for ranks in sizes:
            own = every.of_first(ranks)
            kind = {"gradients": "real", "after_steps": step, "noise": own.noise}
            found = errors(own, ranks_per_node) | {"bf16 autograd": autograd_error(own)}
            rows.append({"ranks": ranks, "ranks_per_node": ranks_per_node, **kind, **found})
    return rows


def _distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


_OPTIONS: dict[str, dict[str, Any]] = {
    "fp32 reduce-scatter": {"reduction": "reduce_scatter"},
    "bf16 reduce-scatter": {"reduction": "reduce_scatter", "reduce_dtype": torch.bfloat16},
    "bf16 all-to-all, fp32 sum": {"reduction": "all_to_all"},
    "two-level, bf16 between": {"reduction": "two_level"},
    "two-level, fp32 between": {"reduction": "two_level", "internode_dtype": torch.float32},
}
"""How ``fully_shard`` is asked for each method."""


def over_gloo(ranks: int, ranks_per_node: int, noise: float, numel: int = _NUMEL) -> dict[str, float]:
    """Relative error of each method as ``fully_shard`` carries it out, one process per rank."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_rank, args=(rank, ranks, ranks_per_node, store.port, noise, numel, theirs))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        if not ours.poll(300):
            raise RuntimeError("over_gloo: the ranks did not answer within 300 s")
        return ours.recv()
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


class _Given(nn.Module):
    """A parameter whose gradient is what forward is given."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def _rank(rank: int, ranks: int, ranks_per_node: int, port: int, noise: float, numel: int, pipe: Any) -> None:
    from ragged_fsdp import MixedPrecisionPolicy, fully_shard

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    gradients = draw_gradients(ranks, numel, noise)
    found = {}
    for name, options in _OPTIONS.items():
        options = {"reduce_dtype": torch.float32, **options}
        policy = MixedPrecisionPolicy(torch.bfloat16, options.pop("reduce_dtype"))
        nodes = {"ranks_per_node": ranks_per_node if options["reduction"] == "two_level" else ranks}
        model = fully_shard(_Given(numel), mp_policy=policy, **nodes, **options)
        model(gradients.sent[rank]).backward()
        found[name] = _distance(model.weight.grad.full_tensor(), gradients.sent.double().mean(0))
    if rank == 0:
        pipe.send(found)
    dist.destroy_process_group()
