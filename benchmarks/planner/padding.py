"""Padding against FSDP size for whole models: our planner beside the published algorithm.

    python benchmarks/planner/padding.py [--step 8] [--jobs 1] [--out benchmarks/planner]

DeepSeek-V3 and GPT-OSS-120B, one group per layer and one for the rest, as ``fully_shard`` makes them. Expert
matrices keep blocks of 1, 16 or 128 rows, everything else is element-wise, a shard is a multiple of 128
elements. "Published" is Algorithm 1 of the paper in the default order and the best of its three orders.
Writes ``padding.json`` (all figures, CPU seconds per model, equal layers planned once) and ``padding.svg``.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from planner_paper import algorithm1
from ragged_fsdp.cli.plan_costs import PlanSettings, SpecGroup, merge_equal, plan_model
from ragged_fsdp.cli.plan_display import Curve, draw_curves
from ragged_fsdp.cli.plan_inputs import load_shapes, parse_rule, wrap_groups
from ragged_fsdp.planner.group import _plan_kinds
from ragged_fsdp.planner.problem import Problem, by_block, by_numel, default

MODELS = {"deepseek-v3": "DeepSeek-V3", "gpt-oss-120b": "GPT-OSS-120B"}
EXPERT_MATRICES = ("*.experts.*_proj", "*.experts.*_proj.weight", "*.shared_experts.*_proj.weight")
ROWS = (1, 16, 128)
UNIT = 128


def published_shards(group: SpecGroup, ranks: int) -> tuple[list[int], float]:
    """Shard sizes of the published algorithm for its three orders, and the CPU seconds of the first."""
    sizes, blocks = [s.numel for s in group.specs], [s.block_numel for s in group.specs]
    problem = Problem.build(zip(sizes, blocks), ranks, UNIT)
    shards, seconds = [], 0.0
    for order in (default, by_block, by_numel):
        began = time.process_time()
        shards.append(algorithm1(problem, [problem.kinds[i] for i in order(problem.kinds)]))
        seconds = seconds or time.process_time() - began
    return shards, seconds


def measure(groups: Sequence[SpecGroup], ranks: int, settings: PlanSettings) -> dict[str, Any]:
    """Padding ratios of one model at one FSDP size, and what they took."""
    _plan_kinds.cache_clear()
    began = time.process_time()
    plan = plan_model(groups, ranks, settings)
    seconds = time.process_time() - began
    in_default = in_best = 0
    published_seconds = 0.0
    for group in groups:
        shards, spent = published_shards(group, ranks)
        in_default += shards[0] * ranks * len(group.names)
        in_best += min(shards) * ranks * len(group.names)
        published_seconds += spent
    return {
        "ranks": ranks,
        "ours": plan.padding_ratio,
        "bound": plan.bound_ratio,
        "proven": plan.proven,
        "seconds": round(seconds, 4),
        "published_default": in_default / plan.numel - 1,
        "published_best_of_three": in_best / plan.numel - 1,
        "published_seconds": round(published_seconds, 4),
    }


def run(step: int, jobs: int) -> dict[str, Any]:
    measured: dict[str, Any] = {}
    pool = ProcessPoolExecutor(jobs)
    for name in MODELS:
        groups = wrap_groups(load_shapes(name, experts="published").tensors, ["layers"])
        for rows in ROWS:
            rules = tuple(parse_rule(f"{pattern}={rows}rows") for pattern in EXPERT_MATRICES)
            settings = PlanSettings(rules, unit=UNIT)
            merged = merge_equal(groups, settings)
            sizes = range(8, 1025, step)
            points = pool.map(partial(measure, merged, settings=settings), sizes, chunksize=4)
            measured[f"{name}/{rows}"] = list(points)
            print(f"{name}, {rows} rows: {len(sizes)} sizes", flush=True)
    pool.shutdown()
    return measured


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """Per curve: the largest and mean padding, how many plans are proven, and the times."""
    lines = {}
    for curve, points in measured.items():
        seconds = sorted(point["seconds"] for point in points)
        lines[curve] = {
            "most_padding": max(point["ours"] for point in points),
            "mean_padding": sum(point["ours"] for point in points) / len(points),
            "mean_published_default": sum(p["published_default"] for p in points) / len(points),
            "mean_published_best_of_three": sum(p["published_best_of_three"] for p in points) / len(points),
            "proven": f"{sum(point['proven'] for point in points)} of {len(points)}",
            "median_seconds": seconds[len(seconds) // 2],
            "p95_seconds": seconds[int(0.95 * len(seconds))],
            "most_seconds": seconds[-1],
        }
    return lines


def figure(measured: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "ragged-fsdp"  # the same figures give the same file
    drawing, both = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for axes, (name, title) in zip(both, MODELS.items()):
        curves = []
        for rows in ROWS:
            points = measured[f"{name}/{rows}"]
            ranks = [point["ranks"] for point in points]
            curves.append(Curve(f"{rows} rows", ranks, [point["ours"] for point in points]))
        points = measured[f"{name}/128"]
        published = [point["published_default"] for point in points]
        curves.append(Curve("128 rows, published", [p["ranks"] for p in points], published, dashed=True))
        draw_curves(axes, title, curves)
    drawing.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step", type=int, default=8, help="distance between FSDP sizes")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the results")
    parser.add_argument("--jobs", type=int, default=1, help="processes; more than cores spoil the times")
    parser.add_argument("--redraw", action="store_true", help="draw the figure from the JSON that is there")
    arguments = parser.parse_args()
    results = arguments.out / "padding.json"
    if not arguments.redraw:
        measured = run(arguments.step, arguments.jobs)
        machine = f"{platform.machine()}, Python {platform.python_version()}"
        content = {"machine": machine, "unit": UNIT, "summary": summary(measured), "curves": measured}
        results.write_text(json.dumps(content, indent=1) + "\n")
    content = json.loads(results.read_text())
    figure(content["curves"], arguments.out / "padding.svg")
    print(json.dumps(content["summary"], indent=1))


if __name__ == "__main__":
    main()
