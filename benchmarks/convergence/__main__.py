"""Train all curves and write ``convergence.json``, ``convergence.svg`` and ``convergence.md``.

    python -m benchmarks.convergence --out benchmarks/convergence/results

Trains a small dense and a small mixture-of-experts transformer on the text of the Python standard library
(bytes as tokens, in fp32) with AdamW, with 8-bit AdamW and with Muon; the last two under DDP and under
``fully_shard``. Ranks are processes; with CUDA they use NCCL, and share a GPU where there are fewer GPUs than
ranks. ``--tiny`` is a run of a minute on a laptop.
"""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

import torch
import torch.multiprocessing as mp
from benchmarks.convergence.curves import MODELS
from benchmarks.convergence.plot import write_report
from benchmarks.convergence.worker import run_rank


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--steps", type=int, help="optimizer steps of each curve (default 600, --tiny 60)")
    parser.add_argument(
        "--seconds", type=float, help="shorten all curves so that the whole run takes about this long"
    )
    parser.add_argument("--batch", type=int, default=64, help="sequences per step, over all ranks")
    parser.add_argument("--seq-len", type=int, default=256, help="bytes per sequence")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--muon-lr", type=float, default=2e-2, help="peak learning rate of Muon")
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--no-figure", action="store_true", help="write convergence.json only")
    parser.add_argument("--redraw", action="store_true", help="do not train: draw --out's convergence.json")
    parser.add_argument("--tiny", action="store_true", help="models of 100 thousand parameters, 60 steps")
    return parser.parse_args()


def main() -> None:
    """Start the ranks, of which rank 0 writes the losses; then draw them."""
    arguments = _arguments()
    if not arguments.redraw:
        _train(arguments)
    if not arguments.no_figure:
        write_report(arguments.out)


def _train(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(run_rank, args=(arguments, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
