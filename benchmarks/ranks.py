"""How a benchmark's own processes become ranks; several may share one GPU."""

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["join_ranks"]


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
