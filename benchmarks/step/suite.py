"""All cases of the committed figures, most telling first, so that a run that is cut short still counts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from .case import Case
from .report import case_of
from .runner import run_case, save
from .turns import take_turns

__all__ = ["SUITE", "Planned", "run_suite"]


class Planned(NamedTuple):
    """A result file: what is measured, and of whom."""

    case: Case
    implementations: tuple[str, ...]
    rounds: int = 0
    """0: one implementation after the other; else they take so many turns (host times)."""


_GPT_OSS = Case("gpt-oss-120b", 4, 8192, 64, (None, 400.0), warmup=2, iterations=5)
_LLAMA = Case("llama-3-70b", 4, 4096, 64, (None, 200.0), warmup=2, iterations=5)
_DEEPSEEK = Case("deepseek-v3", 2, 4096, 256, (None, 400.0), warmup=2, iterations=5, allocator="expandable")
_HOST = Case("small-dense", 24, 128, 64, payload="nothing", iterations=10)
_GPT_OSS_256 = replace(_GPT_OSS, ranks=256)
_EXPANDABLE_GPT_OSS, _EXPANDABLE_LLAMA, _EXPANDABLE_GPT_OSS_256 = (
    replace(case, allocator="expandable") for case in (_GPT_OSS, _LLAMA, _GPT_OSS_256)
)

_NODES = Case("gpt-oss-120b", 8, 8192, 64, ("h200-400g",), warmup=2, iterations=5, allocator="expandable")
_NODES_LLAMA = replace(_NODES, model="llama-3-70b", layers=4, tokens=4096, iterations=15)
_NODES_DEEPSEEK = replace(_NODES, model="deepseek-v3", layers=2, tokens=4096, ranks=256)

_OURS = ("ours-all-to-all", "ours")
_PEERS = ("fsdp2", "fsdp1", "megatron")
_FEW = ("none", "ours-all-to-all", *_PEERS)
_MOST = ("none", *_OURS, *_PEERS)
_CODES = ("none", "ours-all-to-all", "ours-all-to-all-int8", "ours-all-to-all-float8")
_LEVELS = ("fsdp2", "ours-two-level-nothing-kept")
_EQUAL = ("fsdp2", "ours-nothing-kept", "ours-two-level-nothing-kept")
_KEPT_BY_NODES = ("fsdp2-reshard8", "fsdp2-reshard8-kept2")
_KEPT_BY_NODES += ("ours-two-level-reshard8", "ours-two-level-reshard8-kept2")
_MORE_KEPT = tuple(f"{name}-kept{n}" for n in (3, 4) for name in ("fsdp2", "ours-two-level"))
_FP8 = ("ours-fp8-all-to-all", "ours-fp8-all-to-all-nothing-kept")
_FP8_PEERS = ("fsdp2", "fsdp2-torchao-blockwise", "fsdp2-torchao-rowwise", "fsdp2-torchao-gathered")
_KEPT_CODES = ("", "-kept2", "-kept4")
_OTHER_PEERS = ("megatron", "megatron-double", "deepspeed", "deepspeed-layers")

SUITE: dict[str, Planned] = {
    "gpt-oss-nodes-64": Planned(
        _NODES, (*_EQUAL, "ours-two-level-float8", "fsdp2-bf16", "fsdp2-kept2", "ours-two-level")
    ),
    "llama-nodes-64": Planned(_NODES_LLAMA, _EQUAL),
    "llama-nodes-64-x8": Planned(replace(_NODES_LLAMA, layers=8), _LEVELS),
    "llama-nodes-256": Planned(replace(_NODES_LLAMA, ranks=256), _EQUAL),
    "deepseek-nodes-256": Planned(_NODES_DEEPSEEK, _EQUAL),
    "deepseek-nodes-256-separate": Planned(replace(_NODES_DEEPSEEK, model="deepseek-v3-separate"), _LEVELS),
    "gpt-oss-nodes-64-more-kept": Planned(_NODES, (*_LEVELS, "fsdp2-kept2", "ours-two-level", *_MORE_KEPT)),
    "gpt-oss-nodes-64-kept": Planned(
        _NODES, (*_LEVELS, "fsdp2-kept2", "ours-two-level", "ours-two-level-float8", *_KEPT_BY_NODES)
    ),
    "gpt-oss-nodes-64-codes": Planned(
        _NODES, ("fsdp2", "fsdp2-kept2", "fsdp2-kept4", *(f"ours-two-level-float8{n}" for n in _KEPT_CODES))
    ),
    "gpt-oss-nodes-64-peers": Planned(
        replace(_NODES, layers=4), (*_LEVELS, "fsdp2-kept2", "ours-two-level", *_OTHER_PEERS)
    ),
    "gpt-oss-nodes-64-recompute": Planned(replace(_NODES, recompute=True), _LEVELS),
    "gpt-oss-nodes-64-8192": Planned(replace(_NODES, sequence=8192), _LEVELS),
    "gpt-oss-nodes-64-carveout": Planned(replace(_NODES, carveout=4), (*_LEVELS, "ours-two-level-float8")),
    "gpt-oss-nodes-64-sgd": Planned(replace(_NODES, optimizer="sgd"), _LEVELS),
    "gpt-oss-paper-64": Planned(replace(_NODES, layers=4, wires=("paper",)), _LEVELS),
    "gpt-oss-nodes-256": Planned(replace(_NODES, ranks=256), _LEVELS),
    "gpt-oss-hsdp-256": Planned(replace(_NODES, ranks=256, replicas=2), _LEVELS),
    "gpt-oss-hsdp-512": Planned(replace(_NODES, ranks=512, replicas=2), _LEVELS),
    "gpt-oss-hsdp-1024": Planned(replace(_NODES, ranks=1024, replicas=4), _LEVELS),
    "gpt-oss-nodes-1024": Planned(
        replace(_NODES, ranks=1024), ("ours-two-level-nothing-kept", "fsdp2-shard1")
    ),
    "llama-64-fp8": Planned(
        replace(_EXPANDABLE_LLAMA, wires=(400.0,)), ("none", *_FP8, *_FP8_PEERS, "ours-all-to-all")
    ),
    # with edges of tiles ranks have different numbers of scales: rank 0's are not those of all
    "gpt-oss-nodes-64-fp8": Planned(
        replace(_NODES, payload="distinct"), (*_LEVELS, "ours-fp8-tiles-two-level")
    ),
    "gpt-oss-64-expandable": Planned(
        _EXPANDABLE_GPT_OSS, (*_MOST, "deepspeed", "ours-all-to-all-nothing-kept")
    ),
    "llama-64-expandable": Planned(_EXPANDABLE_LLAMA, (*_MOST, "deepspeed")),
    "gpt-oss-256-expandable": Planned(_EXPANDABLE_GPT_OSS_256, (*_MOST, "deepspeed")),
    "llama-64-zeros": Planned(replace(_EXPANDABLE_LLAMA, payload="zeros"), _FEW),
    "llama-64": Planned(_LLAMA, ("none", *_OURS, "fsdp2")),
    "gpt-oss-64": Planned(_GPT_OSS, _MOST),
    "gpt-oss-256": Planned(_GPT_OSS_256, _FEW),
    "host": Planned(_HOST, ("none", *_OURS, "fsdp2"), rounds=8),
    "deepseek-256": Planned(_DEEPSEEK, (*_MOST, "deepspeed")),
    "gpt-oss-64-shard1": Planned(
        replace(_GPT_OSS, wires=(400.0,)), ("ours-all-to-all", "fsdp2", "fsdp2-shard1")
    ),
    "gpt-oss-64-bytes": Planned(_EXPANDABLE_GPT_OSS, (*_CODES, "fsdp2-bf16")),
    "llama-64-bytes": Planned(replace(_EXPANDABLE_LLAMA, wires=(None, 200.0, 100.0)), _CODES),
}
"""The result files by name. Each has its own floor, so that a table is of one run."""


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
        path, planned = folder / f"{name}.json", SUITE[name]
        if _is_complete(path, planned):
            say(f"{name}: {path} is complete")
            continue
        result: dict[str, Any] = {"case": planned.case.to_json(), "rows": []}
        for together in [planned.implementations] if planned.rounds else zip(planned.implementations):
            left = deadline_s - (time.monotonic() - begin)
            if left < 5:
                say(f"{name}, {', '.join(together)}: skipped, the deadline is reached")
                continue
            result["rows"] += _rows(planned, together, say, min(limit_s, left), trace_dir)
            save(path, [result])
        if result["rows"]:
            written.append(path)
    return written


def _rows(
    planned: Planned,
    together: tuple[str, ...],
    say: Callable[[str], None],
    limit_s: float,
    trace_dir: Path | None,
) -> list[dict[str, Any]]:
    """Rows of one implementation, or of all that take turns."""
    if planned.rounds:
        limits = {"rounds": planned.rounds, "limit_s": limit_s}
        return take_turns(planned.case, together, say, graphs=True, **limits)["rows"]
    traces = trace_dir if together[0] == _OURS[0] else None
    return run_case(planned.case, together, say, limit_s=limit_s, trace_dir=traces)["rows"]


def _is_complete(path: Path, planned: Planned) -> bool:
    """Whether the file has this very case with a row of every implementation, failed ones included."""
    if not path.is_file():
        return False
    (result,) = json.loads(path.read_text())["results"]
    return case_of(result) == planned.case and {row["implementation"] for row in result["rows"]} >= set(
        planned.implementations
    )
