"""Train all curves and write ``convergence.svg``, ``convergence.md`` and the losses as JSON.

    python -m benchmarks.convergence --out benchmarks/convergence/results/h200

Trains a small dense and a small mixture-of-experts transformer on the text of the Python standard library
(bytes as tokens) with AdamW, with 8-bit AdamW and with Muon: first a scan of six learning rates for each, on
one process; then, at the best rate of each, curves on several ranks under DDP and under ``fully_shard``;
then the report. Ranks are processes; with CUDA they use NCCL, and share a GPU where there are fewer GPUs than
ranks. Each model and optimizer has its own file, so parts (``--stage``, ``--models``, ``--optimizers``,
``--shardings``) can run side by side, and curves that are there already are kept. ``--tiny`` takes some
minutes on a laptop.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from benchmarks.convergence.report import write_report
from benchmarks.convergence.runs import LEARNING_RATES, MODELS, SHARDINGS
from benchmarks.convergence.worker import run_rank
from benchmarks.ranks import start_ranks


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--stage", choices=("all", "scan", "curves", "report"), default="all", help="a part of the work"
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes of the curves (default 2)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each best learning rate (default 3)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each curve (default 800, --tiny 60)")
    parser.add_argument("--seconds", type=float, help="start no curve that would end later than this")
    parser.add_argument("--batch", type=int, default=32, help="sequences per step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=256, help="bytes per sequence")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--optimizers", nargs="*", choices=list(LEARNING_RATES), default=list(LEARNING_RATES))
    parser.add_argument("--shardings", nargs="*", choices=SHARDINGS, default=SHARDINGS)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--tiny", action="store_true", help="models of 100 thousand parameters, 60 steps")
    return parser.parse_args()


def main() -> None:
    """Run the stages asked for; ranks are started anew for each."""
    arguments = _arguments()
    stages = ("scan", "curves", "report") if arguments.stage == "all" else (arguments.stage,)
    for stage in stages:
        if stage == "report":
            write_report(arguments.out)
        else:
            ranks = 1 if stage == "scan" else arguments.ranks
            _train(argparse.Namespace(**{**vars(arguments), "stage": stage, "ranks": ranks}))


def _train(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    start_ranks(run_rank, arguments)


if __name__ == "__main__":
    main()
