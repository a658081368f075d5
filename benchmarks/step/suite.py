"""All cases of the committed figures, most telling first, so that a run that is cut short still counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .case import Case
from .runner import run_case, save

__all__ = ["SUITE", "run_suite"]

_GPT_OSS = Case("gpt-oss-120b", 4, 8192, 64, (None, 400.0), warmup=2, iterations=5)
_LLAMA = Case("llama-3-70b", 4, 4096, 64, (None, 200.0), warmup=2, iterations=5)
_DEEPSEEK = Case("deepseek-v3", 2, 4096, 256, (None, 400.0), warmup=2, iterations=5)
_HOST = Case("small-dense", 24, 128, 64, payload="nothing", warmup=2, iterations=10)
_OURS = ("ours-all-to-all", "ours")
_EXPANDABLE_GPT_OSS = replace(_GPT_OSS, allocator="expandable", wires=(400.0,))
_EXPANDABLE_LLAMA = replace(_LLAMA, allocator="expandable", wires=(200.0,))
_NOTHING_KEPT = (("reshard_after_forward", True),)
_BUDGET = (("gathered_budget_bytes", 24 << 30), ("reshard_after_forward", "auto"))

_PEERS = ("fsdp2", "fsdp1", "megatron", "deepspeed")

SUITE: tuple[tuple[str, Case, tuple[str, ...]], ...] = (
    ("gpt-oss-64", _GPT_OSS, ("none", *_OURS, *_PEERS)),
    ("llama-64", _LLAMA, ("none", *_OURS, *_PEERS)),
    ("gpt-oss-256", replace(_GPT_OSS, ranks=256), ("ours-all-to-all", "fsdp2", "fsdp1", "megatron")),
    ("host", _HOST, ("ours", "ours-all-to-all", "fsdp2", "none")),
    ("llama-64-zeros", replace(_LLAMA, payload="zeros"), ("ours-all-to-all", "fsdp2", "fsdp1")),
    ("llama-64-expandable", _EXPANDABLE_LLAMA, ("ours-all-to-all", "fsdp2", "fsdp1", "megatron")),
    ("gpt-oss-64-expandable", _EXPANDABLE_GPT_OSS, ("ours-all-to-all", "fsdp2", "megatron")),
    ("gpt-oss-64-channels", replace(_GPT_OSS, delivery="channels"), ("ours-all-to-all", "fsdp2")),
    ("llama-64-channels", replace(_LLAMA, delivery="channels"), ("ours-all-to-all", "fsdp2")),
    ("gpt-oss-64-shard1", replace(_GPT_OSS, wires=(400.0,)), ("fsdp2-shard1",)),
    ("gpt-oss-128", replace(_GPT_OSS, ranks=128), ("ours-all-to-all", "fsdp2")),
    ("deepseek-256", _DEEPSEEK, ("none", "ours-all-to-all", "fsdp2")),
    ("gpt-oss-64-more", _GPT_OSS, ("ours-2-buffers", "ours-all-to-all-2")),
    ("gpt-oss-64-nothing-kept", replace(_GPT_OSS, options=_NOTHING_KEPT), ("ours-all-to-all",)),
    ("gpt-oss-64-budget", replace(_GPT_OSS, options=_BUDGET), ("ours-all-to-all",)),
)
"""Names of the result files, cases, implementations. The floor does not depend on the number of ranks."""


def run_suite(
    folder: Path,
    say: Callable[[str], None],
    *,
    deadline_s: float,
    limit_s: float,
    trace_dir: Path | None = None,
) -> list[Path]:
    """Run until the deadline; each implementation's rows are on disk before the next one starts.

    Traces are kept for our best configuration only: they are large.
    """
    begin, written = time.monotonic(), []
    for name, case, implementations in SUITE:
        result: dict[str, Any] = {"case": case.to_json(), "rows": []}
        for implementation in implementations:
            left = deadline_s - (time.monotonic() - begin)
            if left < 5:
                say(f"{name}, {implementation}: skipped, the deadline is reached")
                continue
            traces = trace_dir if implementation == _OURS[0] else None
            found = run_case(case, [implementation], say, limit_s=min(limit_s, left), trace_dir=traces)
            result["rows"] += found["rows"]
            save(folder / f"{name}.json", [result])
        if result["rows"]:
            written.append(folder / f"{name}.json")
    return written
