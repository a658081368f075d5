"""What was aimed at, beside what the result files of the suite have.

The configuration is one: the all-to-all reduction under the expandable allocator. Where a goal has several
rows (two wires, three cases), the worst counts, for peers too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .network import WireName
from .report import LABELS, bound_ms, copies_ms, floor_ms, load

__all__ = ["GOALS", "Goal", "goal_table"]

_PEERS = ("fsdp2", "fsdp1", "megatron", "deepspeed")

Row = dict[str, Any]


def _over_floor(result: Row, row: Row) -> float:
    return row["forward_backward_ms"] / (floor_ms(result) or float("nan"))


def _over_bound(result: Row, row: Row) -> float:
    return row["forward_backward_ms"] / (bound_ms(result, row["wire"]) or float("nan"))


def _reserved(_result: Row, row: Row) -> float:
    return row["peak_reserved_gib"]


def _over_allocated(_result: Row, row: Row) -> float:
    return row["peak_reserved_gib"] / row["peak_allocated_gib"]


def _interleaved(_result: Row, row: Row) -> float:
    return sum(copies_ms(row)[i] for i in (1, 3))


def _host(result: Row, row: Row) -> float:
    theirs = next(r["host_ms"] for r in result["rows"] if r["implementation"] == "fsdp2")
    return row["host_ms"] / theirs


@dataclass(frozen=True)
class Goal:
    """A quantity, where it is read, and the most it may be."""

    text: str
    limit: float
    quantity: Callable[[Row, Row], float]
    cases: tuple[str, ...]
    """Result files; each also with ``-expandable`` where there is such a file."""
    wires: tuple[WireName, ...] = (None, 200.0, 400.0)
    digits: int = 2
    implementation: str = "ours-all-to-all"

    def worst(self, files: Iterable[Path], implementation: str) -> float | None:
        """The largest value among the rows this goal is about; None where one of the files has none."""
        found = []
        for file in files:
            (result,) = load([file]) if file.is_file() else ({"rows": []},)
            own = [r for r in result["rows"] if r["implementation"] == implementation and "host_ms" in r]
            values = [self.quantity(result, row) for row in own if row["wire"] in self.wires]
            if not values:
                return None
            found += values
        return max(found)

    def cell(self, value: float | None) -> str:
        """The value as the table has it: bold if it misses."""
        if value is None:
            return ""
        text = f"{value:.{self.digits}f}"
        return text if float(text) <= self.limit else f"**{text}**"


_THREE = ("gpt-oss-64", "gpt-oss-256", "llama-64")
_FREE, _WIRED = (None,), (200.0, 400.0)
GOALS = (
    Goal("GPT-OSS, 64 ranks, free wire, over floor", 1.40, _over_floor, ("gpt-oss-64",), _FREE),
    Goal("GPT-OSS, 256 ranks, free wire, over floor", 1.45, _over_floor, ("gpt-oss-256",), _FREE),
    Goal("GPT-OSS, 64 ranks, 400 GB/s, over bound", 1.12, _over_bound, ("gpt-oss-64",), _WIRED),
    Goal("GPT-OSS, 256 ranks, 400 GB/s, over bound", 1.14, _over_bound, ("gpt-oss-256",), _WIRED),
    Goal("Llama, free wire, gathers of zeros, over floor", 0.92, _over_floor, ("llama-64-zeros",), _FREE),
    Goal("Llama, free wire, gathers of weights, over floor", 0.92, _over_floor, ("llama-64",), _FREE),
    Goal("Llama, 200 GB/s, over bound", 1.15, _over_bound, ("llama-64",), _WIRED),
    Goal("GPT-OSS, 64 ranks, peak reserved GiB", 40, _reserved, ("gpt-oss-64",), digits=1),
    Goal("GPT-OSS, 256 ranks, peak reserved GiB", 40, _reserved, ("gpt-oss-256",), digits=1),
    Goal("Llama, peak reserved GiB", 13.5, _reserved, ("llama-64",), digits=1),
    Goal("reserved over allocated, all three", 1.08, _over_allocated, _THREE),
    Goal("interleaved copies, all three, ms", 0, _interleaved, _THREE, _WIRED, digits=1),
    Goal("host time, of FSDP2's", 0.6, _host, ("host",), digits=3),
    Goal("host time with the default reduction", 0.6, _host, ("host",), digits=3, implementation="ours"),
)


def goal_table(folder: Path) -> list[tuple[str, ...]]:
    """A row per goal: text, goal, reached, with the default allocator, and the best peer of the same run."""
    table = [("goal", "at most", "reached", "default allocator", "best peer, same run")]
    for goal in GOALS:
        default = [folder / f"{case}.json" for case in goal.cases]
        files = [folder / f"{case}-expandable.json" for case in goal.cases]
        if (own := goal.worst(files, goal.implementation)) is None:
            own, files, default = goal.worst(default, goal.implementation), default, []
        peers = [(value, name) for name in _PEERS if (value := goal.worst(files, name)) is not None]
        best = f"{LABELS[min(peers)[1]]} {min(peers)[0]:.{goal.digits}f}" if peers else ""
        beside = goal.cell(goal.worst(default, goal.implementation)) if default else ""
        table.append((goal.text, f"{goal.limit:g}", goal.cell(own), beside, best))
    return table
