"""Where a Muon step on one GPU spends its time: host, device, and the device's time by kernel.

    python -m benchmarks.optim.muon_profile --out benchmarks/optim/results

``host`` is the time until ``step`` returns, ``busy`` the time in which at least one kernel runs, ``step``
the time between two synchronizations: a step much longer than ``busy`` waits for the host. Cases are
those of ``muon_step.py``, with experts stacked where they can be and as separate parameters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..step.kernels import read_trace, summarise
from .muon_step import CASES, ours, parameters_of, timed
from .stage_spans import write_trace

__all__ = ["main"]

_NAME_CHARS = 60


def host_ms(optimizer: torch.optim.Optimizer, repeats: int) -> float:
    """Median time until a step returns, the device being idle when it begins."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def profile_case(name: str, shapes: list[tuple[int, ...]], repeats: int) -> dict[str, Any]:
    """Times and kernels of one case."""
    parameters = parameters_of(shapes)
    optimizer = ours(ns_backend="triton")(parameters)
    for _ in range(2):
        optimizer.step()
    record = {"case": name, "parameters": len(shapes)}
    record["step_ms"] = statistics.median(t for _ in range(repeats) for t in timed(optimizer.step, 1))
    record["host_ms"] = host_ms(optimizer, repeats)
    with tempfile.TemporaryDirectory() as folder:
        return record | summarise(read_trace(write_trace(optimizer.step, Path(folder) / "trace.json")))


def text(record: dict[str, Any]) -> str:
    """One case as Markdown."""
    lines = [
        f"## {record['case']}, {record['parameters']} parameters",
        "",
        ", ".join(f"{part} {record[f'{part}_ms']:.2f} ms" for part in ("step", "host", "busy")),
        "",
        "| kernel | launches | ms |",
        "|---|---|---|",
    ]
    for kernel in record["longest"]:
        lines.append(f"| `{kernel['name'][:_NAME_CHARS]}` | {kernel['count']} | {kernel['ms']:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Profile the cases and write ``muon_profile.json`` and ``muon_profile.md``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for muon_profile.json and .md")
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA device")
    arguments.out.mkdir(parents=True, exist_ok=True)
    title = f"# Muon step by kernel\n\n{torch.cuda.get_device_name()}, torch {torch.__version__}.\n"
    records = []
    for name in arguments.case or CASES:
        case = CASES[name]
        for shapes in (case.stacked, case.shapes):
            if shapes is not None:
                records.append(profile_case(name, shapes, arguments.repeats))
                torch.cuda.empty_cache()
        (arguments.out / "muon_profile.json").write_text(json.dumps(records, indent=1) + "\n")
        (arguments.out / "muon_profile.md").write_text("\n".join([title, *map(text, records)]))
    print("\n".join(map(text, records)))


if __name__ == "__main__":
    main()
