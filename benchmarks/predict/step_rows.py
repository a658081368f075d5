"""Predictions beside every row of the step benchmark, ours and FSDP2's.

The computation comes from the card of ``python -m benchmarks.predict calibrate``: one layer of each model at
two numbers of tokens. A row is predicted as it was run: rank 0 of N on its modelled network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.predict.host import STEP_RESULTS, host_of
from benchmarks.predict.layers import stack_workload
from benchmarks.step.implementations import SETTINGS
from benchmarks.step.shapes import MODELS

from ragged_fsdp.predict.card import Card
from ragged_fsdp.predict.network import network_of
from ragged_fsdp.predict.scale import Scale
from ragged_fsdp.predict.step import Setup, predict

__all__ = ["Row", "compared"]

_LEFT_OUT = ("prefetch", "communicators", "buffers", "pending", "shard1", "budget", "gather")
"""Options of the benchmark that ``predict`` does not have."""
_NOT_ON_THE_CARD = ("small-dense", "deepseek-v3-separate")
_SCHEDULE_SINCE = "2026-11-16 06:33"
"""When the schedule that is replayed was made: rows of ours that are older are of another one."""


@dataclass(frozen=True)
class Row:
    """One row: what was measured, and what is predicted."""

    file: str
    model: str
    implementation: str
    network: str
    ms: float
    predicted_ms: float
    gib: float
    predicted_gib: float
    held_out: bool = False
    earlier: bool = False
    """Whether the measured code is another than the one that is replayed: its memory is not today's."""

    @property
    def time_error(self) -> float:
        return self.predicted_ms / self.ms - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_gib / self.gib - 1


def compared(card: Card, held_out: str | None = None) -> Iterator[Row]:
    """Every row that can be predicted; of ``held_out`` only, with its own runs taken off the card.

    Rows of ours that are older than the schedule of today come too, marked as earlier.
    """
    if held_out is not None:
        card = replace(card, layers=tuple(layer for layer in card.layers if layer.model != held_out))
    for path in sorted(STEP_RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        earlier = content.get("written", "") < _SCHEDULE_SINCE
        for result in content.get("results", ()):
            case = result.get("case", {})
            if case.get("model") not in MODELS or case.get("payload") != "repeat" or "rows" not in result:
                continue
            if case["model"] in _NOT_ON_THE_CARD:
                continue
            if held_out is not None and case["model"] != held_out:
                continue
            if case["delivery"] != "fake" or case.get("carveout"):  # multiprocessors: not modelled
                continue
            for row in result["rows"]:
                found = _row(path.stem, case, row, card)
                if found is not None:
                    old = earlier and row["implementation"].startswith("ours")
                    yield replace(found, held_out=held_out is not None, earlier=old)


def _kept(name: str) -> int:
    """Layers that an implementation of the benchmark keeps gathered."""
    found = re.search(r"(\d+) layers kept", SETTINGS[name])
    return int(found[1]) if found else 0


def _row(file: str, case: dict[str, Any], row: dict[str, Any], card: Card) -> Row | None:
    name = row.get("implementation", "")
    known = name.startswith(("ours", "fsdp2")) and not any(option in name for option in _LEFT_OUT)
    if "error" in row or not known or "forward_backward_ms" not in row:
        return None
    wire = row["wire"] if "wire" in row else row.get("bandwidth_gb_s", row.get("wire_gb_s"))
    network = network_of(wire)
    sequence = case.get("sequence")
    workload = stack_workload(case["model"], case["layers"], sequence)
    setup = Setup(
        gpus=case["ranks"],
        tokens_per_gpu=case["tokens"],
        seq_len=sequence or MODELS[case["model"]].sequence,
        activation_checkpointing=int(case.get("recompute", False)),
        replicas=case.get("replicas", 1),
        sharding="fsdp2" if name.startswith("fsdp2") else "ragged",
        reduction="two_level"
        if "two-level" in name
        else "all_to_all"
        if "all-to-all" in name
        else "reduce_scatter",
        reduce_dtype="bf16" if "bf16" in name else case["reduce_dtype"],
        kept=_kept(name),
        park=8 if "reshard8" in name else 0,
        internode_dtype="fp32" if "fp32-between" in name else "bf16",
        codes="int8" in name or "float8" in name,
        expandable_segments=case["allocator"] == "expandable",
        scale=Scale(jitter=0.0),
        host=host_of(case["model"], name),
    )
    done = predict(workload, setup, card, network).replayed
    optimizer = sum(span.end - span.start for span in done.spans if span.label == "optimizer")
    return Row(
        file,
        case["model"],
        name,
        network.name,
        row["forward_backward_ms"],
        (done.seconds - optimizer) * 1e3,
        row["peak_allocated_gib"],
        done.peak_bytes / 2**30,
    )
