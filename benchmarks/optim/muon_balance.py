"""How evenly Muon's plan divides work and transfers over ranks and buckets: from the plan alone, on any CPU.

    python -m benchmarks.optim.muon_balance --out benchmarks/optim/results

Layers of a model, each one group of ``fully_shard``, on 2 to 32 ranks. Ranks meet in every bucket, so what
counts is its busiest rank: over all buckets, the work of the busiest roots of an even share of the work, and
what the busiest ranks send or receive (one way) of an even share of the elements, beside what ranks move on
the average. 1.00 for work is perfect.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.optim.exchange.matrices import Fused, MatrixLayout, MatrixRule, matrix_shape
from ragged_fsdp.optim.exchange.plan import ExchangePlan, PlannedParameter, plan_exchange
from ragged_fsdp.optim.muon.newton_schulz import newton_schulz_flops
from ragged_fsdp.planner import plan_group
from ragged_fsdp.routes import flat_boxes

Shape = tuple[int, ...]
GATE_UP = Fused(-1, (2880, 2880), interleaved=True)
MODELS: dict[str, tuple[int, list[tuple[Shape, MatrixRule]]]] = {
    "Llama-3-8B": (
        32,
        [(s, None) for s in [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]],
    ),
    "GPT-OSS-20B": (
        24,
        [
            ((32, 2880, 5760), GATE_UP),
            *((s, None) for s in [(32, 2880, 2880), (4096, 2880), (512, 2880), (512, 2880), (2880, 4096)]),
        ],
    ),
    "64 experts of 2048x768": (
        24,
        [(s, None) for s in [(64, 2048, 768)] * 2 + [(64, 768, 2048), (2048, 2048), (512, 2048)]],
    ),
}


@dataclass(frozen=True)
class Row:
    """A model on so many ranks; shares are of what each rank would have if all were equal."""

    model: str
    ranks: int
    buckets: int
    busiest_root: float
    busiest_root_by_bucket: float
    busiest_transfer: float
    average_transfer: float


def plan_of(model: str, ranks: int, bucket_numel: int) -> ExchangePlan:
    """The plan of a model whose layers are groups of ``fully_shard``."""
    layers, weights = MODELS[model]
    group = plan_group([TensorSpec(str(i), math.prod(s)) for i, (s, _) in enumerate(weights)], ranks)
    layouts = []
    for index, (shape, rule) in enumerate(weights):
        parts = [group.local_range(index, rank) for rank in range(ranks)]
        box = matrix_shape(shape, rule)
        regions = [tuple(flat_boxes(box, p.tensor_start, p.tensor_start + p.numel)) for p in parts]
        layouts.append(MatrixLayout(shape, rule, tuple(regions), (0,) * ranks))
    parameters = [
        PlannedParameter(f"{layer}.{index}", layout)
        for layer in range(layers)
        for index, layout in enumerate(layouts)
    ]
    return plan_exchange(parameters, ranks, bucket_numel, newton_schulz_flops)


def measure(model: str, ranks: int, bucket_numel: int) -> Row:
    """Shares of the busiest ranks."""
    plan = plan_of(model, ranks, bucket_numel)
    work_by_bucket = busiest = moved = 0
    for tasks in plan.buckets:
        work, sent, received = [0] * ranks, [0] * ranks, [0] * ranks
        for task in tasks:
            work[task.root] += task.cost
            for rank in set(range(ranks)) - {task.root}:
                numel = sum(near.numel for near, _ in plan.shared(task, rank))
                sent[rank] += numel
                received[task.root] += numel
        work_by_bucket += max(work)
        busiest += max(map(max, sent, received))
        moved += sum(sent)
    even_work = sum(plan.load()) / ranks
    elements = sum(math.prod(parameter.layout.shape) for parameter in plan.parameters)
    return Row(
        model,
        ranks,
        len(plan.buckets),
        max(plan.load()) / even_work,
        work_by_bucket / even_work,
        busiest / (elements / ranks),
        moved / elements,
    )


def report(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| model | ranks | buckets | busiest root | busiest root of each bucket | busiest transfer of each "
        "bucket | average transfer |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shares = (
            row.busiest_root,
            row.busiest_root_by_bucket,
            row.busiest_transfer,
            row.average_transfer,
        )
        text = " | ".join(f"{share:.2f}" for share in shares)
        lines.append(f"| {row.model} | {row.ranks} | {row.buckets} | {text} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write ``muon_balance.json`` and ``muon_balance.md``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="world sizes")
    parser.add_argument("--bucket-numel", type=int, default=1 << 27, help="elements of a bucket on one root")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = [measure(model, ranks, arguments.bucket_numel) for model in MODELS for ranks in arguments.ranks]
    (arguments.out / "muon_balance.json").write_text(
        json.dumps([asdict(row) for row in rows], indent=1) + "\n"
    )
    (arguments.out / "muon_balance.md").write_text(report(rows))
    print(report(rows))


if __name__ == "__main__":
    main()
