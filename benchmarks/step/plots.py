"""Figures from saved results: time against the bound, memory, and growth with the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .report import LABELS, bound_ms

__all__ = ["draw"]

_COLOURS = {
    "none": "#9aa0a6",
    "ours": "#d1495b",
    "ours-2-buffers": "#e07a5f",
    "ours-all-to-all": "#9b2335",
    "fsdp2": "#2e4057",
    "fsdp2-shard1": "#66a1b5",
    "fsdp1": "#8d96a3",
    "megatron": "#66a182",
    "deepspeed": "#edae49",
}


def draw(results: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw every figure the results have data for; returns the files written."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in results:
        case = result["case"]
        groups.setdefault((case["model"], case["tokens"]), []).append(result)
    written = []
    for (model, _tokens), members in groups.items():
        written.append(_bars(members, folder / f"{model}.svg"))
        if len({m["case"]["ranks"] for m in members}) > 1:
            written.append(_growth(members, folder / f"{model}-ranks.svg"))
    return written


def _rows(results: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(result, row) for result in results for row in result["rows"] if "forward_backward_ms" in row]


def _wire_name(row: dict[str, Any]) -> str:
    return "free wire" if row["bandwidth_gb_s"] is None else f"{row['bandwidth_gb_s']:g} GB/s"


def _place(result: dict[str, Any], row: dict[str, Any]) -> tuple[int, float]:
    return result["case"]["ranks"], row["bandwidth_gb_s"] or 0


def _bars(results: list[dict[str, Any]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    places = sorted({_place(r, row) for r, row in _rows(results)})
    names = [n for n in LABELS if any(row["implementation"] == n for _, row in _rows(results))]
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        for result, row in _rows(results):
            if row["implementation"] != name:
                continue
            at = (
                places.index((result["case"]["ranks"], row["bandwidth_gb_s"] or 0))
                + (i - len(names) / 2 + 0.5) * width
            )
            axes[0].bar(at, row["forward_backward_ms"], width, color=_COLOURS[name])
            axes[1].bar(at, row["peak_reserved_gib"], width, color=_COLOURS[name])
            axes[1].bar(
                at, row["peak_allocated_gib"], width, fill=False, edgecolor="white", hatch="//", linewidth=0
            )
    for result, row in _rows(results):
        bound = bound_ms(result, row["bandwidth_gb_s"])
        at = places.index(_place(result, row))
        if bound:
            axes[0].plot([at - 0.42, at + 0.42], [bound, bound], color="black", linewidth=1, linestyle=":")
    labels = [f"{ranks} ranks\n{'free wire' if not wire else f'{wire:g} GB/s'}" for ranks, wire in places]
    for axis, text in zip(
        axes, ("forward+backward, ms (dotted: bound)", "peak reserved, GiB (hatched: allocated)")
    ):
        axis.set_xticks(range(len(places)), labels)
        axis.set_title(text, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[n]) for n in names]
    axes[0].legend(handles, [LABELS[n] for n in names], fontsize=8, frameon=False)
    return _save(figure, path)


def _growth(results: list[dict[str, Any]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    keys = (
        ("forward+backward, ms", lambda row: row["forward_backward_ms"]),
        ("peak reserved, GiB", lambda row: row["peak_reserved_gib"]),
        ("moved per step, GiB", lambda row: sum(row["moved_gib"].values())),
    )
    lines: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for result, row in _rows(results):
        if row["implementation"] != "none":
            lines.setdefault((row["implementation"], _wire_name(row)), []).append(
                (result["case"]["ranks"], row)
            )
    for axis, (text, value) in zip(axes, keys):
        for (name, wire), points in lines.items():
            points.sort(key=lambda point: point[0])
            axis.plot(
                [ranks for ranks, _ in points],
                [value(row) for _, row in points],
                marker="o",
                color=_COLOURS[name],
                linestyle="-" if wire == "free wire" else "--",
                label=f"{LABELS[name]}, {wire}",
            )
        axis.set_xscale("log", base=2)
        axis.set_xlabel("ranks")
        axis.set_title(text, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(fontsize=7, frameon=False)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path
