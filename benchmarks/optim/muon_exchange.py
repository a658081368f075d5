"""How much of Muon's exchange is hidden behind its iteration, with more ranks than one.

    python -m benchmarks.optim.muon_exchange --out benchmarks/optim/results               # a modelled wire
    python -m benchmarks.optim.muon_exchange --out benchmarks/optim/results --real 2      # real ranks

The first runs rank 0 of ``--ranks`` on Llama-3-8B layers sharded by ``fully_shard``; the other ranks do not
exist, and each all-to-all holds a stream for its bytes at the given bandwidth (``benchmarks/step/wire.py``).
It reports the step beside the iteration of this rank's matrices alone, for 1, 2 and 3 buckets in flight,
and which part of the time on the wire does not show in the step. The second runs real NCCL ranks, which
may share a device (they then talk over sockets, so its times mean little), and reports from the profile of
rank 0 how much of the iteration of each bucket ran while a collective of another bucket did.

Both draw their profiled steps: a lane for computation and one for communication, a colour per bucket.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ragged_fsdp import fully_shard
from ragged_fsdp.dtensor import wrap_local
from ragged_fsdp.optim import Muon
from ragged_fsdp.optim.muon.newton_schulz import orthogonalize, per_iteration
from ragged_fsdp.predict.network import network_of

from ..ranks import join_ranks, start_ranks
from ..step.wire import Wire, join
from .muon_step import COEFFICIENTS, LLAMA_LAYER, STEPS, timed
from .stage_spans import StageSpan, draw, overlap, stage_spans, write_trace

__all__ = ["main"]


@dataclass(frozen=True)
class Row:
    """One bandwidth and number of buckets in flight; times in milliseconds."""

    bandwidth_gb_s: float | None
    buckets_in_flight: int
    step_ms: float
    wire_ms: float
    hidden: float | None
    """Share of the time on the wire that the step is not longer for; None for a free wire."""


def sharded(mesh: Any, layers: int, shrink: int, device: torch.device) -> list[tuple[str, Tensor]]:
    """The matrices of so many layers, each side divided by ``shrink``, as ``fully_shard`` lays them out."""
    named = []
    for index in range(layers):
        layer = nn.Module()
        for i, (rows, columns) in enumerate(LLAMA_LAYER):
            full = torch.empty(rows // shrink, columns // shrink, device=device)
            layer.register_parameter(f"weight_{i}", nn.Parameter(full))
        fully_shard(layer, mesh=mesh)
        named += [(f"layers.{index}.{name}", parameter) for name, parameter in layer.named_parameters()]
    for _, parameter in named:
        local = parameter.detach().to_local()
        local.normal_(std=0.02)
        parameter.grad = wrap_local(torch.randn_like(local) * 1e-3, parameter._spec)
    return named


def optimizer_of(named: list[tuple[str, Tensor]], in_flight: int, bucket_numel: int) -> Muon:
    """Muon after two steps: planned, compiled, warm."""
    optimizer = Muon(named, lr=1e-4, buckets_in_flight=in_flight, bucket_numel=bucket_numel)
    for _ in range(2):
        optimizer.step()
    return optimizer


def iteration_ms(optimizer: Muon, repeats: int) -> float:
    """The iteration of this rank's matrices by itself, in the batches of the plan."""
    coefficients = per_iteration(COEFFICIENTS, STEPS)
    (exchange,) = optimizer._latest
    batches = [batch for program in exchange.programs for batch in program.batches]
    kinds = [(batch.kind, len(batch.slabs)) for batch in batches]

    def iterate() -> None:
        for kind, count in kinds:
            batch = torch.randn(count, kind.rows, kind.columns, device="cuda", dtype=torch.bfloat16)
            orthogonalize(batch, coefficients, 1e-7, backend="triton")

    def only_fill() -> None:
        for kind, count in kinds:
            torch.randn(count, kind.rows, kind.columns, device="cuda", dtype=torch.bfloat16)

    medians = [statistics.median(timed(call, repeats + 1)[1:]) for call in (iterate, only_fill)]
    return medians[0] - medians[1]


def wire_bytes(optimizer: Muon) -> int:
    """Bytes of all transfers of a step on this rank: the larger of what is sent and received, each way."""
    (exchange,) = optimizer._latest
    transfers = [splits for program in exchange.programs for splits in (program.gather, program.scatter)]
    return sum(max(sum(t.send), sum(t.receive)) for t in transfers) * exchange.dtype.itemsize


def profiled(optimizer: Muon) -> list[StageSpan]:
    """When the stages of one step ran on the device."""
    with tempfile.TemporaryDirectory() as folder:
        return stage_spans(write_trace(optimizer.step, Path(folder) / "trace.json"))


