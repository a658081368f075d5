"""All cases of the committed figures, most telling first, so that a run that is cut short still counts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
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
_EXPANDABLE_GPT_OSS = replace(_GPT_OSS, allocator="expandable", wires=(400.0,))
_EXPANDABLE_LLAMA = replace(_LLAMA, allocator="expandable", wires=(200.0,))

_OURS = ("ours-all-to-all", "ours")
_FEW = ("none", "ours-all-to-all", "fsdp2", "fsdp1", "megatron")
_ALL = ("none", *_OURS, "ours-all-to-all-nothing-kept", "fsdp2", "fsdp1", "megatron", "deepspeed")
_OPTIONS = (
    "ours-2-buffers",
    *(
        f"ours-all-to-all-{option}"
        for option in ("2-pending", "nothing-kept", "budget", "no-prefetch", "prefetch-2", "2-communicators")
    ),
)

SUITE: dict[str, tuple[Case, tuple[str, ...]]] = {
    "gpt-oss-64": (_GPT_OSS, _ALL),
    "llama-64": (_LLAMA, _ALL),
    "gpt-oss-256": (replace(_GPT_OSS, ranks=256), _FEW),
    "host": (_HOST, ("ours", "ours-all-to-all", "fsdp2", "none")),
    "deepseek-256": (_DEEPSEEK, _ALL),
    "gpt-oss-128": (replace(_GPT_OSS, ranks=128), _FEW),
    "gpt-oss-64-shard1": (replace(_GPT_OSS, wires=(400.0,)), ("ours-all-to-all", "fsdp2", "fsdp2-shard1")),
    "gpt-oss-64-options": (_GPT_OSS, ("none", *_OURS, *_OPTIONS)),
    "gpt-oss-64-channels": (replace(_GPT_OSS, delivery="channels"), ("none", *_OURS, *_FEW[2:])),
    "llama-64-channels": (replace(_LLAMA, delivery="channels"), ("none", *_OURS, *_FEW[2:])),
    "llama-64-zeros": (replace(_LLAMA, payload="zeros"), ("none", "ours-all-to-all", "fsdp2", "fsdp1")),
    "llama-64-expandable": (_EXPANDABLE_LLAMA, _FEW),
    "gpt-oss-64-expandable": (_EXPANDABLE_GPT_OSS, _FEW),
}
"""Result files: case and implementations. Each has its own floor, so that a table is of one run."""


def run_suite(
    folder: Path,
    say: Callable[[str], None],
    *,
    names: Collection[str] = tuple(SUITE),
    deadline_s: float,
    limit_s: float,
    trace_dir: Path | None = None,
) -> list[Path]:
    """Run the named cases, in the order of the names, until the deadline; the files of this run.

    A case whose file is complete is passed over, so an interrupted suite can go on; one whose file is not
    is measured anew as a whole. Each implementation's rows are on disk before the next one starts. Traces
    are kept for our best configuration only: they are large.
    """
    begin, written = time.monotonic(), []
    for name in names:
        case, implementations = SUITE[name]
        path = folder / f"{name}.json"
        if _is_complete(path, case, implementations):
            say(f"{name}: {path} is complete")
            continue
        result: dict[str, Any] = {"case": case.to_json(), "rows": []}
        for implementation in implementations:
            left = deadline_s - (time.monotonic() - begin)
            if left < 5:
                say(f"{name}, {implementation}: skipped, the deadline is reached")
                continue
            traces = trace_dir if implementation == _OURS[0] else None
            found = run_case(case, [implementation], say, limit_s=min(limit_s, left), trace_dir=traces)
            result["rows"] += found["rows"]
            save(path, [result])
        if result["rows"]:
            written.append(path)
    return written


def _is_complete(path: Path, case: Case, implementations: Collection[str]) -> bool:
    """Whether the file has this very case with a row of every implementation, failed ones included."""
    if not path.is_file():
        return False
    (result,) = json.loads(path.read_text())["results"]
    same = result["case"] == json.loads(json.dumps(case.to_json()))
    return same and {row["implementation"] for row in result["rows"]} >= set(implementations)
