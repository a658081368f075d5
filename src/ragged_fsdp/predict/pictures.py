"""Pictures of predictions: throughput over GPUs, and the timeline of one step."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from ragged_fsdp.predict.simulate import Span
from ragged_fsdp.predict.step import Prediction

__all__ = ["plot_scaling", "timeline_svg"]

_LANES = {
    "compute": "compute",
    "gather": "casts of shards",
    "reduce": "sums",
    "all_reduce": "all-reduce",
    "inside": "links inside the node",
    "outside": "card to other nodes",
}
_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "optimizer": "#b279a2",
    "gather": "#54a24b",
    "reduce": "#e45756",
    "all-reduce": "#9d755d",
    "sum": "#72b7b2",
    "cast": "#bab0ac",
    "copy": "#ff9da6",
    "decode": "#8cd17d",
    "tokens": "#79706e",
    "collect": "#eeca3b",
}


def timeline_svg(prediction: Prediction) -> str:
    """One step: a row per stream and link; every bar has its name and times as a tooltip."""
    spans, total = prediction.replayed.spans, prediction.replayed.seconds
    used = {span.lane for span in spans}
    lanes = [lane for lane in _LANES if lane in used]
    left, width, height = 170, 1180, 26
    scale = width / total
    body = []
    for row, lane in enumerate(lanes):
        y = 46 + row * (height + 8)
        body.append(f'<text x="{left - 8}" y="{y + 17}" text-anchor="end">{_LANES[lane]}</text>')
        body += [_bar(span, left, y, height, scale) for span in spans if span.lane == lane]
    bottom = 46 + len(lanes) * (height + 8)
    for tick in range(11):
        x = left + width * tick / 10
        body.append(f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        time = total * tick / 10 * 1e3
        body.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{time:.4g} ms</text>')
    kinds = [kind for kind in _COLOURS if any(span.label.startswith(kind) for span in spans)]
    for place, kind in enumerate(kinds):
        x = left + place * 110
        body.append(f'<rect x="{x}" y="{bottom + 26}" width="12" height="12" fill="{_COLOURS[kind]}"/>')
        body.append(f'<text x="{x + 16}" y="{bottom + 36}">{kind}</text>')
    setup = prediction.setup
    title = (
        f"{prediction.model}, {setup.gpus} GPUs, {setup.tokens_per_gpu} tokens per GPU, "
        f"{prediction.hardware}, {prediction.network}: {total * 1e3:.4g} ms"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 40}" height="{bottom + 50}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n'
        f'<text x="{left}" y="24" font-size="15">{escape(title)}</text>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _bar(span: Span, left: int, y: int, height: int, scale: float) -> str:
    kind = next((kind for kind in _COLOURS if span.label.startswith(kind)), "cast")
    extent = max(0.3, (span.end - span.start) * scale)
    times = f"{span.start * 1e3:.3f} to {span.end * 1e3:.3f} ms"
    return (
        f'<rect x="{left + span.start * scale:.2f}" y="{y}" width="{extent:.2f}" height="{height}" '
        f'fill="{_COLOURS[kind]}" stroke="#fff" stroke-width="0.3">'
        f"<title>{escape(span.label)}, {times}</title></rect>"
    )


def plot_scaling(path: Path, title: str, curves: Mapping[str, Sequence[Prediction]]) -> None:
    """Tokens per second, and MFU, over GPUs; bands are the error bars."""
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise ValueError(f"plot {str(path)!r}: the suffix must be .svg, .png or .pdf.")
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "ragged-fsdp"  # the same figures give the same file
    figure, (speed, share) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for label, predictions in curves.items():
        gpus = [p.setup.gpus for p in predictions]
        tokens = [p.tokens_per_second for p in predictions]
        low = [t / (1 + p.seconds.error) for t, p in zip(tokens, predictions)]
        high = [t / max(0.1, 1 - p.seconds.error) for t, p in zip(tokens, predictions)]
        speed.plot(gpus, tokens, marker="o", markersize=3, label=label)
        speed.fill_between(gpus, low, high, alpha=0.2)
        share.plot(gpus, [100 * p.mfu for p in predictions], marker="o", markersize=3, label=label)
    speed.set_yscale("log")
    speed.set_ylabel("tokens per second")
    share.set_ylabel("MFU (%)")
    share.set_ylim(0, 1.15 * max(100 * p.mfu for predictions in curves.values() for p in predictions))
    for axes in (speed, share):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")  # 1,024 and not a power of two
        axes.set_xlabel("GPUs")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle("\n".join(textwrap.wrap(title, 90)), fontsize=10)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
    plt.close(figure)
