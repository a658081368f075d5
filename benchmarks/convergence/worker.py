"""What each rank of a convergence run does: its curves, one after the other; rank 0 writes them down."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from benchmarks.convergence.curves import Curve, train_curve
from benchmarks.convergence.runs import (
    LEARNING_RATES,
    MODELS,
    TINY_LEARNING_RATES,
    TINY_MODELS,
    Setting,
    centre_out,
)
from benchmarks.ranks import join_ranks

from ragged_fsdp.trainer.config import DataConfig
from ragged_fsdp.trainer.data import open_tokens

__all__ = ["run_rank"]

_THINNED = 10
"""A scan keeps means over so many steps."""


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """Train the curves of ``arguments.stage``: ``"scan"`` or ``"curves"``."""
    started = time.perf_counter()
    device = join_ranks(rank, arguments, port)
    torch.set_float32_matmul_precision("high")
    setting = Setting(
        models=TINY_MODELS if arguments.tiny else MODELS,
        learning_rates=TINY_LEARNING_RATES if arguments.tiny else LEARNING_RATES,
        seq_len=arguments.seq_len,
        batch=arguments.batch,
        steps=arguments.steps or (60 if arguments.tiny else 800),
    )
    if rank == 0:  # the others find the tokens cached
        open_tokens(DataConfig(seq_len=setting.seq_len))
    dist.barrier()
    tokens = open_tokens(DataConfig(seq_len=setting.seq_len))
    trained = 0
    for model in arguments.models:
        for optimizer in arguments.optimizers:
            path = arguments.out / arguments.stage / f"{model}-{optimizer}.json"
            done = _kept(path, setting, model)
            for curve in _wanted(arguments, setting, model, optimizer, done):
                if any(_same_run(curve, other) for other in done):
                    continue
                if not _in_time(started, trained, arguments.seconds, device):
                    break
                done.append(train_curve(curve, setting, tokens, device))
                trained += 1
                if rank == 0:
                    _report(done[-1])
                    done[-1].losses = _thinned(done[-1].losses, arguments.stage)
                    _write(path, done, setting, arguments, tokens.description)
    dist.destroy_process_group()


def _wanted(
    arguments: argparse.Namespace, setting: Setting, model: str, optimizer: str, done: list[Curve]
) -> Iterator[Curve]:
    if arguments.stage == "scan":
        return _scan(model, optimizer, setting.learning_rates[optimizer], arguments.seeds, done)
    return _curves(model, optimizer, arguments.seeds, arguments.shardings, arguments.out)


def _same_run(left: Curve, right: Curve) -> bool:
    return (left.sharding, left.lr, left.seed) == (right.sharding, right.lr, right.seed)


def _kept(path: Path, setting: Setting, model: str) -> list[Curve]:
    """Curves that an earlier run of the same setting left: they are not trained again."""
    if not path.exists():
        return []
    record = json.loads(path.read_text())
    same = record["setting"] == _recorded(setting) and record["model"] == asdict(setting.models[model])
    return [Curve(**curve) for curve in record["curves"]] if same else []


def _scan(
    model: str, optimizer: str, rates: Sequence[float], seeds: int, done: list[Curve]
) -> Iterator[Curve]:
    """Every learning rate with the first seed, then the best with the other seeds."""
    for lr in centre_out(rates):
        yield Curve(model, optimizer, "one process", lr)
    best = min(done, key=lambda curve: curve.evaluation)
    for seed in range(2, seeds + 1):
        yield Curve(model, optimizer, "one process", best.lr, seed)


def _curves(
    model: str, optimizer: str, seeds: int, shardings: Sequence[str], folder: Path
) -> Iterator[Curve]:
    """The curves on several ranks, at the best learning rate of the scan; a seed at a time."""
    scan = json.loads((folder / "scan" / f"{model}-{optimizer}.json").read_text())
    best = min(scan["curves"], key=lambda curve: curve["evaluation"])
    for seed in range(1, seeds + 1):
        for sharding in shardings:
            yield Curve(model, optimizer, sharding, best["lr"], seed)


def _in_time(started: float, done: int, seconds: float | None, device: torch.device) -> bool:
    """Whether one more curve ends within ``seconds``, judged by those before; alike on every rank."""
    if seconds is None or not done:
        return True
    elapsed = torch.tensor(time.perf_counter() - started, device=device)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item() * (done + 1) / done < seconds


def _report(curve: Curve) -> None:
    last = sum(curve.losses[-20:]) / len(curve.losses[-20:])
    print(
        f"{curve.model:6} {curve.name:24} lr {curve.lr:<7} seed {curve.seed}  loss {last:.4f}  "
        f"held out {curve.evaluation:.4f}  {curve.seconds_per_step * 1e3:.0f} ms/step",
        flush=True,
    )


def _write(
    path: Path, curves: list[Curve], setting: Setting, arguments: argparse.Namespace, data: str
) -> None:
    cuda = arguments.device == "cuda"
    shared = cuda and torch.cuda.device_count() < arguments.ranks
    record = {
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "ranks": f"{arguments.ranks}, {'NCCL' if cuda else 'gloo'}" + (", sharing one GPU" if shared else ""),
        "torch": torch.__version__,
        "data": f"{data}, library of Python {platform.python_version()}",
        "setting": _recorded(setting),
        "model": asdict(setting.models[curves[0].model]),
        "curves": [asdict(curve) for curve in curves],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")


def _recorded(setting: Setting) -> dict[str, int]:
    return {key: value for key, value in asdict(setting).items() if isinstance(value, int)}


def _thinned(losses: list[float], stage: str) -> list[float]:
    if stage != "scan":
        return losses
    parts = [losses[start : start + _THINNED] for start in range(0, len(losses), _THINNED)]
    return [round(sum(part) / len(part), 5) for part in parts]
