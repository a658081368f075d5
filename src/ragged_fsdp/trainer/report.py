"""The curves of one or several runs, drawn from their metrics into one SVG or HTML page."""

import html
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from ragged_fsdp.trainer.metrics import read_metrics

__all__ = ["write_report"]

_COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_PHASES = ("data", "forward", "backward", "optimizer", "reduce_loss")
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#1f2937}}
table{{border-collapse:collapse}}td,th{{padding:.25em .8em;text-align:right;border-bottom:1px solid #e5e7eb}}
td:first-child,th:first-child{{text-align:left}}svg{{width:100%;height:auto}}</style>
<h1>{title}</h1>{table}{svg}</html>
"""

Rows = list[dict[str, Any]]


def write_report(runs: dict[str, Path], out: Path) -> None:
    """Draw the runs, by label, into ``out``: an HTML page, or the figure alone if its name ends in .svg."""
    metrics = {label: read_metrics(path) for label, path in runs.items()}
    for label, rows in metrics.items():
        if not any(row["kind"] == "train" for row in rows):
            raise ValueError(f"{runs[label]} has no metrics.jsonl with training steps")
    svg = _figure(metrics)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".svg":
        out.write_text(svg)
        return
    title = html.escape(", ".join(metrics))
    out.write_text(_PAGE.format(title=title, table=_table(metrics), svg=svg[svg.index("<svg") :]))


def _figure(metrics: dict[str, Rows]) -> str:
    panels: list[Callable[[Axes, dict[str, Rows]], None]] = [
        _loss,
        _learning,
        _speed,
        _memory,
        _breakdown,
        _grad_norm,
    ]
    with plt.rc_context(
        {"svg.hashsalt": "ragged_fsdp", "font.size": 9, "axes.grid": True, "grid.alpha": 0.25}
    ):
        figure, axes = plt.subplots(3, 2, figsize=(11, 10), constrained_layout=True)
        for panel, axis in zip(panels, axes.flat, strict=True):
            panel(axis, metrics)
            axis.spines[["top", "right"]].set_visible(False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
        plt.close(figure)
    return buffer.getvalue()


def _series(rows: Rows, kind: str, *keys: str) -> tuple[list[int], list[float]]:
    steps, values = [], []
    for row in rows:
        if row["kind"] != kind:
            continue
        value: Any = row
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            steps.append(row["step"])
            values.append(value)
    return steps, values


def _loss(axis: Axes, metrics: dict[str, Rows]) -> None:
    for color, (label, rows) in zip(_COLORS * len(metrics), metrics.items()):
        axis.plot(*_series(rows, "train", "loss"), color=color, alpha=0.35, linewidth=1)
        steps, values = _series(rows, "eval", "loss")
        axis.plot(steps, values, color=color, marker="o", markersize=3, linewidth=1.5, label=label)
        for start in [row["step"] for row in rows if row["kind"] == "start" and row["step"]]:
            axis.axvline(start, color=color, linestyle=":", linewidth=1)
    axis.set_title("loss: training (thin), validation (dots), resumed (dotted)")
    axis.legend(frameon=False)


def _learning(axis: Axes, metrics: dict[str, Rows]) -> None:
    _lines(axis, metrics, "learning rate", "lr")


def _speed(axis: Axes, metrics: dict[str, Rows]) -> None:
    _lines(axis, metrics, "tokens per second", "tokens_per_s")
    axis.set_ylim(bottom=0)


def _grad_norm(axis: Axes, metrics: dict[str, Rows]) -> None:
    _lines(axis, metrics, "gradient norm", "grad_norm")


def _memory(axis: Axes, metrics: dict[str, Rows]) -> None:
    kinds = {"allocated": "-", "reserved": "--", "held": ":"}
    for color, rows in zip(_COLORS * len(metrics), metrics.values()):
        for kind, line in kinds.items():
            steps, values = _series(rows, "train", "memory", kind)
            axis.plot(steps, [value / 2**20 for value in values], color=color, linestyle=line, linewidth=1.2)
    axis.set_title("memory of rank 0, MiB: peak (line), reserved (dashed), held (dotted)")
    axis.set_ylim(bottom=0)


def _breakdown(axis: Axes, metrics: dict[str, Rows]) -> None:
    """Where the steps of the first run go; what no phase covers is the launcher's and the log's."""
    label, rows = next(iter(metrics.items()))
    stacks = [_series(rows, "train", "phases_s", phase) for phase in _PHASES]
    present = [(phase, steps, values) for phase, (steps, values) in zip(_PHASES, stacks) if values]
    if present:
        axis.stackplot(
            present[0][1],
            [[1e3 * v for v in values] for _, _, values in present],
            labels=[phase for phase, _, _ in present],
            colors=_COLORS,
            alpha=0.75,
        )
        axis.legend(frameon=False, loc="upper right", ncols=len(present), fontsize=7)
    axis.set_title(f"step time by phase, ms ({label})")


def _lines(axis: Axes, metrics: dict[str, Rows], title: str, *keys: str) -> None:
    for color, (label, rows) in zip(_COLORS * len(metrics), metrics.items()):
        axis.plot(*_series(rows, "train", *keys), color=color, linewidth=1.2, label=label)
    axis.set_title(title)


def _table(metrics: dict[str, Rows]) -> str:
    head = (
        "run",
        "processes",
        "sharding",
        "reduction",
        "parameters",
        "steps",
        "train loss",
        "validation loss",
        "tokens/s",
    )
    lines = ["".join(f"<th>{title}</th>" for title in head)]
    for label, rows in metrics.items():
        starts = [row for row in rows if row["kind"] == "start"]
        train = [row for row in rows if row["kind"] == "train"]
        _, evals = _series(rows, "eval", "loss")
        speeds = sorted(row["tokens_per_s"] for row in train)
        cells = (
            html.escape(label),
            " then ".join(str(row["world_size"]) for row in starts),
            starts[-1]["sharding"] if starts else "",
            "<br>".join(starts[-1].get("reductions", ())) if starts else "",
            f"{starts[-1]['parameters']:,}" if starts else "",
            f"{train[-1]['step']:,}",
            f"{train[-1]['loss']:.4f}",
            f"{evals[-1]:.4f}" if evals else "",
            f"{speeds[len(speeds) // 2]:,.0f}",
        )
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"
