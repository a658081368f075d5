"""Runs every test that a GPU can run, in groups side by side, and keeps the results with their dates.

Several NCCL ranks may lie on one GPU. NVIDIA's Multi-Process Service then lets them compute at the same
time; a daemon is started for the run if there is one on this machine. ``make test-gpu`` runs everything::

    python tests/gpu/run.py                       # everything
    python tests/gpu/run.py --only ragged-2       # one group: its results and its row in RESULTS.md
    python tests/gpu/run.py --only tuning         # all groups whose names begin with it
    python tests/gpu/run.py --out FOLDER          # results elsewhere than in tests/gpu

All need pytest, hypothesis and what the extra ``cli`` has (tomli-w for the trainer); ``tuning`` needs peft,
accelerate, datasets, trl and bitsandbytes, ``replicas`` torchft. They are installed, or in a folder of
``PYTHONPATH`` (``pip install --target FOLDER``) that is called ``site-packages``: what lies elsewhere
``datasets`` takes for code of the user's, which it cannot hash. Of these two, what cannot be imported is
skipped, and the results say why.
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

OUTCOMES = (" PASSED", " FAILED", " ERROR", " SKIPPED", " XFAIL", " XPASS", "SKIPPED [")
_SERVICE = "CUDA_MPS_"  # what the variables that name a service start with
_NO_TESTS = 5
_AT_ONCE = 4  # each has up to ten ranks; the service takes 48 processes, and stalls with many fewer that wait
_TITLE = """# Last results of the GPU tests

