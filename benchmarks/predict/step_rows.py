"""Predictions beside every row of the step benchmark, ours and FSDP2's.

The computation comes from the card of ``python -m benchmarks.predict calibrate``: one layer of each model at
two numbers of tokens. A row is predicted as it was run: rank 0 of N on its modelled network. DeepSeek-V3 with
experts apart has no layer on the card: it is always predicted as a model that was held out.
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
from ragged_fsdp.predict.network import Network, network_of
from ragged_fsdp.predict.scale import Scale
from ragged_fsdp.predict.step import Setup, predict

__all__ = ["APART", "LeftOut", "Row", "compared", "left_out"]

_NOT_SETTINGS = ("prefetch", "communicators", "buffers", "pending", "shard1", "budget", "gather", "fp8")
"""Options of the benchmark that ``predict`` does not have."""
_SCHEDULE_SINCE = "2026-11-16 06:33"
"""When the schedule that is replayed was made: rows of ours that are older are of another one."""
APART = "deepseek-v3-separate"
"""The model whose layer is not on the card."""
_PACKED_SINCE = "2026-11-16 12:50"
"""When gradients of many small parameters were no longer held twice: of experts apart, ours."""


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


@dataclass(frozen=True)
class LeftOut:
    """A row of ours or FSDP2 that is not compared, and why."""

    file: str
    implementation: str
    network: str
    reason: str


def compared(card: Card, held_out: str | None = None) -> Iterator[Row]:
    """Every row that can be predicted; of ``held_out`` only, with its own runs taken off the card.

    Rows of ours that are older than the schedule of today come too, marked as earlier.
    """
    if held_out is not None:
        card = replace(card, layers=tuple(layer for layer in card.layers if layer.model != held_out))
    for file, written, case, row in _rows():
        if held_out not in (None, case["model"]) or _reason(case, row) is not None:
            continue
        since = _PACKED_SINCE if case["model"] == APART else _SCHEDULE_SINCE
        earlier = written < since and row["implementation"].startswith("ours")
        yield replace(_row(file, case, row, card), held_out=held_out is not None, earlier=earlier)


def left_out() -> Iterator[LeftOut]:
    """The rows that :func:`compared` passes over."""
    for file, _, case, row in _rows():
        if (reason := _reason(case, row)) is not None:
            yield LeftOut(file, row["implementation"], _network(row).name, reason)


def _rows() -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """File, date, case and row of every timed step of ours and of FSDP2."""
    for path in sorted(STEP_RESULTS.glob("*.json")):
        content = json.loads(path.read_text())
        for result in content.get("results", ()):
            for row in result.get("rows", ()):
                if row["implementation"].startswith(("ours", "fsdp2")) and "forward_backward_ms" in row:
                    yield path.stem, content.get("written", ""), result["case"], row


def _reason(case: dict[str, Any], row: dict[str, Any]) -> str | None:
    """Why a row is not predicted; None where it is."""
    if case["payload"] == "nothing":
        return "small layers bound by the host: what a launch takes in predict is from them"
    if case["payload"] == "zeros":
        return "products of zeros, which draw less power than any in training"
    if case["delivery"] != "fake" or case.get("carveout"):
        return "multiprocessors that collectives take or products leave free: not modelled"
    if option := next((option for option in _NOT_SETTINGS if option in row["implementation"]), None):
        return f"{option}: not a setting of predict"
    return None


def _network(row: dict[str, Any]) -> Network:
    return network_of(row["wire"] if "wire" in row else row.get("bandwidth_gb_s", row.get("wire_gb_s")))


def _kept(name: str) -> int:
    """Layers that an implementation of the benchmark keeps gathered."""
    found = re.search(r"(\d+) layers kept", SETTINGS[name])
    return int(found[1]) if found else 0


def _row(file: str, case: dict[str, Any], row: dict[str, Any], card: Card) -> Row:
    name, network = row["implementation"], _network(row)
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
        optimizer=case.get("optimizer", "adamw"),
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
