"""Weights to inference: what a sender does beside its gathers, and a real hand-over, against FSDP2.

    python -m benchmarks.weights.stream sender --ranks 64 --out benchmarks/weights/results/sender.json
    python -m benchmarks.weights.stream hand-over --processes 4 --out benchmarks/weights/results/ipc.json

``sender`` is rank 0 of N under torch's fake process group, whose collectives take no time: what is left of a
pass over layers of Qwen3-30B-A3B is the sender's own work. The gathers are priced by their bytes at
``--gather-gbs``. ``hand-over`` has real ranks (several may share a GPU) and one more process that copies
every tensor into its own: over CUDA IPC, or files on the CPU; what it has then must be what the ranks hold,
bit by bit. ``ragged_fsdp`` is ``hand_over``, where the receiver joins the ranks' shards;
``ragged_fsdp, gathered`` is ``stream(to=0)`` and ``share``. The peer is FSDP2: ``full_tensor()`` of each
parameter and ``torch.cat`` of a layer's, in the same run; all send bf16.
"""

import argparse
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.shared_device import shared_device
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from ragged_fsdp import Rows, fully_shard, weights

SIZES = {
    "qwen3-30b-a3b": {"hidden": 2048, "heads": 32, "kv": 4, "head": 128, "experts": 128, "inner": 768},
    "small": {"hidden": 64, "heads": 4, "kv": 2, "head": 16, "experts": 8, "inner": 32},
}
_ROUNDS = 3
_WAIT_S = 300


class Layer(nn.Module):
    """The parameters of a layer; nothing is computed with them."""

    def __init__(self, hidden: int, heads: int, kv: int, head: int, experts: int, inner: int) -> None:
        super().__init__()
        self.q, self.o = (
            nn.Linear(hidden, heads * head, bias=False),
            nn.Linear(heads * head, hidden, bias=False),
        )
        self.k, self.v = (nn.Linear(hidden, kv * head, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))

    def forward(self, x: Tensor) -> Tensor:
        return x


def build(size: str, layers: int, device: str, mesh: Any, ours: bool) -> nn.ModuleList:
    """A sharded stack with random values, others on each rank."""
    with torch.device("meta"):
        model = nn.ModuleList(Layer(**SIZES[size]) for _ in range(layers))
    for layer in model:
        if ours:
            fully_shard(layer, mesh=mesh, orig_param_policy=lambda n, p: Rows(1) if p.ndim == 3 else None)
        else:
            torch_fully_shard(layer, mesh=mesh)
    model.to_empty(device=device)
    with torch.no_grad():
        torch.manual_seed(mesh.get_rank())
        for parameter in model.parameters():
            parameter.to_local().normal_()
    return model


def ragged_pass(model: nn.ModuleList) -> Callable[[], Iterator[Tensor]]:
    """A pass of the stream, which is made once."""
    stream = weights.stream(model, dtype=torch.bfloat16)
    return lambda: (bucket.data for bucket in stream)


def fsdp2_buckets(model: nn.ModuleList) -> Iterator[weights.Bucket]:
    """The peer: every parameter gathered by itself, and a layer's put into one flat tensor; on all ranks."""
    for index, layer in enumerate(model):
        records, parts, end = [], [], 0
        for name, parameter in layer.named_parameters():
            full = parameter.detach().to(torch.bfloat16).full_tensor()
            records.append(weights.Record(f"{index}.{name}", full.dtype, tuple(full.shape), end))
            parts.append(full.reshape(-1).view(torch.uint8))
            end += parts[-1].numel()
        yield weights.Bucket(str(index), torch.cat(parts), records)


def fsdp2_pass(model: nn.ModuleList) -> Callable[[], Iterator[Tensor]]:
    """A pass of the peer."""
    return lambda: (bucket.data for bucket in fsdp2_buckets(model))


PASSES = {"ragged_fsdp": ragged_pass, "fsdp2": fsdp2_pass}


