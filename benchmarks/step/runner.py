"""Runs every implementation of a case in a process of its own, one after the other, with a time limit.

The processes come from a fork server that has torch loaded but has never touched the device, so that a
fresh process costs the start of CUDA and not the imports.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .case import Case
from .network import wire_text

__all__ = ["PRELOAD", "installed", "run_case", "save", "versions"]

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",
    "benchmarks.step.measure",
]
"""What the processes find loaded: nothing that touches the device."""


def versions() -> dict[str, str]:
    """The machine and the versions a result depends on."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    for package in ("triton", "megatron-fsdp", "deepspeed", "torchao"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def run_case(
    case: Case,
    names: Iterable[str],
    say: Callable[[str], None],
    *,
    limit_s: float = 120.0,
    trace_dir: Path | None = None,
) -> dict[str, Any]:
    """Results of one case: ``{"case": ..., "rows": [...]}``; what failed has a row with ``error``."""
    rows: list[dict[str, Any]] = []
    for name in installed(names, say, rows):
        start = time.monotonic()
        found = _in_own_process(case, name, limit_s, trace_dir)
        rows += found
        for row in found:
            say(f"{_line(row)}  [{time.monotonic() - start:.0f} s]")
    return {"case": case.to_json(), "rows": rows}


def installed(names: Iterable[str], say: Callable[[str], None], rows: list[dict[str, Any]]) -> Iterator[str]:
    """The implementations that can run; each other one gets a line and a row that say what is missing."""
    from .implementations import missing

    for name in names:
        absent = missing(name)
        if absent is None:
            yield name
            continue
        say(f"{name}: skipped, {absent} is not installed")
        rows.append({"implementation": name, "skipped": f"{absent} is not installed"})


def save(path: Path, results: list[dict[str, Any]]) -> None:
    """Write results with the versions they depend on and the time of their end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {"versions": versions(), "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "results": results}
    path.write_text(json.dumps(made, indent=1) + "\n")


def _in_own_process(case: Case, name: str, limit_s: float, trace_dir: Path | None) -> list[dict[str, Any]]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(theirs, case, name, trace_dir))
    process.start()
    theirs.close()
    failure: str | None = None
    answer: Any = None
    try:
        answer = ours.recv() if ours.poll(limit_s) else None
        failure = f"no answer within {limit_s:.0f} s" if answer is None else None
    except EOFError:
        process.join()
        failure = f"the process died with exit code {process.exitcode}"
    process.join(5)
    if process.is_alive():
        process.kill()
        process.join()
    if isinstance(answer, str):
        failure = answer
    return [{"implementation": name, "error": failure}] if failure else answer


def _measure(pipe: Any, case: Case, name: str, trace_dir: Path | None) -> None:
    try:
        from .measure import measure

        pipe.send(measure(case, name, trace_dir))
    except BaseException:
        pipe.send(traceback.format_exc(limit=-6))
    pipe.close()


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['implementation']}: failed\n{row['error']}"
    held = "/".join(f"{sum(level):.1f}" for level in zip(*row["held_ms"].values())) or "0"
    return (
        f"{row['implementation']:>12} {wire_text(row['wire']):>9}: "
        f"forward+backward {row['forward_backward_ms']:8.1f} ms, "
        f"step {row['step_ms']:8.1f} ms, host {row['host_ms']:7.1f} ms, "
        f"peak {row['peak_allocated_gib']:.1f}/{row['peak_reserved_gib']:.1f} GiB, links held {held} ms"
    )