def modelled(arguments: argparse.Namespace) -> dict[str, Any]:
    """Rank 0 of many over a wire of several bandwidths."""
    wire = Wire(delivery="channels")  # what arrives must be numbers: the iteration works on it
    join(arguments.ranks, wire)
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = dist.device_mesh.init_device_mesh("cuda", (arguments.ranks,))
    named = sharded(mesh, arguments.layers, 1, device)
    rows: list[Row] = []
    drawn: dict[str, list[StageSpan]] = {}
    alone_ms = 0.0
    for in_flight in (1, 2, 3):
        optimizer = optimizer_of(named, in_flight, arguments.bucket_numel)
        alone_ms = alone_ms or iteration_ms(optimizer, arguments.rounds)
        free_ms = 0.0
        for bandwidth in (None, *arguments.bandwidth):
            wire.network = network_of(bandwidth)
            optimizer.step()
            step_ms = statistics.median(timed(optimizer.step, arguments.rounds))
            free_ms = free_ms or step_ms
            wire_ms = 0.0 if bandwidth is None else wire_bytes(optimizer) / bandwidth / 1e6
            hidden = None if bandwidth is None else 1 - (step_ms - free_ms) / wire_ms
            rows.append(Row(bandwidth, in_flight, step_ms, wire_ms, hidden))
        drawn[f"{in_flight} in flight, {arguments.bandwidth[-1]:g} GB/s"] = profiled(optimizer)
        buckets = max(span.bucket for span in next(iter(drawn.values()))) + 1
    draw(drawn, arguments.out / "muon_exchange.svg")
    return {
        "ranks": arguments.ranks,
        "layers": arguments.layers,
        "buckets": buckets,
        "iteration_alone_ms": alone_ms,
        "rows": [asdict(row) for row in rows],
        "spans": {title: [asdict(span) for span in spans] for title, spans in drawn.items()},
    }


def real_rank(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """One real rank; rank 0 writes down its profiled steps."""
    device = join_ranks(rank, arguments, port)
    mesh = dist.device_mesh.init_device_mesh(device.type, (arguments.ranks,))
    named = sharded(mesh, arguments.layers, arguments.shrink, device)
    drawn = {}
    for in_flight in (1, 2, 3):
        optimizer = optimizer_of(named, in_flight, arguments.bucket_numel)
        drawn[f"{in_flight} in flight"] = profiled(optimizer)
    if rank == 0:
        if device.type == "cuda":  # elsewhere there are no kernels to draw
            draw(drawn, arguments.out / "muon_overlap.svg")
        record = {
            "ranks": arguments.ranks,
            "layers": arguments.layers,
            "steps": {title: overlap(spans) for title, spans in drawn.items()},
            "spans": {title: [asdict(span) for span in spans] for title, spans in drawn.items()},
        }
        write(arguments, record, "muon_overlap")
    dist.barrier()
    dist.destroy_process_group()


def report(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        f"{record['device']}, torch {record['torch']}; {record['ranks']} ranks, {record['layers']} layers."
    ]
    if "steps" in record:
        lines += ["", "| step | bucket | iteration ms | beside a collective ms |", "|---|---|---|---|"]
        for title, buckets in record["steps"].items():
            lines += [
                f"| {title} | {b['bucket']} | {b['iterate_ms']:.2f} | {b['beside_collective_ms']:.2f} |"
                for b in buckets
            ]
        return "\n".join(lines) + "\n"
    lines[0] += f" {record['buckets']} buckets; the iteration alone {record['iteration_alone_ms']:.1f} ms."
    lines += ["", "| in flight | GB/s | step ms | on the wire ms | hidden |", "|---|---|---|---|---|"]
    for row in record["rows"]:
        speed = "free" if row["bandwidth_gb_s"] is None else f"{row['bandwidth_gb_s']:g}"
        hidden = "" if row["hidden"] is None else f"{row['hidden']:.0%}"
        times = f"{row['step_ms']:.1f} | {row['wire_ms']:.1f}"
        lines.append(f"| {row['buckets_in_flight']} | {speed} | {times} | {hidden} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write ``muon_exchange`` or, with ``--real``, ``muon_overlap``: JSON, Markdown and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--real", type=int, metavar="RANKS", help="run real ranks instead of a modelled wire")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the modelled group")
    parser.add_argument("--layers", type=int, default=32, help="layers of matrices")
    parser.add_argument(
        "--shrink", type=int, default=4, help="real ranks: divide each side of a matrix by this"
    )
    parser.add_argument("--bucket-numel", type=int, default=1 << 27, help="elements of a bucket on one root")
    parser.add_argument("--bandwidth", type=float, nargs="+", default=[400.0, 100.0, 50.0], help="GB/s")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of real ranks")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.real:
        write(arguments, modelled(arguments), "muon_exchange")
        return
    arguments.ranks = arguments.real
    start_ranks(real_rank, arguments)


def write(arguments: argparse.Namespace, record: dict[str, Any], name: str) -> None:
    """The record as JSON and as Markdown."""
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    record = {"device": device, "torch": torch.__version__} | record
    (arguments.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (arguments.out / f"{name}.md").write_text(report(record))
    print(report(record))


if __name__ == "__main__":
    main()
