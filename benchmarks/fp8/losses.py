"""Losses of FP8 products beside those of bf16 and fp32: dense and experts, three seeds, on several ranks.

    PYTHONPATH=src:. python benchmarks/fp8/losses.py --backend nccl --out benchmarks/fp8/losses-nccl.json
    PYTHONPATH=src:. python benchmarks/fp8/losses.py --backend gloo --out benchmarks/fp8/losses-gloo.json

Each run is one of ``ragged-fsdp train`` on the text of the Python standard library, bf16 with fp32 sums; runs
of a seed have the same first weights and the same batches. ``gloo`` is small models on CPU ranks, whose FP8
products are the exact emulation; ``nccl`` is larger ones on ranks that share the GPU where there are fewer
GPUs than ranks. A row has the mean training loss of the last tenth of the steps and the held-out loss, of
each seed, and ``fp8_over_bf16``, the ratio of the means over the seeds; ``bf16_over_fp32`` says how far
another rounding alone drives runs apart. The file is written after every run; runs that it has are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.ranks import join_ranks, start_ranks
from benchmarks.saving import save

from ragged_fsdp.trainer.config_file import from_values
from ragged_fsdp.trainer.job import TrainingJob
from ragged_fsdp.trainer.metrics import losses_by_step
from ragged_fsdp.trainer.stop import StopRequest

SMALL = {"seq_len": 128, "batch": 8, "steps": 100, "lr": 1e-3, "warmup": 10, "eval_sequences": 96}
LARGE = {"seq_len": 256, "batch": 64, "steps": 300, "lr": 1e-3, "warmup": 20, "eval_sequences": 256}
SETTINGS = {"gloo": SMALL, "nccl": LARGE}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "gloo": {
        "dense": {
            "model": "LlamaConfig",
            "model_set": {
                "hidden_size": "128",
                "num_hidden_layers": "2",
                "num_attention_heads": "2",
                "num_key_value_heads": "2",
                "intermediate_size": "384",
                "vocab_size": "257",
            },
        },
        "moe": {
            "model": "demo",
            "model_set": {"layers": "2", "heads": "2", "kv_heads": "2", "experts": "4"},
        },
    },
    "nccl": {
        "dense": {
            "model": "LlamaConfig",
            "model_set": {
                "hidden_size": "512",
                "num_hidden_layers": "6",
                "num_attention_heads": "8",
                "num_key_value_heads": "4",
                "intermediate_size": "1536",
                "vocab_size": "257",
            },
        },
        "moe": {
            "model": "demo",
            "model_set": {"hidden": "512", "heads": "8", "kv_heads": "4", "expert_hidden": "512"},
        },
    },
}
PRODUCTS = ("bf16", "fp8", "fp32")
TILES = {"*_proj*": "tiles:128x128"}


def run_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """All runs that the file does not have yet, one after the other; rank 0 writes it."""
    device = join_ranks(rank, arguments, port)
    head = _head(arguments)
    rows = _kept(arguments.out, head)
    dist.barrier()  # all have read the file
    for model in arguments.models:
        row = rows.setdefault(model, {})
        for seed in range(1, arguments.seeds + 1):
            for products in arguments.products:
                found = row.setdefault(products, {"last_tenth": [], "held_out": []})
                if len(found["held_out"]) >= seed:
                    continue
                losses = _run(arguments, model, products, seed, head["setting"], device)
                for name, loss in losses.items():
                    found[name].append(loss)
                if rank == 0:
                    print(model, "seed", seed, products, losses, flush=True)
                    _write(arguments, head, rows)
    dist.destroy_process_group()


def _head(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all runs of a file have in common."""
    cuda = arguments.device == "cuda"
    shared = cuda and torch.cuda.device_count() < arguments.ranks
    return {
        "ranks": f"{arguments.ranks}, {arguments.backend}" + (", sharing GPUs" if shared else ""),
        "fp8_products": "Hopper's kernels" if cuda else "exact emulation",
        "stored": "tiles of 128 x 128" if arguments.tiles else "bands of 128 rows",
        "setting": SETTINGS[arguments.backend] | ({"steps": arguments.steps} if arguments.steps else {}),
        "models": MODELS[arguments.backend],
    }


def _kept(out: Path, head: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The losses that an earlier call left, if all else was the same."""
    found = json.loads(out.read_text()) if out.is_file() else {}
    return found["losses"] if all(found.get(key) == value for key, value in head.items()) else {}


def _run(
    arguments: argparse.Namespace,
    model: str,
    products: str,
    seed: int,
    setting: dict[str, Any],
    device: torch.device,
) -> dict[str, float]:
    """Train once; the mean loss of the last tenth of the steps, and the held-out loss."""
    folder = Path(arguments.folder) / f"{model}-{products}-{seed}"
    steps = setting["steps"]
    settings = {
        **setting,
        **MODELS[arguments.backend][model],
        "run_dir": str(folder),
        "seed": seed,
        "data": ["stdlib"],
        "optimizer": "adamw",
        "precision": "fp32" if products == "fp32" else "bf16",
        "fp8": products == "fp8",
        "granularity": TILES if products == "fp8" and arguments.tiles else {},
        "device": device.type,
        "eval_every": steps,
        "save_at_end": False,
        "checkpoint_every": 0,
        "tensorboard": False,
        "log_every": steps,
    }
    config = from_values(settings)
    TrainingJob(config, device, StopRequest(0.0)).run()
    dist.barrier()  # what rank 0 wrote is there for all
    losses = losses_by_step(folder)
    last = [losses[step] for step in range(steps - max(1, steps // 10) + 1, steps + 1)]
    return {"last_tenth": round(statistics.mean(last), 5), "held_out": losses_by_step(folder, "eval")[steps]}


def _write(arguments: argparse.Namespace, head: dict[str, Any], rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        for one, other in (("fp8", "bf16"), ("bf16", "fp32")):
            if count := min(len(row.get(name, {}).get("held_out", ())) for name in (one, other)):
                row[f"{one}_over_{other}"] = {
                    kind: round(sum(row[one][kind][:count]) / sum(row[other][kind][:count]), 5)
                    for kind in ("last_tenth", "held_out")
                }
    save(arguments.out, device=None if arguments.device == "cuda" else "CPU", **head, losses=rows)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of results (JSON)")
    parser.add_argument("--backend", choices=tuple(SETTINGS), required=True, help="gloo: CPU; nccl: GPUs")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--steps", type=int, help="optimizer steps (default 100, nccl 300)")
    parser.add_argument("--models", nargs="*", choices=("dense", "moe"), default=["dense", "moe"])
    parser.add_argument("--products", nargs="*", choices=PRODUCTS, default=list(PRODUCTS), help="which runs")
    parser.add_argument("--tiles", action="store_true", help="store FP8 weights in tiles of 128 x 128")
    options = parser.parse_args()
    options.device = "cuda" if options.backend == "nccl" else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        start_ranks(run_rank, options)


if __name__ == "__main__":
    main()
