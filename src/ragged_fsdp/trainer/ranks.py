"""Which rank this process is, its device, and the process groups it talks over."""

import os
import random
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ragged_fsdp.trainer.config import ShardingConfig

__all__ = ["Ranks", "join", "leave", "rank_variables", "seed_everything"]


@dataclass(frozen=True)
class Ranks:
    """The process's place in the run."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    """Over (replica, shard) for HSDP, over ``shard`` alone otherwise."""
    control: dist.ProcessGroup
    """A gloo group for small agreements on the host, so that asking never waits for a device."""


def rank_variables() -> dict[str, str] | None:
    """RANK, LOCAL_RANK, WORLD_SIZE and the meeting point as torchrun or SLURM gave them, or None."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        return {
            k: env[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if k in env
        }
    if int(env.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in env:
        return {
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": env["SLURM_NTASKS"],
            "LOCAL_RANK": env.get("SLURM_LOCALID", "0"),
            "MASTER_ADDR": env.get("MASTER_ADDR", _first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1"))),
            "MASTER_PORT": env.get("MASTER_PORT", str(20_000 + int(env.get("SLURM_JOB_ID", "0")) % 20_000)),
        }
    return None


def _first_host(nodelist: str) -> str:
    """The first host of a SLURM list: ``gpu[07-09,12],login1`` is ``gpu07``."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return head.partition(",")[0]
    return head + rest.partition("]")[0].partition(",")[0].partition("-")[0]


def join(config: ShardingConfig) -> Ranks:
    """Join the process group that the environment describes, and lay the mesh over it."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) > torch.cuda.device_count():
            os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")  # NCCL lets only "hosts" share a device
    else:
        device = torch.device("cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timeout = timedelta(seconds=config.timeout)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
    sizes = {"replica": config.replicas, "shard": world // config.replicas}
    dims = sizes if config.replicas > 1 else {"shard": world}
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    control = dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(rank, world, device, mesh, control)


def leave() -> None:
    """Leave the process group, once all ranks are done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(seed: int, rank: int) -> None:
    """Dropout and the like: one stream per rank. Initial weights and data have their own seeds."""
    torch.manual_seed(seed * 1_000_003 + rank)
    np.random.seed((seed * 1_000_003 + rank) % 2**32)
    random.seed(seed * 1_000_003 + rank)
