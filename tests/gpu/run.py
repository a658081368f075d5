"""Runs every test that a GPU can run, in groups side by side, and keeps the results with their date.

The groups share the machine's GPUs: several NCCL ranks may lie on one. ``make test-gpu`` runs them all::

    python tests/gpu/run.py                       # everything
    python tests/gpu/run.py --only ragged-2       # one group
    python tests/gpu/run.py --out results.txt     # elsewhere than tests/gpu/results-<date>.txt
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUTCOMES = (" PASSED", " FAILED", " ERROR", " SKIPPED", " XFAIL", " XPASS")


@dataclass(frozen=True)
class Group:
    """Test files that run in one pytest process."""

    what: str
    files: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


_RAGGED = ("tests/spmd/test_ragged_*.py",)
_POISONED = {"RAGGED_FSDP_DEBUG": "1"}

GROUPS = {
    "ragged-2": Group("ragged DTensors, 2 NCCL ranks", _RAGGED, ("-k", "2]")),
    "ragged-4": Group("ragged DTensors, 4 NCCL ranks", _RAGGED, ("-k", "not 2]")),
    "runtime-core": Group(
        "DBuffer and fully_shard, 1 to 4 NCCL ranks, freed memory poisoned",
        ("tests/spmd/test_dbuffer_*.py", "tests/spmd/test_fsdp_core_*.py"),
        environment=_POISONED,
    ),
    "runtime-more": Group(
        "reductions by exchange, meshes, reuse of buffers, NCCL, freed memory poisoned",
        tuple(f"tests/spmd/test_fsdp_{part}.py" for part in ("exchange", "parallelism", "reuse")),
        environment=_POISONED,
    ),
    "trainer": Group(
        "the trainer on 1 to 4 NCCL ranks: splits, resuming, faults",
        tuple(f"tests/spmd/test_train_{part}.py" for part in ("parallel", "runs")),
    ),
    "gpu": Group("what only a GPU has: streams, memory, kernels", ("tests/gpu/test_*.py",)),
}


def start(group: Group, log: Path) -> subprocess.Popen[bytes]:
    """A pytest process over the group's files; a pipe would stop it when nobody reads."""
    files = sorted(str(p.relative_to(ROOT)) for pattern in group.files for p in ROOT.glob(pattern))
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--durations=8", "-p", "no:cacheprovider"]
    environment = {**os.environ, "RAGGED_FSDP_TEST_DEVICE": "cuda", **group.environment}
    with log.open("wb") as stream:
        return subprocess.Popen(
            [*command, *group.options, *files],
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # so that its ranks end with it
        )


def finish(process: subprocess.Popen[bytes], seconds_left: float | None) -> bool:
    """Wait for the process, or end it and its ranks; whether all its tests passed."""
    try:
        return process.wait(seconds_left) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def machine() -> str:
    """The GPU and the versions, in one line."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"test-gpu: torch {torch.__version__} sees no CUDA device")
    found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{found}, torch {torch.__version__}, Python {platform.python_version()}"


def main() -> int:
    """Run the groups and write their results; 0 if every test passed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, action="append", help="a group to run (repeatable)")
    parser.add_argument("--limit-s", type=float, help="end what still runs after this many seconds")
    parser.add_argument("--out", type=Path, help="the file to write the results to")
    options = parser.parse_args()
    now = datetime.now(UTC)
    out = options.out or ROOT / "tests" / "gpu" / f"results-{now:%Y-%m-%d}.txt"
    lines = [f"{now:%Y-%m-%d %H:%M} UTC, {machine()}"]
    began = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="test-gpu-"))
    running = {name: start(GROUPS[name], logs / name) for name in options.only or GROUPS}
    failed = 0
    for name, process in running.items():
        left = None if options.limit_s is None else max(0.0, began + options.limit_s - time.monotonic())
        passed = finish(process, left)
        failed += not passed
        output = (logs / name).read_text(errors="replace")
        summary = (output.strip().splitlines() or ["no output"])[-1].strip("= ")
        lines += ["", f"== {name}: {GROUPS[name].what}: {summary}"]
        lines += [line for line in output.splitlines() if any(word in line for word in OUTCOMES)]
        if not passed:
            print(output)
        print(f"{name}: {summary} ({time.monotonic() - began:.0f} s since the start)", flush=True)
    out.write_text("\n".join(lines) + "\n")
    print(f"results in {out}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
