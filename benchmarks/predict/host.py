"""What the step benchmark's host took to launch, from its own results.

The benchmark's network is a process group written in Python, so that a collective costs its host far more
than NCCL's would. A row whose host was done within half of its step never waited for the device: its time
over that of layers that are not sharded, by the number of its collectives, is what one collective takes. The
parameters of a layer have a part in it, which is that of the small layers of ``host.json``.

The layers of a model take what they took without sharding. A model that never ran so takes, for each of its
operations, what the others took on average.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.predict.layers import stack_workload
from benchmarks.step.shapes import MODELS

from ragged_fsdp.predict.books import Host
from ragged_fsdp.predict.costs import count_costs
from ragged_fsdp.predict.step import LAUNCHES

__all__ = ["host_of"]

STEP_RESULTS = Path(__file__).parents[1] / "step" / "results"
_NOT_WAITING = 0.5
"""Of a step: a host that took no longer had launched everything while the device was busy."""
_UNTIL = "2026-11-17"
"""Rows that were written later are of a machine whose host launches faster."""


def host_of(model: str, implementation: str) -> Host:
    """The host of a row: ours by the mean of the rows with two levels, FSDP2 by the mean of its own."""
    layer_ms, collective_ms = _launches()
    kind = "fsdp2" if implementation.startswith("fsdp2") else "ours"
    host = Host(collective_ms[kind] / 1e3, _parameter_ms(kind) / 1e3)
    if model in layer_ms:
        return replace(host, layer_s=layer_ms[model] / 1e3)
    return replace(host, operation_s=_operation_ms() / 1e3)


@cache
def _parameter_ms(kind: str) -> float:
    """Milliseconds of one parameter that is gathered or reduced, by small layers without a network."""
    (result,) = json.loads((STEP_RESULTS / "host.json").read_text())["results"]
    rows = {row["implementation"]: row for row in result["rows"]}
    each_ms = (rows[kind]["host_ms"] - rows["none"]["host_ms"]) / sum(rows[kind]["collectives"].values())
    collective, parameter = LAUNCHES["fsdp2" if kind == "fsdp2" else "ragged"]
    return each_ms * parameter / (collective + parameter * _parameters(result["case"]["model"]))


def _parameters(model: str) -> int:
    """Of one layer."""
    return len(stack_workload(model).kinds[0].shapes)


@cache
def _operation_ms() -> float:
    """Milliseconds of one operation of a layer that is not sharded: the mean of the models."""
    layer_ms, _ = _launches()
    found = []
    for model, milliseconds in layer_ms.items():
        workload = stack_workload(model)
        cost = count_costs(workload, 1, MODELS[model].sequence)[workload.kinds[0].signature]
        found.append(milliseconds / (len(cost.forward.operations) + len(cost.backward.operations)))
    return statistics.fmean(found)


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
        name, model = row["implementation"], case["model"]
        kind = "ours" if name.startswith("ours-two-level") else "fsdp2" if name.startswith("fsdp2") else None
        if (
            kind is None
            or model not in layer_ms
            or row["host_ms"] >= _NOT_WAITING * row["forward_backward_ms"]
        ):
            continue
        calls = row["collectives"]
        handled = calls["all_gather"] + case["layers"]  # a group is gathered, or reduced by all its calls
        more_ms = row["host_ms"] - layer_ms[model] * case["layers"]
        more_ms -= _parameter_ms(kind) * _parameters(model) * handled
        collectives[kind].append(more_ms / sum(calls.values()))
    return layer_ms, {kind: statistics.fmean(found) for kind, found in collectives.items()}


def _rows() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Rows of layers that are not computed again, which takes the host a forward more."""
    for path in sorted(STEP_RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        for result in content.get("results", ()) if content.get("written", "") < _UNTIL else ():
            case = result.get("case", {})
            if case.get("payload") != "repeat" or case.get("delivery") != "fake" or case.get("recompute"):
                continue
            for row in result.get("rows", ()):
                if "host_ms" in row:
                    yield case, row
