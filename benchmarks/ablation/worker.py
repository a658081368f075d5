"""What each rank of the ablation does: the same training steps, with every component and without one."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.ablation.components import CopyingGather, CopyingReduce, RedistributingAdamW8bit
from benchmarks.ranks import join_ranks

from ragged_fsdp import MixedPrecisionPolicy, fully_shard
from ragged_fsdp.models import MoEConfig, MoETransformer
from ragged_fsdp.models.materialize import materialize
from ragged_fsdp.optim import AdamW8bit, block_policy

__all__ = ["run_rank"]

VARIANTS = ("all on", "without DBuffer", "without planner")
SIZES = {
    "small": MoEConfig(hidden=256, layers=4, heads=4, kv_heads=2, experts=8, expert_hidden=256),
    "gpt-oss": MoEConfig(
        hidden=1440, layers=6, heads=18, kv_heads=6, experts=16, experts_per_token=4, expert_hidden=1440
    ),
}


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Measure the variants in turn, round by round; rank 0 writes the table."""
    device = join_ranks(rank, arguments, port)
    config = SIZES[arguments.size]
    steps = {variant: _training_step(variant, config, arguments, device) for variant in VARIANTS}
    losses = {variant: [step() for _ in range(3)] for variant, step in steps.items()}
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.rounds):
        for variant, step in steps.items():
            times[variant].append(_timed(step, device))
    medians = {variant: statistics.median(values) for variant, values in times.items()}
    if rank == 0:
        _write(medians, losses, arguments, device)
    dist.destroy_process_group()


def _training_step(
    variant: str, config: MoEConfig, arguments: argparse.Namespace, device: torch.device
) -> Callable[[], float]:
    model = _model(variant, config, device)
    named: list[Any] = list(model.named_parameters())
    make: Any = RedistributingAdamW8bit if variant == "without planner" else AdamW8bit
    optimizer = make(named, lr=1e-3)
    shape = (arguments.batch, arguments.seq_len + 1)
    tokens = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(dist.get_rank()))
    tokens = tokens.to(device)

    def step() -> float:
        output = model(tokens[:, :-1])
        loss = F.cross_entropy(output.logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _model(variant: str, config: MoEConfig, device: torch.device) -> MoETransformer:
    with torch.device("meta"):
        model, twin = MoETransformer(config), MoETransformer(config)
    dtype = torch.bfloat16 if device.type == "cuda" else None
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    }
    if variant != "without planner":
        options["orig_param_policy"] = block_policy()
    in_layers = sum(1 for layer in model.layers for _ in layer.parameters())
    for module in [*model.layers, model]:
        tensors = sum(1 for _ in module.parameters()) - (in_layers if module is model else 0)
        fully_shard(module, **options)
        if variant == "without DBuffer":
            module.set_custom_all_gather(CopyingGather(tensors))
            module.set_custom_reduce_scatter(CopyingReduce(tensors))
    materialize(model, twin, twin.init_module, seed=0, device=device)
    return model


def _timed(step: Callable[[], float], device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _write(
    medians: dict[str, float],
    losses: dict[str, list[float]],
    arguments: argparse.Namespace,
    device: torch.device,
) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    backend = "NCCL" if device.type == "cuda" else "gloo"
    tokens = arguments.batch * arguments.seq_len * arguments.ranks
    head = (
        f"{name}, {arguments.ranks} {backend} ranks, torch {torch.__version__}; model `{arguments.size}`, "
        f"{tokens} tokens per step, medians of {arguments.rounds}."
    )
    lines = [
        head,
        "",
        "| component | ms/step | normalised throughput | loss of the third step |",
        "|---|---|---|---|",
    ]
    for variant, seconds in medians.items():
        share = medians["all on"] / seconds
        lines.append(f"| {variant} | {seconds * 1e3:.1f} | {share:.1%} | {losses[variant][-1]:.4f} |")
    lines.append("| without RaggedShard | - | not runnable: no placement describes the shards | - |")
    folder: Path = arguments.out
    (folder / f"ablation-{arguments.size}-{device.type}.md").write_text("\n".join(lines) + "\n")
    record = {"head": head, "seconds": medians, "losses": losses}
    (folder / f"ablation-{arguments.size}-{device.type}.json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines), flush=True)