def digest(tensor: Tensor) -> int:
    """A number that depends on every bit of a bf16 tensor and on its place."""
    total, at = 0, 0
    for part in tensor.reshape(-1).view(torch.int16).split(1 << 24):
        place = torch.arange(at, at + part.numel(), device=part.device) % 65521 + 1
        total += int((part.long() * place).sum())
        at += part.numel()
    return total


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def sender(args: argparse.Namespace) -> dict[str, Any]:
    """One rank of many, without a network."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    mesh = init_device_mesh(args.device, (args.ranks,))
    result: dict[str, Any] = {}
    for how, pass_of in PASSES.items():
        model = build(args.size, args.layers, args.device, mesh, how == "ragged_fsdp")
        buckets = pass_of(model)
        times, moved, peak = [], 0, 0
        for _ in range(_ROUNDS + 1):
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            _wait(args.device)
            began, moved = time.perf_counter(), 0
            for data in buckets():
                moved += data.numel()
                del data  # a loop that keeps it while it asks for the next has three in memory
            _wait(args.device)
            times.append(time.perf_counter() - began)
            if args.device == "cuda":
                peak = torch.cuda.max_memory_allocated() - before
        gather = moved / (args.gather_gbs * 1e9)
        seconds = median(times[1:])
        result[how] = {
            "seconds": seconds,
            "bytes": moved,
            "gather_seconds": gather,
            "of_gather": seconds / gather,
            "largest_bytes": data_bytes(model),
            "peak_bytes": peak,
        }
        del model
    result["times_less"] = result["fsdp2"]["seconds"] / result["ragged_fsdp"]["seconds"]
    dist.destroy_process_group()
    return result


def data_bytes(model: nn.ModuleList) -> int:
    """Bytes of the largest layer, in bf16."""
    return max(sum(p.numel() * 2 for p in layer.parameters()) for layer in model)


def _receiver(connection: Connection, device: str) -> None:
    """Copy what comes into tensors of its own; says after each pass what it has."""
    own: dict[str, Tensor] = {}
    while (how := connection.recv()) is not None:
        for bucket in (
            weights.take_over(connection, device=device) if how == "ragged_fsdp" else _opened(connection)
        ):
            for record in bucket.records:
                if record.name not in own:
                    own[record.name] = torch.empty(record.shape, dtype=record.dtype, device=device)
            bucket.apply(own)
            _wait(device)
            del bucket
        connection.send("whole")
        connection.send({name: digest(value) for name, value in own.items()})
        for value in own.values():
            value.zero_()


def _opened(connection: Connection) -> Iterator[weights.Bucket]:
    """Buckets that lie in the memory of rank 0, until the caller has used them."""
    while (message := connection.recv()) is not None:
        yield weights.open_shared(message) if isinstance(message, dict) else weights.Bucket(*message)
        connection.send("taken")


def _share_each(buckets: Iterable[weights.Bucket], connection: Connection | None) -> None:
    """Show each bucket to the receiver, and wait until it has copied it."""
    for bucket in buckets:
        if connection is not None:
            in_host = (bucket.label, bucket.data, bucket.records)
            connection.send(weights.share(bucket) if bucket.data.is_cuda else in_host)
            assert connection.recv() == "taken"
        del bucket
    if connection is not None:
        connection.send(None)


def _ways(model: nn.ModuleList, how: str, connection: Connection | None) -> Callable[[], None]:
    """One pass, by the name of how it is done."""
    if how == "fsdp2":
        return lambda: _share_each(fsdp2_buckets(model), connection)
    if how == "ragged_fsdp, gathered":
        gathered = weights.stream(model, dtype=torch.bfloat16, to=0)
        return lambda: _share_each(gathered, connection)
    stream = weights.stream(model, dtype=torch.bfloat16)
    return lambda: weights.hand_over(stream, connection, timeout_s=_WAIT_S)


def _trainer(rank: int, args: argparse.Namespace, port: int, connection: Connection, out: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_HOSTID=f"rank{rank}")
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=args.processes)
    mesh = init_device_mesh(args.device, (args.processes,))
    result: dict[str, Any] = {}
    for how in ("ragged_fsdp", "ragged_fsdp, gathered", "fsdp2"):
        model = build(args.size, args.layers, args.device, mesh, how != "fsdp2")
        expected = {
            name: digest(p.detach().to(torch.bfloat16).full_tensor()) for name, p in model.named_parameters()
        }
        one_pass = _ways(model, how, connection if rank == 0 else None)
        times = []
        for _ in range(_ROUNDS + 1):
            if rank == 0:
                connection.send(how)
            dist.barrier()
            _wait(args.device)
            began = time.perf_counter()
            one_pass()
            if rank == 0:
                assert connection.recv() == "whole"
            dist.barrier()
            times.append(time.perf_counter() - began)
            if rank == 0:
                assert connection.recv() == expected, "the receiver has other weights"
        result[how] = {"seconds": median(times[1:]), "all": times}
        if rank == 0:
            print(how, times, flush=True)
        del model, one_pass
    result["times_faster"] = result["fsdp2"]["seconds"] / result["ragged_fsdp"]["seconds"]
    if rank == 0:
        connection.send(None)
        Path(out).write_text(json.dumps(result))
    dist.destroy_process_group()


def hand_over(args: argparse.Namespace) -> dict[str, Any]:
    """Real ranks and a receiver."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=_receiver, args=(theirs, args.device), daemon=True)
    out = Path(f".weights-{port}.json")
    with shared_device() as service:
        os.environ.update(service)  # before a process uses the device
        receiver.start()
        try:
            mp.spawn(_trainer, (args, port, ours, str(out)), nprocs=args.processes)
            return json.loads(out.read_text())
        finally:
            out.unlink(missing_ok=True)
            receiver.join(10)
            for name in service:
                del os.environ[name]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("sender", "hand-over"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--size", choices=tuple(SIZES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--ranks", type=int, default=64, help="sender: ranks that the model is sharded over")
    parser.add_argument("--processes", type=int, default=4, help="hand-over: trainer ranks")
    parser.add_argument(
        "--gather-gbs", type=float, default=45.0, help="sender: GB/s at which gathers are priced"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = sender(args) if args.what == "sender" else hand_over(args)
    about = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "options": {name: str(value) for name, value in vars(args).items()},
    }
    text = json.dumps({**about, **result}, indent=1)
    print(text)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