Every test with its outcome is in `results/`, a file per group. To repeat: `make test-gpu`, or one group with
`python tests/gpu/run.py --only NAME`.
"""
_BY_HAND = "## Other runs"  # from here on the page is left as it is
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
    ranks: str = ""
    """Numbers of ranks; all if empty."""
    shares: bool = True
    """Whether it runs under the service. Not if it ends ranks while they compute or tries kernels, since one
    fault ends the service for all; not if streams must overtake each other: it has few queues per rank."""


def _spmd(prefix: str, *parts: str) -> tuple[str, ...]:
    return tuple(f"tests/spmd/test_{prefix}_{part}.py" for part in parts or ("*",))


def _found(patterns: tuple[str, ...]) -> set[str]:
    """The files that are there."""
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}


_POISONED = {"RAGGED_FSDP_DEBUG": "1"}
_RUNTIME = (
    *_spmd("dbuffer"),
    *_spmd("fsdp", "buffers", "casts", "debug", "edges", "exchange", "gradients", "levels"),
    *_spmd("fsdp", "late_streams", "memory_pools", "parallelism", "recovery", "residence", "reuse"),
)
_PIPELINE, _HANG = _spmd("fsdp", "pipeline"), _spmd("fsdp", "hang")
_USE = tuple(_found(_spmd("fsdp")) - _found((*_RUNTIME, *_PIPELINE, *_HANG)))
_RUNS = _spmd("train", "runs")
_RESUMES, _CURVES = "bit_for_bit", "the_curve or world_sizes"
_ENDS_RANKS = "killed or error_on_one_rank"
_RACES, _GRAPHS = "held_memory or delays or beside_updates", "cuda_graph"


def _by_ranks(name: str, what: str, files: tuple[str, ...], **more: dict[str, str]) -> dict[str, Group]:
    """A group for 2 ranks, one for 4, one for the rest: each starts few ranks and keeps them."""
    sizes = {"2": "2 NCCL ranks", "4": "4 NCCL ranks", "1-3": "1 and 3 NCCL ranks"}
    counts = {"2": "2", "4": "4", "1-3": "0,1,3"}
    return {
        f"{name}-{size}": Group(f"{what}, {ranks}", files, ranks=counts[size], **more)
        for size, ranks in sizes.items()
    }


def _tuning(method: str) -> Group:
    """The cells of one method, whose ids begin with it."""
    what = f"fine-tuning, {method}: four loops, saved on 2 NCCL ranks, resumed on 3, merged, exported"
    return Group(what, _spmd("tuning", "matrix"), ("-k", f"[{method}-"), {"HF_HUB_OFFLINE": "1"})


GROUPS = {  # those that take longest first
    **_by_ranks("fsdp", "fully_shard", _USE),
    **_by_ranks("core", "DBuffer and the runtime, freed memory poisoned", _RUNTIME, environment=_POISONED),
    **{f"tuning-{method}": _tuning(method) for method in ("lora", "qlora", "full")},
    "pipeline": Group("fully_shard in the stages of a pipeline, 4 NCCL ranks", _PIPELINE),
    "muon": Group("Muon, 1 to 4 NCCL ranks", _spmd("muon")),
    "resume": Group("the trainer: resuming bit for bit, 4 NCCL ranks", _RUNS, ("-k", _RESUMES)),
    "curves": Group("the trainer: world sizes, FSDP2, DDP, 1 to 4 NCCL ranks", _RUNS, ("-k", _CURVES)),
    "trainer": Group(
        "the trainer: damage, interrupts, refusals, metrics",
        _RUNS,
        ("-k", f"not ({_RESUMES} or {_CURVES} or {_ENDS_RANKS})"),
    ),
    "splits": Group("the trainer: tensor and expert parallelism, 4 NCCL ranks", _spmd("train", "parallel")),
    **_by_ranks("experts", "expert parallelism: parity, moves, dispatch", _spmd("experts")),
    "library": Group(
        "the trainer: models of transformers, 2 and 4 NCCL ranks",
        _spmd("train", "huggingface"),
        ("-k", "not equals_the_library_s"),  # that one computes on the host
    ),
    "device": Group(
        "memory, offload, equality with DDP and FSDP2",
        ("tests/gpu/test_fsdp_*.py", "tests/gpu/test_muon_offload.py", "tests/gpu/test_optim_offload.py"),
        ("-k", f"not ({_RACES} or {_GRAPHS})"),
    ),
    "fp8": Group("FP8 training: bits of one process, 1 to 4 NCCL ranks", _spmd("fp8")),
    "optim": Group("8-bit Adam, Shampoo, fused AdamW, clipping", _spmd("optim")),
    **_by_ranks("ragged", "ragged DTensors", _spmd("ragged")),
    "kernels": Group(
        "Muon's and the 8-bit kernels, decoding of gathered codes, orders of rows",
        ("tests/gpu/test_*_kernels.py", "tests/gpu/test_optim_kernel.py"),
        ("-n", "4"),  # most of their time is the compiler's
        shares=False,
    ),
    "races": Group(
        "delayed streams, copies beside updates, memory that a stream still uses",
        ("tests/gpu/test_fsdp_*.py", "tests/gpu/test_optim_offload.py"),
        ("-k", _RACES),
        shares=False,
    ),
    "graphs": Group(
        "steps and dispatches of experts in CUDA graphs, 1 to 4 NCCL ranks",
        ("tests/gpu/test_*_cuda_graph.py",),
        shares=False,
    ),
    "replicas-copies": Group(
        "replicas: averages, and copies beside a forward, 4 NCCL ranks", ("tests/spmd/test_replicas.py",)
    ),
    "replicas-torchft": Group(
        "replicas under torchft: one is killed and comes back, 2 x 2 NCCL ranks",
        _spmd("replicas", "torchft"),
        shares=False,
    ),
    "faults": Group("a rank that is killed, or fails alone", _RUNS, ("-k", _ENDS_RANKS), shares=False),
    "hang": Group("a rank that stays away", _HANG, shares=False),
}


@dataclass(frozen=True)
class Result:
    """What became of a group."""

    name: str
    code: int | None
    """pytest's exit code; None if the limit was reached."""
    output: str

    @property
    def passed(self) -> bool:
        """Whether every test passed or was skipped; pytest has a code for files that are skipped whole."""
        return self.code == 0 or (self.code == _NO_TESTS and "SKIPPED [" in self.output)

    @property
    def summary(self) -> str:
        """pytest's last line, or how far it came."""
        last = (self.output.strip().splitlines() or [""])[-1]
        if self.code is not None:
            return last.strip("= ")
        counts = {word: self.output.count(f" {word}") for word in ("PASSED", "FAILED")}
        return f"cut off at the limit, {counts['PASSED']} passed and {counts['FAILED']} failed before"


def run_group(name: str, log: Path, environment: dict[str, str], deadline_s: float) -> Result:
    """One pytest process to its end, or to the deadline."""
    group = GROUPS[name]
    files = sorted(_found(group.files))
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "--tb=short", "--durations=8"]
    command += ["-p", "no:cacheprovider"]
    with log.open("wb") as stream:  # a pipe would stop it when nobody reads
        process = subprocess.Popen(
            [*command, *group.options, *files],
            cwd=ROOT,
            env={
                **environment,
                "RAGGED_FSDP_TEST_DEVICE": "cuda",
                "RAGGED_FSDP_TEST_RANKS": group.ranks,
                **group.environment,
            },
            stdout=stream,
            stderr=stream,
            start_new_session=True,  # so that its ranks end with it
        )
    result = Result(name, _wait(process, deadline_s), log.read_text(errors="replace"))
    print(f"{name}: {result.summary}" if result.passed else result.output, flush=True)
    return result


