"""How a benchmark's own processes become ranks; several may share one GPU."""

import argparse
import os
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.shared_device import shared_device

__all__ = ["join_ranks", "start_ranks"]

_HOST = "127.0.0.1"


def start_ranks(
    run_rank: Callable[[int, argparse.Namespace, int], None], arguments: argparse.Namespace
) -> None:
    """Run ``run_rank(rank, arguments, port)`` in ``arguments.ranks`` processes and wait for them."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # holds its port from now on
    shares = arguments.ranks > 1 and torch.device(arguments.device).type == "cuda"
    with shared_device() if shares else nullcontext({}) as environment:
        os.environ.update(environment)
        mp.spawn(run_rank, args=(arguments, store.port), nprocs=arguments.ranks)


def join_ranks(rank: int, arguments: argparse.Namespace, port: int) -> torch.device:
    """Join the process group of ``arguments.ranks`` processes; returns the device of this one."""
    # NCCL lets several ranks use one GPU only if they look like several hosts.
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = dist.TCPStore(_HOST, port, is_master=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=arguments.ranks, timeout=timedelta(minutes=5)
    )
    return device
