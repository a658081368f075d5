"""Figures and the table of a convergence run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence.curves import Curve

__all__ = ["draw", "table", "write_report"]

_STYLES = {
    "adamw, ragged_fsdp": ("black", "-"),
    "adamw8bit, ddp": ("tab:orange", "-"),
    "adamw8bit, ragged_fsdp": ("tab:blue", "--"),
    "muon, ddp": ("tab:green", "-"),
    "muon, ragged_fsdp": ("tab:red", "--"),
}
_PANELS = {"8-bit Adam": ("adamw", "adamw8bit"), "Muon": ("adamw", "muon")}


def write_report(folder: Path) -> None:
    """``convergence.md`` and ``convergence.svg`` from the folder's ``convergence.json``."""
    record = json.loads((folder / "convergence.json").read_text())
    setting = record["setting"]
    curves = [Curve(**curve) for curve in record["curves"]]
    size = f"{setting['steps']} steps of {setting['batch']} x {setting['seq_len']} bytes"
    head = (
        f"{record['hardware']}, ranks: {record['ranks']}, torch {record['torch']}; {size}, fp32, "
        f"peak learning rate {setting['lr']}, of Muon {setting.get('muon_lr', setting['lr'])}; "
        f"{record['data']}.\n\n"
    )
    (folder / "convergence.md").write_text(head + table(curves))
    draw(curves, setting["batch"] * setting["seq_len"], folder / "convergence.svg")


def draw(curves: Sequence[Curve], tokens_per_step: int, path: Path) -> None:
    """One row per model, one panel per optimizer, each beside AdamW."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(curve.model for curve in curves))
    figure, axes = plt.subplots(len(models), 2, figsize=(11, 3.6 * len(models)), squeeze=False)
    for row, model in zip(axes, models):
        for axis, (title, optimizers) in zip(row, _PANELS.items()):
            for curve in curves:
                if curve.model == model and curve.optimizer in optimizers:
                    color, line = _STYLES[curve.name]
                    tokens = [(i + 1) * tokens_per_step / 1e6 for i in range(len(curve.losses))]
                    axis.plot(tokens, _smooth(curve.losses), line, color=color, label=curve.name, lw=1.2)
            last = min(min(_smooth(c.losses)) for c in curves if c.model == model)
            axis.set(
                title=f"{title}, {model} model", xlabel="million tokens", ylabel="training loss (nats/byte)"
            )
            axis.set_ylim(last - 0.05, last + 1.6)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _smooth(losses: Sequence[float], weight: float = 0.9) -> list[float]:
    """An exponential average, without the bias of its start."""
    out, mean, total = [], 0.0, 0.0
    for loss in losses:
        mean, total = weight * mean + (1 - weight) * loss, weight * total + (1 - weight)
        out.append(mean / total)
    return out


def table(curves: Sequence[Curve]) -> str:
    """Final losses, and how far the two ways of sharding are apart."""
    lines = [
        "| model | optimizer | loss, last tenth | held-out loss | largest smoothed gap to DDP | ms/step |",
        "|---|---|---|---|---|---|",
    ]
    for curve in curves:
        tail = curve.losses[-max(1, len(curve.losses) // 10) :]
        other = [
            c for c in curves if (c.model, c.optimizer, c.sharding) == (curve.model, curve.optimizer, "ddp")
        ]
        gap = "-"
        if other and curve.sharding != "ddp":
            pairs = zip(_smooth(curve.losses), _smooth(other[0].losses))
            gap = f"{max(abs(a - b) for a, b in pairs):.4f}"
        lines.append(
            f"| {curve.model} | {curve.name} | {sum(tail) / len(tail):.4f} | {curve.evaluation:.4f} | "
            f"{gap} | {curve.seconds_per_step * 1e3:.0f} |"
        )
    return "\n".join(lines) + "\n"