def _wait(process: subprocess.Popen[bytes], deadline_s: float) -> int | None:
    """The exit code; at the deadline the process ends its ranks itself if it can, and all end with it."""
    for signal_sent, left_s in (
        (signal.SIGINT, max(0.0, deadline_s - time.monotonic())),
        (signal.SIGKILL, 15),
    ):
        try:
            code = process.wait(left_s)
            return code if signal_sent is signal.SIGINT else None
        except subprocess.TimeoutExpired:
            send = os.kill if signal_sent is signal.SIGINT else os.killpg
            send(process.pid, signal_sent)
    process.wait()
    return None


def run(names: Sequence[str], environment: dict[str, str], at_once: int, deadline_s: float) -> list[Result]:
    """The groups, a few at a time."""
    logs = Path(tempfile.mkdtemp(prefix="test-gpu-"))
    shares = any(name.startswith(_SERVICE) for name in environment)
    print(
        f"{', '.join(names)}: " + ("the ranks share a GPU through MPS" if shares else "without MPS"),
        flush=True,
    )
    with ThreadPoolExecutor(at_once) as workers:
        running = [workers.submit(run_group, name, logs / name, environment, deadline_s) for name in names]
        return [future.result() for future in running]


def _family(name: str) -> str:
    """What the names of related groups begin with."""
    return name.partition("-")[0]


def _families() -> list[str]:
    return sorted({_family(name) for name in GROUPS} - set(GROUPS))


def machine() -> str:
    """The GPU and the versions, in one line."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(f"test-gpu: torch {torch.__version__} sees no CUDA device")
    found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{found}, torch {torch.__version__}, Python {platform.python_version()}"


def write(results: Sequence[Result], now: str, folder: Path) -> None:
    """The outcome of every test into a file per group, and a table of all groups that ever ran."""
    files = folder / "results"
    files.mkdir(parents=True, exist_ok=True)
    for result in results:
        tests = [line for line in result.output.splitlines() if any(word in line for word in OUTCOMES)]
        (files / f"{result.name}.txt").write_text("\n".join([now, machine(), result.summary, *tests]) + "\n")
    rows = []
    for name, group in GROUPS.items():
        if (files / f"{name}.txt").exists():
            when, where, summary = (files / f"{name}.txt").read_text().splitlines()[:3]
            rows.append(f"| `{name}` | {group.what} | {summary} | {when} | {where} |")
    page = folder / "RESULTS.md"
    before = page.read_text() if page.exists() else ""
    by_hand = before[before.index(_BY_HAND) :] if _BY_HAND in before else ""
    table = ["| group | what | result | UTC | machine |", "|---|---|---|---|---|", *rows]
    page.write_text("\n".join([_TITLE, *table, "", _NOT_SHOWN, by_hand]).rstrip() + "\n")


def main() -> int:
    """Run the groups and write their results; 0 if every test passed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--only",
        choices=[*GROUPS, *_families()],
        action="append",
        help="a group to run, or those of one name (repeatable)",
    )
    parser.add_argument("--at-once", type=int, default=_AT_ONCE, help="groups that run side by side")
    parser.add_argument(
        "--limit-s", type=float, default=1e9, help="end what still runs after this many seconds"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "gpu", help="the folder for the results")
    options = parser.parse_args()
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    machine()
    deadline_s = time.monotonic() + options.limit_s
    names = [name for name in GROUPS if not options.only or {name, _family(name)} & set(options.only)]
    results = []
    if together := [name for name in names if GROUPS[name].shares]:
        with shared_device() as service:
            results += run(together, {**os.environ, **service}, options.at_once, deadline_s)
    if alone := [name for name in names if not GROUPS[name].shares]:
        plain = {name: value for name, value in os.environ.items() if not name.startswith(_SERVICE)}
        results += run(alone, plain, options.at_once, deadline_s)
    write(results, now, options.out)
    print(f"results in {options.out / 'RESULTS.md'}")
    return int(not all(result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main())
