"""Runs every test that a GPU can run, in groups side by side, and keeps the results with their date.

Several NCCL ranks may lie on one GPU. NVIDIA's Multi-Process Service then lets them compute at the same
time; a daemon is started for the run if there is one on this machine. ``make test-gpu`` runs everything::

    python tests/gpu/run.py                       # everything; rewrites tests/gpu/RESULTS.md
    python tests/gpu/run.py --only ragged-2       # one group
    python tests/gpu/run.py --out FOLDER          # results elsewhere than in tests/gpu
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.shared_device import shared_device  # noqa: E402

OUTCOMES = (" PASSED", " FAILED", " ERROR", " SKIPPED", " XFAIL", " XPASS")
_SERVICE = "CUDA_MPS_"  # what the variables that name a service start with
_AT_ONCE = 4  # each has up to ten ranks; the service takes 48 processes
_NOT_SHOWN = (
    "Ranks that share one device do not show memory from `ncclMemAlloc` (a plain memory pool stands in) and "
    "symmetric memory.\n"
)


@dataclass(frozen=True)
class Group:
    """Test files that run in one pytest process."""

    what: str
    files: tuple[str, ...]
    options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    shares: bool = True
    """Whether it runs under the service. Not if it ends ranks while they compute, which would end the service
    for all, and not if it needs streams that overtake each other: the service has few queues per rank."""


def _spmd(prefix: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"tests/spmd/test_{prefix}_{part}.py" for part in parts or ("*",))


_POISONED = {"RAGGED_FSDP_DEBUG": "1"}
_RARE = ("compile", "cross_load", "errors", "example", "offload", "policy", "setters", "state_dict")
_COMMON = (
    "accumulation",
    "api",
    "checkpointing",
    "collectives",
    "extensions",
    "frozen",
    "hooks",
    "meta_init",
    "mixed_precision",
    "quantized",
    "shard_dim",
    "train_parity",
)

GROUPS = {  # those that take longest first
    "kernels": Group(
        "Muon's and the 8-bit kernels", ("tests/gpu/test_muon_*.py", "tests/gpu/test_optim_*.py")
    ),
    "muon": Group("Muon, 1 to 4 NCCL ranks", _spmd("muon")),
    "trainer": Group(
        "the trainer: splits, resuming",
        _spmd("train", "parallel", "runs"),
        ("-k", "not killed and not error_on_one_rank"),
    ),
    "fsdp": Group("fully_shard: training, 1 to 4 NCCL ranks", _spmd("fsdp", *_COMMON)),
    "fsdp-more": Group("fully_shard: checkpoints, setters, compile", _spmd("fsdp", *_RARE)),
    "device": Group(
        "memory, offload, equality with DDP and FSDP2",
        ("tests/gpu/test_fsdp_*.py",),
        ("-k", "not waiting_rank and not held_memory and not delays"),
    ),
    "core": Group(
        "DBuffer and the runtime, 1 to 4 NCCL ranks, freed memory poisoned",
        (*_spmd("dbuffer"), *_spmd("fsdp_core")),
        environment=_POISONED,
    ),
    "meshes": Group(
        "exchanges, meshes, reuse of buffers, freed memory poisoned",
        _spmd("fsdp", "exchange", "parallelism", "reuse"),
        environment=_POISONED,
    ),
    "optim": Group("8-bit Adam, Shampoo, fused AdamW, clipping", _spmd("optim")),
    "ragged-4": Group("ragged DTensors, 4 NCCL ranks", _spmd("ragged"), ("-k", "not 2]")),
    "ragged-2": Group("ragged DTensors, 2 NCCL ranks", _spmd("ragged"), ("-k", "2]")),
    "faults": Group(
        "a rank that is killed, or fails alone",
        _spmd("train", "runs"),
        ("-k", "killed or error_on_one_rank"),
        shares=False,
    ),
    "races": Group(
        "delayed streams, memory that a stream still uses",
        ("tests/gpu/test_fsdp_held_memory.py", "tests/gpu/test_fsdp_training.py"),
        ("-k", "held_memory or delays"),
        shares=False,
    ),
    "timeout": Group("a rank that stays away", ("tests/gpu/test_fsdp_core_timeout.py",), shares=False),
}


@dataclass(frozen=True)
class Result:
    """What became of a group."""

    name: str
    passed: bool
    output: str

    @property
    def summary(self) -> str:
        """pytest's last line, or how far it came."""
        last = (self.output.strip().splitlines() or [""])[-1]
        if last.startswith("==="):
            return last.strip("= ")
        counts = {word: self.output.count(f" {word}") for word in ("PASSED", "FAILED")}
        return f"cut off at the limit, {counts['PASSED']} passed and {counts['FAILED']} failed before"


