"""Which rank this process is, its device, and the process groups it talks over."""

import math
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ragged_fsdp.agreement import compare, done_alike
from ragged_fsdp.checkpoint.place import is_url
from ragged_fsdp.models.source import ModelSource
from ragged_fsdp.trainer.config import RESUME_MODES, TrainConfig
from ragged_fsdp.trainer.config_check import check, check_device
from ragged_fsdp.trainer.config_file import ConfigError

__all__ = [
    "LAUNCHER_STORE",
    "Ranks",
    "SplitMesh",
    "allocator_variables",
    "has_agent",
    "join",
    "lay_out",
    "leave",
    "on_every_rank",
    "on_first_rank",
    "rank_variables",
    "recorder_variables",
    "seed_everything",
]

T = TypeVar("T")

LAUNCHER_STORE = "RAGGED_FSDP_LAUNCHER_STORE"
"""Set for processes of our launcher: it holds the store under which they meet, as torchrun's agent does."""


@dataclass(frozen=True)
class Ranks:
    """The process's place in the run."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    """The mesh over all ranks that FSDP uses: (replica, shard) for HSDP, ``shard`` alone otherwise."""
    tp: "SplitMesh | None"
    """A mesh over all ranks with a dim for tensor parallelism; None without it."""
    ep: "SplitMesh | None"
    """A mesh over all ranks with a dim for expert parallelism; None without it."""
    control: dist.ProcessGroup
    """A gloo group for small agreements on the host, so that asking never waits for a device."""

    @property
    def data_parts(self) -> int:
        """Into how many parts a batch is cut: tensor-parallel ranks share theirs."""
        return self.world_size // self._sharing

    @property
    def data_index(self) -> int:
        """Which of the ``data_parts`` of a batch this rank reads."""
        return self.rank // self._sharing

    @property
    def mesh_text(self) -> str:
        """``replica 2 x shard 2 x tp 2``, for each way of splitting; empty where there is one dim alone."""
        meshes = [[*_dims(split.outer), *_dims(split.inner)] for split in self.splits] or [_dims(self.mesh)]
        return " and ".join(
            " x ".join(f"{name} {size}" for name, size in dims) for dims in meshes if len(dims) > 1
        )

    @property
    def splits(self) -> list["SplitMesh"]:
        """The meshes of tensor and expert parallelism, as far as there are any."""
        return [split for split in (self.tp, self.ep) if split is not None]

    @property
    def _sharing(self) -> int:
        return self.tp.inner.size() if self.tp is not None else 1


@dataclass(frozen=True)
class SplitMesh:
    """All ranks as (replica,) shard, tp or (replica,) shard, ep. The last dim has neighbouring ranks, unless
    the group of ep lies across nodes: then those of the shard dim are neighbours."""

    name: str
    """``tp`` or ``ep``."""
    inner: DeviceMesh
    """The last dim: the ranks that a layer is split over."""
    outer: DeviceMesh
    """The dims before it: FSDP shards over them what each rank holds after the split."""


def allocator_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What to set before CUDA is used: segments that can grow waste less memory. A user's setting wins."""
    if any(name in env for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def recorder_variables(env: Mapping[str, str], run_dir: str) -> dict[str, str]:
    """What to set before NCCL is used, unless the user has: when a collective times out torch writes the
    last ones of each rank into the run's folder. It waits four times the time of a dump before it ends the
    process, a minute if nobody says less."""
    ours = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(Path(run_dir).absolute() / "hangs" / "nccl-rank-"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2500",
    }
    older = {
        "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    }
    return {name: value for name, value in ours.items() if not {name, older.get(name, name)} & env.keys()}


def has_agent() -> bool:
    """Whether torchrun's elastic agent started this process, and would start it again."""
    return "TORCHELASTIC_RUN_ID" in os.environ


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
            "LOCAL_WORLD_SIZE": str(_tasks_here(env)),
            "MASTER_ADDR": env.get("MASTER_ADDR", _first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1"))),
            "MASTER_PORT": env.get("MASTER_PORT", str(20_000 + int(env.get("SLURM_JOB_ID", "0")) % 20_000)),
        }
    return None


def _tasks_here(env: Mapping[str, str]) -> int:
    """Tasks of the SLURM step on this node: the third of ``8(x2),4`` has 4. Where it is not said, all."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", env["SLURM_NTASKS"]))
    counts: list[int] = []
    for part in text.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return counts[int(env.get("SLURM_NODEID", "0"))]


def _first_host(nodelist: str) -> str:
    """The first host of a SLURM list: ``gpu[07-09,12]-ib,login1`` is ``gpu07-ib``."""
    first = re.match(r"([^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[(\w*)[^\]]*\]", r"\1", first.group() if first else "")


def join(config: TrainConfig) -> torch.device:
    """Join the process group that the environment describes; returns this rank's device."""
    sharding = config.sharding
    check_device(sharding)  # alone: which backends there are to meet over depends on it
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = sharding.device == "cuda" or (sharding.device == "auto" and torch.cuda.is_available())
    if cuda:
        os.environ.update(allocator_variables(os.environ))
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        if int(os.environ.get("LOCAL_WORLD_SIZE", world)) > torch.cuda.device_count():
            os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")  # NCCL lets only "hosts" share a device
    else:
        device = torch.device("cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    timeout = timedelta(seconds=sharding.timeout)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if LAUNCHER_STORE in os.environ:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, world, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    return device


def lay_out(config: TrainConfig, device: torch.device) -> tuple[Ranks, ModelSource]:
    """The meshes of a run over the process group that there is, and its model.

    Refuses, on all ranks, settings that are not the same everywhere and what :func:`check` refuses on one: a
    node may lack a folder, and the others would wait for its ranks until the time-out.
    """
    rank, world, sharding = dist.get_rank(), dist.get_world_size(), config.sharding
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=sharding.timeout))
    _refuse_other_settings(config, device, control)  # first: meshes of other sizes wait for each other
    source = on_every_rank("start", lambda: check(config, world, rank), control)
    replicas = {"replica": sharding.replicas} if sharding.replicas > 1 else {}
    mesh = _mesh(device, {**replicas, "shard": world // sharding.replicas})
    splits: dict[str, SplitMesh | None] = {"tp": None, "ep": None}
    for name, size in (("tp", sharding.tp), ("ep", sharding.ep)):
        if size > 1:
            names = (*replicas, "shard")
            sizes = {**replicas, "shard": world // sharding.replicas // size, name: size}
            near = sharding.tp if name == "ep" and sharding.ep_across_nodes else size
            root = _mesh(device, sizes, near)
            splits[name] = SplitMesh(name, root[name], root[names] if replicas else root["shard"])
    return Ranks(rank, world, device, mesh, splits["tp"], splits["ep"], control), source


def _refuse_other_settings(config: TrainConfig, device: torch.device, group: dist.ProcessGroup) -> None:
    """Nodes are started by a command each: one with another learning rate would train all the same."""
    values = {**_of_all_ranks(config), "device": device.type}
    lines = [f"torch {torch.__version__}", *(f"{name} = {value!r}" for name, value in values.items())]
    found = compare("\n".join(lines), [group], torch.device("cpu"))
    if found is not None:
        raise ConfigError(f"the ranks were not started alike: {found.difference}")


def _of_all_ranks(config: TrainConfig) -> dict[str, Any]:
    """The settings that every rank must have alike; what is logged is rank 0's own matter.

    A folder may have another path on each node, a URL is the same everywhere.
    """
    sections = [getattr(config, f.name) for f in fields(config) if f.name != "log"]
    alike = {
        f.name: getattr(section, f.name)
        for section in sections
        for f in fields(section)
        if not f.metadata["per_node"]
    }
    for name, text in (("resume", config.run.resume), ("checkpoint_dir", config.checkpoint.checkpoint_dir)):
        alike[name] = text if text in ("", *RESUME_MODES) or is_url(text) else "a folder"
    return alike


def _dims(mesh: DeviceMesh) -> list[tuple[str, int]]:
    return list(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _mesh(device: torch.device, sizes: dict[str, int], near: int | None = None) -> DeviceMesh:
    """All ranks in order. With ``near`` only so many of the last dim are neighbours, and those of the dim
    before it come next: ``shard 2, ep 4`` with ``near`` 1 has the groups 0 2 4 6 and 1 3 5 7 of ep."""
    shape = tuple(sizes.values())
    shard, last = (1, *shape)[-2:]
    near = near or last
    ranks = torch.arange(math.prod(shape), device="cpu").view(-1, last // near, shard, near)
    return DeviceMesh(device.type, ranks.transpose(1, 2).reshape(shape), mesh_dim_names=tuple(sizes))


def on_first_rank(action: Callable[[], T], ranks: Ranks) -> T | None:
    """Rank 0 acts, the others wait for it; its refusal is everyone's. Returns None on the others."""
    result: T | None = None
    failure: list[str | None] = [None]
    if ranks.rank == 0:
        try:
            result = action()
        except ConfigError as error:
            failure[0] = str(error)
    dist.broadcast_object_list(failure, src=0, group=ranks.control)
    if failure[0] is not None:
        raise ConfigError(failure[0])
    return result


def on_every_rank(
    verb: str, action: Callable[[], T], control: dist.ProcessGroup, says: Callable[[T], str] = lambda _: ""
) -> T:
    """All act; the refusal of one is everyone's, and what each ``says`` of its result must be the same.

    ``verb`` tells what the ranks were about to do: "rank 3 cannot open the data: ...". An error that is no
    refusal ends its rank with its traceback, and the others when their connection to it breaks.
    """
    return done_alike(verb, action, says, [control], torch.device("cpu"), refusal=ConfigError)


def leave() -> None:
    """Leave the process group, once all ranks are done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_everything(seed: int, index: int) -> None:
    """Dropout and the like: one stream per part of the batch. Weights and data have seeds of their own."""
    torch.manual_seed(seed * 1_000_003 + index)
    np.random.seed((seed * 1_000_003 + index) % 2**32)
    random.seed(seed * 1_000_003 + index)
