"""Throughput of 8-bit Adam with everything on, without the buffer, and without the planner.

    python -m benchmarks.ablation --out benchmarks/ablation/results

Trains a GPT-OSS-like mixture of experts on random tokens, sharded over several processes; variants take turns
round by round. With CUDA the ranks use NCCL, and share a GPU where there are fewer GPUs than ranks. With
``--wire`` or ``--network`` this process is rank 0 of ``--ranks``, and the network to the others is modelled
(``ragged_fsdp.predict.network``):

    python -m benchmarks.ablation --out benchmarks/ablation/results --ranks 32 --wire 400 --seq-len 1024
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from benchmarks.ablation.worker import SIZES, run_rank
from benchmarks.ranks import start_ranks

from ragged_fsdp.predict.network import PROFILES


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each variant (default 15)")
    parser.add_argument(
        "--size", choices=list(SIZES), default="gpt-oss" if cuda else "small", help="the model"
    )
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--seq-len", type=int, default=256, help="tokens per sequence")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--wire", type=float, help="model the other ranks: GB/s of one NVLink domain, 0 for a free one"
    )
    parser.add_argument(
        "--network", choices=list(PROFILES), help="model the other ranks: a network with nodes"
    )
    arguments = parser.parse_args()
    if arguments.ranks < 1 or (arguments.wire is not None and arguments.wire < 0):
        parser.error("--ranks must be positive, --wire not negative")
    if arguments.network is not None:
        arguments.wire = arguments.network
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.wire is not None:
        run_rank(0, arguments, port=0)
        return
    start_ranks(run_rank, arguments)


if __name__ == "__main__":
    main()
