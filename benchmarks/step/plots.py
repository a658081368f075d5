"""Figures from saved results: time against the bound, throughput, memory, and growth with the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .case import ALLOCATORS
from .report import LABELS, case_of, own_bound_ms, wire_name
from .shapes import MODELS

__all__ = ["draw"]

_COLOURS = {
    "none": "#d9d9d9",
    "ours": "#d1495b",
    "ours-2-buffers": "#b5651d",
    "ours-all-to-all": "#9b2335",
    "ours-all-to-all-nothing-kept": "#f0a8b0",
    "ours-two-level-nothing-kept": "#ff7f5c",
    "ours-two-level-float8": "#ffe08a",
    "fsdp2": "#2e4057",
    "fsdp2-shard1": "#3fb0d9",
    "fsdp1": "#7d5ba6",
    "megatron": "#66a182",
    "deepspeed": "#edae49",
}


def draw(results: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw every figure the results have data for; returns the files written.

    Time and memory are those of the expandable allocator where it was measured; growth with the ranks is
    that of the default one.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "step"}):  # text stays text
        return _draw(results, folder)


def _draw(results: list[dict[str, Any]], folder: Path) -> list[Path]:
    default, expandable = (_by_model(results, allocator) for allocator in ALLOCATORS)
    written: list[Path] = []
    shown: list[dict[str, Any]] = []
    for model in sorted({*default, *expandable}):
        members = expandable.get(model) or default[model]
        shown += members
        written.append(_bars(members, folder / f"{model[0]}.svg"))
        if len(default.get(model, ())) > 1:
            written.append(_growth(default[model], folder / f"{model[0]}-ranks.svg"))
    if any(row["wire"] for _, row in _rows(shown)):
        written.append(_throughput(shown, folder / "throughput.svg"))
    if over := _over_nodes(results):
        written.append(_nodes(over, folder / "nodes.svg"))
    return written


def _by_model(results: list[dict[str, Any]], allocator: str) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The results that figures show, by model and tokens.

    Those over one link with the default payload and delivery; networks of nodes have tables. Where several
    files have a case, the one with most rows.
    """
    wanted = {"payload": "repeat", "delivery": "fake", "allocator": allocator, "options": []}
    widest: dict[tuple[str, int, int], dict[str, Any]] = {}
    for result in results:
        case = result["case"]
        if all(list(case[k]) == v if k == "options" else case[k] == v for k, v in wanted.items()):
            rows = [row for row in result["rows"] if row["implementation"] in _COLOURS]
            rows = [row for row in rows if not isinstance(row.get("wire"), str)]
            key = case["model"], case["tokens"], case["ranks"]
            if all(row["implementation"] == "none" for row in rows):
                continue
            if key not in widest or len(rows) > len(widest[key]["rows"]):
                widest[key] = result | {"rows": rows}
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for (model, tokens, _ranks), result in sorted(widest.items(), key=lambda item: item[0]):
        groups.setdefault((model, tokens), []).append(result)
    return groups


def _rows(results: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(result, row) for result in results for row in result["rows"] if "forward_backward_ms" in row]


def _place(result: dict[str, Any], row: dict[str, Any]) -> tuple[int, float, str]:
    """Ranks, time on the wire and its name: places are drawn in this order."""
    wire_ms = case_of(result).wire_ms(row["wire"])
    return result["case"]["ranks"], wire_ms, wire_name(row["wire"])


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
            at = places.index(_place(result, row)) + (i - len(names) / 2 + 0.5) * width
            axes[0].bar(at, row["forward_backward_ms"], width, color=_COLOURS[name])
            bound = own_bound_ms(result, row)
            if bound:
                ends = [at - width / 2, at + width / 2]
                axes[0].plot(ends, [bound, bound], color="black", linewidth=1.5, solid_capstyle="butt")
            _number(axes[0], at, row["forward_backward_ms"])
            axes[1].bar(at, row["peak_reserved_gib"], width, color=_COLOURS[name])
            _number(axes[1], at, row["peak_reserved_gib"])
            axes[1].bar(
                at, row["peak_allocated_gib"], width, fill=False, edgecolor="white", hatch="//", linewidth=0
            )
    labels = [f"{ranks} ranks\n{wire}" for ranks, _, wire in places]
    memory = f"peak reserved, GiB (hatched: allocated), {results[0]['case']['allocator']} allocator"
    for axis, text in zip(axes, ("forward+backward, ms (black line: bound of its own bytes)", memory)):
        axis.set_xticks(range(len(places)), labels)
        axis.set_title(text, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[n]) for n in names]
    figure.legend(handles, [LABELS[n] for n in names], fontsize=8, frameon=False, loc="lower center", ncols=4)
    return _save(figure, path, bottom=0.12)


def _number(axis: Any, at: float, value: float, rotation: int = 90) -> None:
    """The value above its bar."""
    text = f"{value:.0f}" if value >= 20 else f"{value:.1f}"
    place = {"xy": (at, value), "xytext": (0, 2), "textcoords": "offset points"}
    axis.annotate(text, **place, ha="center", fontsize=7, rotation=rotation)
    axis.margins(y=0.1)


