"""Quality and CPU time of the planner over the test corpus, and over whole models with equal layers cached.

    python benchmarks/planner/quality.py [--out benchmarks/planner]

The gap of a plan is its shard size over the best size known (see ``best_known.py``). Writes ``quality.json``.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from planner_corpus import all_cases, best_known
from ragged_fsdp.cli.plan_inputs import load_shapes, parse_rule, spec_of, wrap_groups
from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.models.published import PUBLISHED
from ragged_fsdp.planner import plan_group
from ragged_fsdp.planner.group import _plan_kinds

MODEL_RANKS = (64, 1024, 131072)


def corpus() -> dict[str, Any]:
    known = best_known()
    gaps, seconds, proven = [], [], 0
    aligned = ordered = 0
    for case in all_cases():
        specs = [TensorSpec(str(i), n, b) for i, (n, b) in enumerate(zip(case.sizes, case.blocks))]
        began = time.process_time()
        layout = plan_group(specs, case.ranks, unit=case.unit, align=case.align)
        seconds.append(time.process_time() - began)
        gaps.append(max(0.0, layout.shard_numel / known[case.name]["shard"] - 1))
        proven += layout.proven_optimal
        starts = [start for spec, start in zip(specs, layout.offsets) if spec.numel]
        aligned += all(start % case.unit == 0 for start in starts)
        ordered += starts == sorted(starts)
    seconds.sort()
    return {
        "cases": len(gaps),
        "proven_optimal": proven,
        "at_the_best_size_known": sum(gap == 0 for gap in gaps),
        "most_above_it_percent": 100 * max(gaps),
        "mean_above_it_percent": 100 * sum(gaps) / len(gaps),
        "offsets_aligned_to_the_unit": aligned,
        "in_the_given_order": ordered,
        "median_seconds": seconds[len(seconds) // 2],
        "p95_seconds": seconds[int(0.95 * len(seconds))],
        "most_seconds": seconds[-1],
    }


def models() -> dict[str, Any]:
    """CPU seconds to plan every group of a model, 128-row experts, equal layers planned once."""
    rules = [parse_rule("*.experts.*_proj=128rows"), parse_rule("*.experts.*_proj.weight=128rows")]
    timed: dict[str, Any] = {}
    for name in PUBLISHED:
        groups = wrap_groups(load_shapes(name, experts="published").tensors, ["layers"])
        specs = [[spec_of(tensor, rules) for tensor in group.tensors] for group in groups]
        for ranks in MODEL_RANKS:
            _plan_kinds.cache_clear()
            began = time.process_time()
            layouts = [plan_group(group, ranks) for group in specs]
            spent = time.process_time() - began
            proven = sum(layout.proven_optimal for layout in layouts)
            timed[f"{name}/{ranks}"] = {"groups": len(groups), "proven": proven, "seconds": round(spent, 4)}
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the results")
    arguments = parser.parse_args()
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    content = {"machine": machine, "models": models(), "corpus": corpus()}
    (arguments.out / "quality.json").write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
