"""What the step benchmark's host took to launch, from its own results.

The benchmark's network is a process group written in Python, so that a collective costs its host far more
than NCCL's would. A row whose host was done within half of its step never waited for the device: its time
over that of layers that are not sharded, by the number of its collectives, is what one collective takes.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ragged_fsdp.predict.books import Host

__all__ = ["host_of"]

STEP_RESULTS = Path(__file__).parents[1] / "step" / "results"
_NOT_WAITING = 0.5
"""Of a step: a host that took no longer had launched everything while the device was busy."""


def host_of(model: str, implementation: str) -> Host:
    """The host of a row: ours by the mean of the rows with two levels, FSDP2 by the mean of its own."""
    layer_ms, collective_ms = _launches()
    kind = "fsdp2" if implementation.startswith("fsdp2") else "ours"
    return Host(collective_s=collective_ms[kind] / 1e3, layer_s=layer_ms[model] / 1e3)


@cache
def _launches() -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of the layers of each model, and of one collective by who shards."""
    layers: dict[str, list[float]] = defaultdict(list)
    for case, row in _rows():
        if row["implementation"] == "none":
            layers[case["model"]].append(row["host_ms"] / case["layers"])
    layer_ms = {model: statistics.fmean(found) for model, found in layers.items()}
    collectives: dict[str, list[float]] = defaultdict(list)
    for case, row in _rows():
        name, more = row["implementation"], row["host_ms"] - layer_ms.get(case["model"], 0.0) * case["layers"]
        kind = "ours" if name.startswith("ours-two-level") else "fsdp2" if name.startswith("fsdp2") else None
        if kind and row["host_ms"] < _NOT_WAITING * row["forward_backward_ms"]:
            collectives[kind].append(more / sum(row["collectives"].values()))
    return layer_ms, {kind: statistics.fmean(found) for kind, found in collectives.items()}


def _rows() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of layers that are not computed again, which takes the host a forward more."""
    for path in sorted(STEP_RESULTS.glob("*.json")):
        for result in json.loads(path.read_text()).get("results", ()):
            case = result.get("case", {})
            if case.get("payload") != "repeat" or case.get("delivery") != "fake" or case.get("recompute"):
                continue
            for row in result.get("rows", ()):
                if "host_ms" in row:
                    yield case, row
