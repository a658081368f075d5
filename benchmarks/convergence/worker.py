"""What each rank of a convergence run does: all curves, one after the other; rank 0 writes them down."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict, replace

import torch
import torch.distributed as dist
from benchmarks.convergence.curves import MODELS, TINY_MODELS, Curve, Setting, train_curve
from benchmarks.ranks import join_ranks

from ragged_fsdp.trainer.batches import Batches
from ragged_fsdp.trainer.config import DataConfig
from ragged_fsdp.trainer.data import open_tokens

RUNS = [
    ("adamw", "ragged_fsdp"),
    ("adamw8bit", "ddp"),
    ("adamw8bit", "ragged_fsdp"),
    ("muon", "ddp"),
    ("muon", "ragged_fsdp"),
]


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    device = join_ranks(rank, arguments, port)
    setting = Setting(
        models=TINY_MODELS if arguments.tiny else MODELS,
        seq_len=arguments.seq_len,
        batch=arguments.batch,
        steps=arguments.steps or (60 if arguments.tiny else 600),
        lr=arguments.lr,
        muon_lr=arguments.muon_lr,
        warmup=20,
    )
    if rank == 0:  # the others find the tokens cached
        open_tokens(DataConfig(seq_len=setting.seq_len))
    dist.barrier()
    tokens = open_tokens(DataConfig(seq_len=setting.seq_len))
    train, held_out = (Batches(part, setting.seq_len, 1) for part in (tokens.train, tokens.evaluation))
    if arguments.seconds:
        setting = replace(setting, steps=_affordable(arguments, setting, train, held_out, device))
    curves = []
    for model in arguments.models:
        for optimizer, sharding in RUNS:
            curve = train_curve(Curve(model, optimizer, sharding), setting, train, held_out, device)
            curves.append(curve)
            if rank == 0:
                last = sum(curve.losses[-20:]) / len(curve.losses[-20:])
                took = curve.seconds_per_step * 1e3
                print(f"{model:6} {curve.name:24} loss {last:.4f}  {took:.0f} ms/step", flush=True)
                _write(curves, setting, arguments, device, tokens.description)
    dist.destroy_process_group()


def _affordable(
    arguments: argparse.Namespace, setting: Setting, train: Batches, held_out: Batches, device: torch.device
) -> int:
    """Steps per curve for a run of ``--seconds``, from a few steps of two kinds, the same on every rank."""
    trial = replace(setting, steps=10)
    kinds = (RUNS[0], RUNS[-1])
    total = 0.0
    for optimizer, sharding in kinds:
        curve = Curve(arguments.models[-1], optimizer, sharding)
        total += train_curve(curve, trial, train, held_out, device).seconds_per_step
    per_step = torch.tensor(total / len(kinds), dtype=torch.float64, device=device)
    dist.all_reduce(per_step, op=dist.ReduceOp.MAX)
    curves = len(RUNS) * len(arguments.models)
    return max(20, min(setting.steps, int(arguments.seconds / (per_step.item() * curves))))


def _write(
    curves: list[Curve], setting: Setting, arguments: argparse.Namespace, device: torch.device, data: str
) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    shared = device.type == "cuda" and torch.cuda.device_count() < arguments.ranks
    record = {
        "hardware": name,
        "ranks": f"{arguments.ranks}, {'NCCL' if device.type == 'cuda' else 'gloo'}"
        + (", sharing one GPU" if shared else ""),
        "torch": torch.__version__,
        "data": data,
        "setting": asdict(setting),
        "curves": [asdict(curve) for curve in curves],
    }
    (arguments.out / "convergence.json").write_text(json.dumps(record) + "\n")
