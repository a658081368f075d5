"""The figure and the tables of a convergence run, from the files its stages left."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence.curves import Curve
from benchmarks.convergence.runs import LEARNING_RATES, MODELS

__all__ = ["write_report"]

_STYLES = {
    "adamw, ddp": ("tab:gray", "-"),
    "adamw, ragged_fsdp": ("black", "-"),
    "adamw8bit, ddp": ("tab:orange", "-"),
    "adamw8bit, ragged_fsdp": ("tab:blue", "--"),
    "muon, ddp": ("tab:green", "-"),
    "muon, ragged_fsdp": ("tab:red", "--"),
}
_COLORS = {"adamw": "black", "adamw8bit": "tab:blue", "muon": "tab:red"}
_POINTS = 200
"""Points of a curve that are drawn."""
_PANELS = {"8-bit Adam": ("adamw", "adamw8bit"), "Muon": ("adamw", "muon")}


def write_report(folder: Path) -> None:
    """``convergence.md`` and ``convergence.svg`` from the files in ``scan/`` and ``curves/``."""
    heads, stages = [], {}
    for stage in ("scan", "curves"):
        records = _records(folder / stage)
        stages[stage] = [Curve(**curve) for record in records for curve in record["curves"]]
        if records:
            heads.append(f"- {stage}: {_head(records[0])}")
    text = "\n".join(heads) + "\n"
    if stages["scan"]:
        text += "\n## Scan of learning rates\n\n" + _scan_table(stages["scan"])
    if stages["curves"]:
        text += "\n## Curves at the best learning rate of each\n\n" + _curve_table(stages["curves"])
    (folder / "convergence.md").write_text(text)
    _draw(stages["scan"], stages["curves"], _tokens(folder), folder / "convergence.svg")


def _records(folder: Path) -> list[dict[str, Any]]:
    """The files of a stage, models and optimizers in the order of their definition."""
    names = [f"{model}-{optimizer}.json" for model in MODELS for optimizer in LEARNING_RATES]
    return [json.loads((folder / name).read_text()) for name in names if (folder / name).exists()]


def _tokens(folder: Path) -> float:
    """Millions of tokens that each curve has seen at its end."""
    setting = next(r["setting"] for stage in ("curves", "scan") for r in _records(folder / stage))
    return float(setting["steps"] * setting["batch"] * setting["seq_len"] / 1e6)


def _head(record: dict[str, Any]) -> str:
    setting = record["setting"]
    precision = "fp32 with TF32 products" if "NCCL" in record["ranks"] else "fp32"
    return (
        f"{record['hardware']}, ranks: {record['ranks']}, torch {record['torch']}; {setting['steps']} steps "
        f"of {setting['batch']} x {setting['seq_len']} bytes, {precision}; {record['data']}."
    )


def _scan_table(curves: Sequence[Curve]) -> str:
    """Held-out loss of every learning rate, and of the best with other seeds."""
    lines = [
        "| model | optimizer | held-out loss by learning rate | best | other seeds |",
        "|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(curve.model for curve in curves):
        for optimizer in LEARNING_RATES:
            mine = [c for c in curves if (c.model, c.optimizer) == (model, optimizer)]
            if not mine:
                continue
            by_rate = sorted((c for c in mine if c.seed == mine[0].seed), key=lambda c: c.lr)
            best = min(by_rate, key=lambda c: c.evaluation)
            at_edge = best.lr in (by_rate[0].lr, by_rate[-1].lr)
            rates = ", ".join(f"{c.lr:g}: {c.evaluation:.4f}" for c in by_rate)
            others = ", ".join(f"{c.evaluation:.4f}" for c in mine if c.seed != mine[0].seed)
            mark = " (at the edge)" if at_edge else ""
            found = f"{best.lr:g}: {best.evaluation:.4f}{mark}"
            lines.append(f"| {model} | {optimizer} | {rates} | {found} | {others or '-'} |")
    return "\n".join(lines) + "\n"


def _curve_table(curves: Sequence[Curve]) -> str:
    """Final losses of every seed, and how far the two ways of sharding are apart."""
    lines = [
        "| model | optimizer | lr | last tenth | held-out loss, by seed | largest smoothed gap to DDP |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Curve]] = {}
    for curve in curves:
        groups.setdefault((curve.model, curve.name), []).append(curve)
    for (model, name), seeds in groups.items():
        twins = {c.seed: c for c in groups.get((model, f"{seeds[0].optimizer}, ddp"), [])}
        gaps = [_largest_gap(curve, twins[curve.seed]) for curve in seeds if curve.seed in twins]
        gap = f"{max(gaps):.4f}" if gaps and seeds[0].sharding != "ddp" else "-"
        lasts = [statistics.mean(c.losses[-max(1, len(c.losses) // 10) :]) for c in seeds]
        held_out = ", ".join(f"{curve.evaluation:.4f}" for curve in seeds)
        lines.append(
            f"| {model} | {name} | {seeds[0].lr:g} | {statistics.mean(lasts):.4f} | {held_out} | {gap} |"
        )
    return "\n".join(lines) + "\n"


def _largest_gap(left: Curve, right: Curve) -> float:
    return max(abs(a - b) for a, b in zip(_smooth(left.losses), _smooth(right.losses)))


def _draw(scan: Sequence[Curve], curves: Sequence[Curve], tokens: float, path: Path) -> None:
    """One row per model: the curves of each optimizer beside AdamW's, and the scan.

    Without curves on several ranks, the best curves of the scan take their place.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(curve.model for curve in [*scan, *curves]))
    panels = _PANELS if curves else {"the best of the scan": tuple(LEARNING_RATES)}
    columns = len(panels) + 1
    figure, axes = plt.subplots(len(models), columns, figsize=(5 * columns, 3.6 * len(models)), squeeze=False)
    for row, model in zip(axes, models):
        shown = [curve for curve in curves or _best(scan) if curve.model == model]
        for axis, (title, optimizers) in zip(row, panels.items()):
            _draw_curves(axis, [c for c in shown if c.optimizer in optimizers], tokens)
            axis.set_title(f"{title}, {model} model")
            axis.set(xlabel="million tokens", ylabel="training loss (nats/byte)")
        _draw_scan(row[-1], [curve for curve in scan if curve.model == model])
        row[-1].set_title(f"learning rates, {model} model")
        row[-1].set(xlabel="learning rate", ylabel="held-out loss (nats/byte)")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _best(scan: Sequence[Curve]) -> list[Curve]:
    """The curve of the best learning rate for each model and optimizer."""
    best: dict[tuple[str, str], Curve] = {}
    for curve in (c for c in scan if c.seed == 1):
        key = (curve.model, curve.optimizer)
        if key not in best or curve.evaluation < best[key].evaluation:
            best[key] = curve
    return list(best.values())


