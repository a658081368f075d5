"""When the stages of a distributed Muon step ran on the device, from a profile: numbers and a picture.

``Exchange`` marks its stages in profiles as ``Muon start 0``, ``Muon iterate 0``, ``Muon finish 0``. A kernel
belongs to the stage whose mark its launch lies in. Kernels of a collective or of the modelled wire are the
*communication* of that stage: the gather of a bucket in its start, the way back in its iteration.
"""

from __future__ import annotations

import bisect
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["StageSpan", "draw", "overlap", "stage_spans", "write_trace"]

_MARK = "Muon "
_COMMUNICATION = ("nccl", "_wire_")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class StageSpan:
    """From the first to the last kernel of a stage in one lane, in microseconds from the first of all."""

    stage: str
    bucket: int
    communication: bool
    start: float
    end: float


def write_trace(call: Callable[[], object], out: Path) -> Path:
    """Profile a call until the device is done with it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(out))
    return out


def stage_spans(trace: Path) -> list[StageSpan]:
    """The spans of all stages of a chrome trace, in the order of their begin."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    marks = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(_MARK)
    )
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    wires = {
        event["args"]["stream"]
        for event in events
        if event.get("cat") == "kernel" and any(word in event["name"] for word in _COMMUNICATION)
    }
    found: dict[tuple[str, bool], tuple[float, float]] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        name = _mark_at(marks, launched.get(event["args"].get("correlation")))
        if name is not None:
            key = name, event["args"]["stream"] in wires
            start, end = found.get(key, (float("inf"), float("-inf")))
            found[key] = min(start, event["ts"]), max(end, event["ts"] + event["dur"])
    spans = []
    begin = min((start for start, _ in found.values()), default=0.0)
    for (name, communication), (start, end) in found.items():
        _, stage, bucket = name.split()
        spans.append(StageSpan(stage, int(bucket), communication, start - begin, end - begin))
    return sorted(spans, key=lambda span: span.start)


def _mark_at(marks: list[tuple[float, float, str]], time: float | None) -> str | None:
    if time is None:
        return None
    index = bisect.bisect_right(marks, (time, float("inf"), "")) - 1
    return marks[index][2] if index >= 0 and time <= marks[index][1] else None


def overlap(spans: Sequence[StageSpan]) -> list[dict[str, float]]:
    """For each bucket: the time of its iteration, and how much of that a collective of another bucket ran."""
    rows = []
    for own in spans:
        if own.stage != "iterate" or own.communication:
            continue
        others = [s for s in spans if s.communication and s.bucket != own.bucket]
        shared, reached = 0.0, own.start
        for other in sorted(others, key=lambda s: s.start):
            begin, end = max(other.start, reached), min(other.end, own.end)
            shared += max(0.0, end - begin)
            reached = max(reached, end)
        rows.append(
            {
                "bucket": own.bucket,
                "iterate_ms": (own.end - own.start) / 1e3,
                "beside_collective_ms": shared / 1e3,
            }
        )
    return rows


def draw(steps: dict[str, list[StageSpan]], out: Path) -> Path:
    """A panel per step: computation below, communication above, a colour per bucket, a shade per stage.

    A bar too short for its text has the number of its bucket, or nothing.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a tenth of the size
    matplotlib.rcParams["svg.hashsalt"] = "stages"
    import matplotlib.pyplot as plt

    colours = plt.get_cmap("tab10").colors
    words = {"start": "momentum", "iterate": "iterate", "finish": "apply"}
    ways = {"start": "gather", "iterate": "return"}
    shades = {"start": 0.4, "iterate": 1.0, "finish": 0.7}
    letter_ms = max(span.end for spans in steps.values() for span in spans) / 1e3 / 220
    figure, axes = plt.subplots(len(steps), 1, figsize=(13, 1.6 * len(steps)), sharex=True, squeeze=False)
    for axis, (title, spans) in zip(axes[:, 0], steps.items()):
        for span in spans:
            left, width = span.start / 1e3, (span.end - span.start) / 1e3
            colour = colours[span.bucket % len(colours)]
            shade = 1.0 if span.communication else shades[span.stage]
            axis.broken_barh([(left, width)], (0.1 + span.communication, 0.8), color=colour, alpha=shade)
            word = f"{(ways if span.communication else words)[span.stage]} {span.bucket}"
            text = next((text for text in (word, str(span.bucket)) if len(text) * letter_ms <= width), None)
            if text:
                place = left + width / 2, span.communication + 0.5
                axis.text(*place, text, ha="center", va="center", fontsize=7, clip_on=True)
        axis.set_yticks([0.5, 1.5], ["computation", "communication"], fontsize=8)
        axis.set_title(f"{title}: {max(span.end for span in spans) / 1e3:.0f} ms", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms")
    names = ["momentum", "iterate", "apply"]
    patches = [plt.Rectangle((0, 0), 1, 1, color="grey", alpha=shade) for shade in shades.values()]
    figure.legend(
        patches,
        [f"computation: {name}" for name in names],
        loc="lower left",
        ncols=3,
        fontsize=7,
        frameon=False,
    )
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)
    return out


def main() -> None:
    """Draw anew what records hold: ``python -m benchmarks.optim.stage_spans RECORD.json ...``."""
    for path in map(Path, sys.argv[1:]):
        spans = json.loads(path.read_text())["spans"]
        draw(
            {title: [StageSpan(**span) for span in members] for title, members in spans.items()},
            path.with_suffix(".svg"),
        )


if __name__ == "__main__":
    main()
