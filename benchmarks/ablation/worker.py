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
from benchmarks.ablation.components import CopyingGather, RedistributingAdamW8bit
from benchmarks.ranks import join_ranks

from ragged_fsdp import MixedPrecisionPolicy, fully_shard
from ragged_fsdp.models import MoEConfig, MoETransformer
from ragged_fsdp.models.materialize import materialize
from ragged_fsdp.optim import AdamW8bit, block_policy
from ragged_fsdp.predict.network import network_of, wire_text

__all__ = ["SIZES", "VARIANTS", "run_rank", "training"]

VARIANTS = (
    "all on",
    "without DBuffer",
    "without planner, all-to-all",
    "without planner, gather",
)
SIZES = {
    "small": MoEConfig(hidden=256, layers=4, heads=4, kv_heads=2, experts=8, expert_hidden=256),
    "gpt-oss": MoEConfig(
        hidden=2880, layers=4, heads=45, kv_heads=9, experts=32, experts_per_token=4, expert_hidden=2880
    ),
}


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Measure the variants in turn, round by round; rank 0 writes the table."""
    device = _joined(rank, arguments, port)
    config = SIZES[arguments.size]
    steps = {variant: training(variant, config, arguments, device)[1] for variant in VARIANTS}
    losses = {variant: [step() for _ in range(3)] for variant, step in steps.items()}
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.rounds):
        for variant, step in steps.items():
            times[variant].append(_timed(step, device))
    medians = {variant: statistics.median(values) for variant, values in times.items()}
    if rank == 0:
        _write(medians, losses, arguments, device)
    dist.destroy_process_group()


def _joined(rank: int, arguments: argparse.Namespace, port: int) -> torch.device:
    if arguments.wire is None:
        return join_ranks(rank, arguments, port)
    from benchmarks.step.wire import Wire, join

    join(arguments.ranks, Wire(network_of(arguments.wire or None)))
    return torch.device(arguments.device)


def training(
    variant: str, config: MoEConfig, arguments: argparse.Namespace, device: torch.device
) -> tuple[MoETransformer, Callable[[], float]]:
    """A variant's model, and one training step of it, which returns its loss."""
    model = _model(variant, config, device)
    named: list[Any] = list(model.named_parameters())
    optimizer: Any
    if "planner" in variant:
        optimizer = RedistributingAdamW8bit(named, through_full="gather" in variant, lr=1e-3)
    else:
        optimizer = AdamW8bit(named, lr=1e-3)
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

    return model, step


def _model(variant: str, config: MoEConfig, device: torch.device) -> MoETransformer:
    with torch.device("meta"):
        model, twin = MoETransformer(config), MoETransformer(config)
    dtype = torch.bfloat16 if device.type == "cuda" else None
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    }
    if "planner" not in variant:
        options["orig_param_policy"] = block_policy()
    for module in [*model.layers, model]:
        fully_shard(module, **options)
        if variant == "without DBuffer":
            module.set_custom_all_gather(CopyingGather())
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
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU"
    ranks = f"{arguments.ranks} {'NCCL' if cuda else 'gloo'} ranks"
    if arguments.wire is not None:
        network = network_of(arguments.wire or None).text
        ranks = f"rank 0 of {arguments.ranks}, the others modelled, network {network}"
    tokens = arguments.batch * arguments.seq_len
    head = (
        f"{name}, {ranks}, torch {torch.__version__}; model `{arguments.size}`, {tokens} tokens per rank and "
        f"step, medians of {arguments.rounds}."
    )
    lines = [
        head,
        "",
        "| component | ms/step | normalised throughput | loss of the third step |",
        "|---|---|---|---|",
    ]
    for variant, seconds in medians.items():
        share = medians["all on"] / seconds
        loss = f"{losses[variant][-1]:.4f}" if arguments.wire is None else "-"
        lines.append(f"| {variant} | {seconds * 1e3:.1f} | {share:.1%} | {loss} |")
    lines.append("| without RaggedShard | - | not runnable: no placement describes the shards | - |")
    lines += ["", "Without DBuffer: gathered weights are copied once, on the compute stream."]
    stem = f"ablation-{arguments.size}-{device.type}"
    if arguments.wire is not None:
        stem += f"-{arguments.ranks}-{wire_text(arguments.wire)}"
    folder: Path = arguments.out
    (folder / f"{stem}.md").write_text("\n".join(lines) + "\n")
    record = {"head": head, "seconds": medians, "losses": losses}
    (folder / f"{stem}.json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines), flush=True)