def _draw_curves(axis: Any, curves: Sequence[Curve], tokens: float) -> None:
    for curve in sorted(curves, key=lambda c: c.sharding):  # dashed lines over those of DDP
        color, line = _STYLES.get(curve.name, (_COLORS[curve.optimizer], "-"))
        smooth = _smooth(curve.losses) if curve.name in _STYLES else curve.losses  # a scan has means already
        shown = range(0, len(smooth), max(1, len(smooth) // _POINTS))
        seen = [(i + 1) * tokens / len(smooth) for i in shown]
        first = curve.seed == 1
        label = f"{curve.name}, lr {curve.lr:g}" if first else None
        axis.plot(seen, [smooth[i] for i in shown], line, color=color, label=label, lw=1.2 if first else 0.6)
    if curves:
        last = min(min(_smooth(curve.losses)) for curve in curves)
        axis.set_ylim(last - 0.05, last + 1.2)
        axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def _draw_scan(axis: Any, scan: Sequence[Curve]) -> None:
    for optimizer in LEARNING_RATES:
        points = sorted((c.lr, c.evaluation) for c in scan if c.optimizer == optimizer)
        if points:
            axis.plot(*zip(*points), "o", color=_COLORS[optimizer], ms=4, label=optimizer)
            first = sorted((c.lr, c.evaluation) for c in scan if c.optimizer == optimizer and c.seed == 1)
            axis.plot(*zip(*first), "-", color=_COLORS[optimizer], lw=1)
    axis.set_xscale("log")
    if scan:
        best = min(curve.evaluation for curve in scan)
        axis.set_ylim(best - 0.03, best + 0.7)
        axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def _smooth(losses: Sequence[float], weight: float = 0.9) -> list[float]:
    """An exponential average, without the bias of its start."""
    out, mean, total = [], 0.0, 0.0
    for loss in losses:
        mean, total = weight * mean + (1 - weight) * loss, weight * total + (1 - weight)
        out.append(mean / total)
    return out
