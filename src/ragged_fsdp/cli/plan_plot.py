"""Padding against the number of ranks, one line per granularity."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Curve", "draw_curves", "plot"]


@dataclass(frozen=True)
class Curve:
    """One line of the figure: FSDP sizes and the padding there, as a ratio."""

    label: str
    ranks: Sequence[int]
    padding: Sequence[float]
    dashed: bool = False


def draw_curves(axes: object, title: str, curves: Sequence[Curve]) -> None:
    """Draw ``curves`` on matplotlib ``axes``."""
    for curve in curves:
        style = "--" if curve.dashed else "-"
        marker = "o" if len(curve.ranks) < 20 else None
        percent = [100 * ratio for ratio in curve.padding]
        axes.plot(curve.ranks, percent, style, marker=marker, markersize=3, linewidth=1.2, label=curve.label)
    axes.set_title(title)
    axes.set_xlabel("FSDP size (ranks)")
    axes.set_ylabel("padding (% of the parameters)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def plot(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Write the figure to ``path``; its suffix (svg, png, pdf) decides the format."""
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise ValueError(f"plot {str(path)!r}: the suffix must be .svg, .png or .pdf.")
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    draw_curves(axes, title, curves)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    plt.close(figure)