def run_group(name: str, log: Path, environment: dict[str, str], deadline_s: float) -> Result:
    """One pytest process to its end, or to the deadline."""
    group = GROUPS[name]
    files = sorted(str(p.relative_to(ROOT)) for pattern in group.files for p in ROOT.glob(pattern))
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--durations=8", "-p", "no:cacheprovider"]
    with log.open("wb") as stream:  # a pipe would stop it when nobody reads
        process = subprocess.Popen(
            [*command, *group.options, *files],
            cwd=ROOT,
            env={**environment, "RAGGED_FSDP_TEST_DEVICE": "cuda", **group.environment},
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # so that its ranks end with it
        )
    try:
        passed = process.wait(max(0.0, deadline_s - time.monotonic())) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        passed = False
    result = Result(name, passed, log.read_text(errors="replace"))
    print(result.output if not passed else f"{name}: {result.summary}", flush=True)
    return result


def run(names: Sequence[str], environment: dict[str, str], deadline_s: float) -> list[Result]:
    """The groups, a few at a time."""
    logs = Path(tempfile.mkdtemp(prefix="test-gpu-"))
    shares = any(name.startswith(_SERVICE) for name in environment)
    print(
        f"{', '.join(names)}: " + ("the ranks share a GPU through MPS" if shares else "without MPS"),
        flush=True,
    )
    with ThreadPoolExecutor(_AT_ONCE) as workers:
        running = [workers.submit(run_group, name, logs / name, environment, deadline_s) for name in names]
        return [future.result() for future in running]


def machine() -> str:
    """The GPU and the versions, in one line."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"test-gpu: torch {torch.__version__} sees no CUDA device")
    found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{found}, torch {torch.__version__}, Python {platform.python_version()}"


def write(results: Sequence[Result], head: str, file: Path) -> None:
    """Every test with its outcome into ``file``, and a row per group into a table beside it, if all ran."""
    lines = [head]
    for result in results:
        lines += ["", f"== {result.name}: {GROUPS[result.name].what}: {result.summary}"]
        lines += [line for line in result.output.splitlines() if any(word in line for word in OUTCOMES)]
    file.write_text("\n".join(lines) + "\n")
    if len(results) < len(GROUPS):
        return
    rows = [f"| `{r.name}` | {GROUPS[r.name].what} | {r.summary} |" for r in results]
    table = ["| group | what | result |", "|---|---|---|", *rows]
    title = (
        f"# Last results of the GPU tests\n\n{head}. Every test: `{file.name}`. To repeat: `make test-gpu`.\n"
    )
    (file.parent / "RESULTS.md").write_text("\n".join([title, *table, "", _NOT_SHOWN]))


def main() -> int:
    """Run the groups and write their results; 0 if every test passed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, action="append", help="a group to run (repeatable)")
    parser.add_argument(
        "--limit-s", type=float, default=1e9, help="end what still runs after this many seconds"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "gpu", help="the folder for the results")
    options = parser.parse_args()
    now = datetime.now(UTC)
    head = f"{now:%Y-%m-%d %H:%M} UTC, {machine()}"
    deadline_s = time.monotonic() + options.limit_s
    names = options.only or list(GROUPS)
    results = []
    if together := [name for name in names if GROUPS[name].shares]:
        with shared_device() as service:
            results += run(together, {**os.environ, **service}, deadline_s)
    if alone := [name for name in names if not GROUPS[name].shares]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(_SERVICE)}
        results += run(alone, plain, deadline_s)
    file = options.out / f"results-{now:%Y-%m-%d}.txt"
    write(results, head, file)
    print(f"results in {file}")
    return int(not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