def _throughput(results: list[dict[str, Any]], path: Path) -> Path:
    """Tokens per second of one GPU on the slowest modelled wire, and its memory below."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(results), figsize=(2.7 * len(results), 5.4), squeeze=False)
    tried = {row["implementation"] for result in results for row in result["rows"]} - {"none"}
    names = [name for name in LABELS if name in tried]
    for (above, below), result in zip(axes.T, results):
        case, wired = result["case"], [row for _, row in _rows([result]) if row["wire"] is not None]
        slowest = max((_place(result, row) for row in wired), default=(0, 0.0, ""))
        for row in wired:
            at, colour = names.index(row["implementation"]), _COLOURS[row["implementation"]]
            if _place(result, row) == slowest:
                above.bar(at, case["tokens"] / row["step_ms"], color=colour)
                below.bar(at, row["peak_reserved_gib"], color=colour)
                _number(above, at, case["tokens"] / row["step_ms"], 0)
                _number(below, at, row["peak_reserved_gib"], 0)
                hatch = {"fill": False, "edgecolor": "white", "hatch": "//", "linewidth": 0}
                below.bar(at, row["peak_allocated_gib"], **hatch)
        for row in result["rows"]:
            if "error" in row:
                why = "out of memory" if "OutOfMemory" in row["error"] else "failed"
                above.text(
                    names.index(row["implementation"]), 0, f" {why}", rotation=90, ha="center", fontsize=8
                )
        title = (
            f"{MODELS[case['model']].name} x{case['layers']}\n{case['ranks']} ranks, {slowest[-1]}\n"
            f"{case['allocator']} allocator"
        )
        above.set_title(title, fontsize=9)
        for axis in (above, below):
            axis.set_xlim(-0.6, len(names) - 0.4)
            axis.set_xticks([])
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("1000 tokens/s per GPU")
    axes[1][0].set_ylabel("peak reserved, GiB\n(hatched: allocated)")
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[n]) for n in names]
    figure.legend(handles, [LABELS[n] for n in names], fontsize=8, frameon=False, loc="lower center", ncols=6)
    return _save(figure, path, bottom=0.06)


def _over_nodes(results: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """By case and implementation: rows on networks with nodes where FSDP2 was in the same run, nothing kept.

    Of several runs of a case the last one.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for result in results:
        case = case_of(result)
        rows = {r["implementation"]: r for _, r in _rows([result]) if isinstance(r["wire"], str)}
        rows = {name: rows[name] for name in _ON_NODES if name in rows}
        if len(rows) < 2 or next(iter(rows)) != "fsdp2":
            continue
        ranks = f"{case.replicas} x {case.shard_ranks}" if case.replicas > 1 else f"{case.ranks}"
        more = f", sequences of {case.sequence}" if case.sequence else ""
        more += ", recomputed" if case.recompute else ""
        more += f", {case.carveout} SMs spared" if case.carveout else ""
        label = f"{case.shape.name} x{case.layers}{more}\n{ranks} ranks, {case.wires[0]}"
        found[label] = found.get(label, {}) | rows
    return found


_ON_NODES = ("fsdp2", "ours-two-level-nothing-kept", "ours-two-level-float8")


def _nodes(cases: dict[str, dict[str, dict[str, Any]]], path: Path) -> Path:
    """Time and allocated memory over FSDP2's in the same run, a line per case."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 0.55 * len(cases) + 1.4), sharey=True)
    height, labels = 0.8 / len(_ON_NODES), sorted(cases)
    units = (("forward_backward_ms", "forward+backward", "ms"), ("peak_allocated_gib", "allocated", "GiB"))
    for axis, (key, text, unit) in zip(axes, units):
        for i, label in enumerate(labels):
            for j, (name, row) in enumerate(cases[label].items()):
                share, at = row[key] / cases[label]["fsdp2"][key], i + (j - 1) * height
                axis.barh(at, share, height, color=_COLOURS[name])
                axis.annotate(f" {row[key]:.0f} {unit}", (share, at), va="center", fontsize=7)
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.set_xlim(0, 1.2)
        axis.set_title(f"{text}, FSDP2 = 1", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[name]) for name in _ON_NODES]
    names = [LABELS[name] for name in _ON_NODES]
    figure.legend(handles, names, fontsize=8, frameon=False, loc="lower center", ncols=len(names))
    return _save(figure, path, bottom=0.06)


def _growth(results: list[dict[str, Any]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    keys = (
        ("forward+backward, ms", lambda row: row["forward_backward_ms"]),
        ("peak reserved, GiB, default allocator", lambda row: row["peak_reserved_gib"]),
        ("moved per step, GiB", lambda row: sum(row["moved_gib"].values())),
    )
    lines: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for result, row in _rows(results):
        if row["implementation"] != "none":
            lines.setdefault((row["implementation"], wire_name(row["wire"])), []).append(
                (result["case"]["ranks"], row)
            )
    lines = {
        key: sorted(points, key=lambda point: point[0]) for key, points in lines.items() if len(points) > 1
    }
    for axis, (text, value) in zip(axes, keys):
        for (name, wire), points in lines.items():
            axis.plot(
                [ranks for ranks, _ in points],
                [value(row) for _, row in points],
                marker="o",
                color=_COLOURS[name],
                linestyle="-" if wire == "free wire" else "--",
                label=f"{LABELS[name]}, {wire}",
            )
        axis.set_xscale("log", base=2)
        ticks = sorted({ranks for points in lines.values() for ranks, _ in points})
        axis.set_xticks(ticks, [str(ranks) for ranks in ticks])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("ranks")
        axis.set_title(text, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, frameon=False, loc="lower center", ncols=4)
    return _save(figure, path, bottom=0.12)


def _save(figure: Any, path: Path, bottom: float) -> Path:
    import matplotlib.pyplot as plt

    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path
