"""How a benchmark's own processes become ranks; several may share one GPU."""

import argparse
import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.shared_device import shared_device

__all__ = ["join_ranks", "start_ranks"]


def start_ranks(
    run_rank: Callable[[int, argparse.Namespace, int], None], arguments: argparse.Namespace
) -> None:
    """Run ``run_rank(rank, arguments, port)`` in ``arguments.ranks`` processes and wait for them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shares = arguments.ranks > 1 and torch.device(arguments.device).type == "cuda"
    with shared_device() if shares else nullcontext({}) as environment:
        os.environ.update(environment)
        mp.spawn(run_rank, args=(arguments, port), nprocs=arguments.ranks)


def join_ranks(rank: int, arguments: argparse.Namespace, port: int) -> torch.device:
    """Join the process group of ``arguments.ranks`` processes; returns the device of this one."""
    # NCCL lets several ranks use one GPU only if they look like several hosts.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_HOSTID=f"rank{rank}")
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=arguments.ranks, timeout=timedelta(minutes=5))
    return device
