"""Loading a folder of safetensors into a sharded model: bytes, host memory and time, against whole reads.

    python -m benchmarks.weights.load --mib 512 --processes 1 2 4 8 --out benchmarks/weights/results/load.json

Every rank loads the same folder in turn with ``weights.load`` and as a loader does that reads every parameter
whole and keeps its part: what this package did before it had ``weights.load``. The page cache is emptied of
the files before each load (``posix_fadvise``), and asked how much of them it holds. Bytes are those of
``/proc/self/io`` (``rchar``, which does not count what safetensors maps); memory is the growth of the largest
resident set (``VmHWM``) during the load, less the shard.
"""

import argparse
import contextlib
import json
import os
import platform
import socket
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import distribute_tensor

from ragged_fsdp import fully_shard, weights

_LAYERS, _COLUMNS = 8, 2048
_FILES = 4
_LOOK_BYTES = 4 << 20
_ROUNDS = 3


def build(rows: int) -> nn.Sequential:
    """Layers of one large matrix and a small vector each, on the meta device."""
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(_COLUMNS, rows) for _ in range(_LAYERS)))


def write(folder: Path, rows: int) -> int:
    """The files and their index; returns the bytes of the tensors."""
    drawn = torch.randn(rows, _COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    placed, total = {}, 0
    for file in range(_FILES):
        content = {}
        for index in range(file, _LAYERS, _FILES):
            for name, shape in ((f"{index}.weight", (rows, _COLUMNS)), (f"{index}.bias", (rows,))):
                content[name] = drawn.view(-1)[: torch.Size(shape).numel()].view(shape) * (1 + index)
                placed[name] = f"part-{file}.safetensors"
                total += content[name].nbytes
        save_file(content, folder / f"part-{file}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return total


def load_whole(model: nn.Module, folder: Path) -> None:
    """The anchor: every rank reads every parameter, and keeps its part."""
    model.to_empty(device="cpu")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    with contextlib.ExitStack() as stack:
        opened = {
            file: stack.enter_context(safe_open(folder / file, framework="pt"))
            for file in set(index.values())
        }
        for name, parameter in model.named_parameters():
            full = torch.empty(parameter.shape, dtype=parameter.dtype)
            full.copy_(opened[index[name]].get_tensor(name))  # what it returns is mapped: this reads it
            part = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            with torch.no_grad():
                parameter.to_local().copy_(part.to_local())


def forget(folder: Path) -> float:
    """Empty the page cache of the folder's files; returns which part of them it holds all the same."""
    held = looked = 0
    for file in folder.glob("*.safetensors"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        for at in range(0, file.stat().st_size, _LOOK_BYTES):
            looked += 1
            with contextlib.suppress(BlockingIOError):  # it would have to be read
                held += os.preadv(handle, [bytearray(1)], at, os.RWF_NOWAIT)
        os.close(handle)
    return held / looked


def _read_so_far() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def _resident_bytes(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))


def _rank(rank: int, size: int, port: int, folder: str, rows: int, threads: int | None, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (size,))
    found = [
        {"how": how, **_load(how, mesh, Path(folder), rows, threads)}
        for _ in range(_ROUNDS)
        for how in ("load", "whole")
    ]
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _load(how: str, mesh: DeviceMesh, folder: Path, rows: int, threads: int | None) -> dict[str, Any]:
    """One load into a new model, from files that are not in memory."""
    model = build(rows).to(torch.bfloat16)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    cached = forget(folder) if dist.get_rank() == 0 else 0.0
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident set counts from here
    read, before, began = _read_so_far(), _resident_bytes("VmRSS"), time.perf_counter()
    if how == "load":
        weights.load(model, folder, threads=threads)
    else:
        load_whole(model, folder)
    dist.barrier()
    return {
        "seconds": time.perf_counter() - began,
        "rchar": _read_so_far() - read,
        "peak_growth": _resident_bytes("VmHWM") - before,
        "shard": sum(p.to_local().nbytes for p in model.parameters()),
        "cached": cached,
        "check": sum(int(p.detach().to_local().view(torch.int16).sum()) for p in model.parameters()),
    }


def measure(folder: Path, rows: int, size: int, threads: int | None) -> list[dict[str, Any]]:
    """Both ways on ``size`` processes, in turn; times are medians."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(_rank, (size, port, str(folder), rows, threads, out), nprocs=size)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(out).glob("*.json"))]
    made = []
    for how in ("load", "whole"):
        rounds = list(zip(*([run for run in rank if run["how"] == how] for rank in ranks)))
        times = [max(run["seconds"] for run in runs) for runs in rounds]
        made.append(
            {
                "processes": size,
                "how": how,
                "seconds": median(times),
                "seconds_all": times,
                "read_bytes_all": max(sum(run["rchar"] for run in runs) for runs in rounds),
                "beyond_shard_bytes": max(
                    run["peak_growth"] - run["shard"] for runs in rounds for run in runs
                ),
                "cached_before": max(run["cached"] for runs in rounds for run in runs),
                "check": sorted({sum(run["check"] for run in runs) for runs in rounds}),
            }
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="size of the checkpoint")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, help="reads at a time of a rank; default: as weights.load")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written, for a while")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = args.mib * 2**20 // (_LAYERS * _COLUMNS * 2)
    results = []
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        total = write(Path(name), rows)
        for size in args.processes:
            pair = measure(Path(name), rows, size, args.threads)
            assert pair[0]["check"] == pair[1]["check"], "the loaders give other weights"
            results += pair
            ratio = pair[1]["seconds"] / pair[0]["seconds"]
            print(
                f"{size} processes: load reads {pair[0]['read_bytes_all'] / total:.4f} of the files, holds "
                f"{pair[0]['beyond_shard_bytes'] / 2**20:.0f} MiB beyond the shard (whole reads: "
                f"{pair[1]['beyond_shard_bytes'] / 2**20:.0f}), takes {pair[0]['seconds']:.2f} s; "
                f"whole reads take {pair[1]['seconds']:.2f} s, {ratio:.2f} times as long; of the files "
                f"{pair[0]['cached_before']:.3f} and {pair[1]['cached_before']:.3f} were in memory before",
                flush=True,
            )
            if args.out is not None:
                save(args, total, results)


def save(args: argparse.Namespace, total: int, results: list[dict[str, Any]]) -> None:
    """The results so far, with what they were made on."""
    args.out.parent.mkdir(parents=True, exist_ok=True)
    sizes = " ".join(str(run["processes"]) for run in results[::2])
    about = {
        "checkpoint_bytes": total,
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": f"python -m benchmarks.weights.load --mib {args.mib} --processes {sizes}",
    }
    args.out.write_text(json.dumps({**about, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
