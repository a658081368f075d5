"""Draws a profiled step: one lane per stream, so that what ran beside what can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .kernels import Kernel, kind_of, read_trace

__all__ = ["draw_timeline", "lanes", "spans"]

_COLOURS = {
    "wire": "#d1495b",
    "matmul": "#2e4057",
    "attention": "#66a1b5",
    "copy or cast": "#edae49",
    "interleaved copy": "#e07a5f",
    "reduction": "#66a182",
}
_OTHER = "#b8bec6"
_JOIN_US = 30.0


def lanes(kernels: list[Kernel]) -> dict[str, list[Kernel]]:
    """Kernels by lane: compute is the stream with the most kernels, a wire is marked by its spin.

    Of two wires the one inside the node was marked first.
    """
    by_stream: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        by_stream.setdefault(kernel[1], []).append(kernel)
    marked = [stream for stream, own in by_stream.items() if any("_wire_" in k[0] for k in own)]
    wires = sorted(marked, key=lambda stream: min(kernel[2] for kernel in by_stream[stream]))
    compute = max((s for s in by_stream if s not in wires), key=lambda s: len(by_stream[s]))
    named = {"compute": by_stream[compute]}
    others = (s for s in by_stream if s not in wires and s != compute)
    for i, stream in enumerate(sorted(others, key=lambda s: by_stream[s][0][2])):
        named[f"communication {i + 1}"] = by_stream[stream]
    names = ["wire"] if len(wires) == 1 else ["wire inside", "wire outside"]
    return named | {name: by_stream[stream] for name, stream in zip(names, wires)}


def spans(kernels: list[Kernel], wire: bool) -> list[tuple[float, float, str]]:
    """Start, end and kind in microseconds; neighbours of one kind with little between them are one span."""
    found: list[tuple[float, float, str]] = []
    for name, _, start, length, _ in sorted(kernels, key=lambda k: k[2]):
        kind = "wire" if wire else kind_of(name)
        if found and found[-1][2] == kind and start - found[-1][1] < _JOIN_US:
            found[-1] = (found[-1][0], max(found[-1][1], start + length), kind)
        else:
            found.append((start, start + length, kind))
    return found


def draw_timeline(traces: Sequence[Path], out: Path) -> Path:
    """One panel per trace, on a common time axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(traces), 1, figsize=(13, 2.2 * len(traces)), sharex=True, squeeze=False)
    for axis, trace in zip(axes[:, 0], traces):
        kernels = read_trace(trace)
        begin = min(k[2] for k in kernels)
        named = lanes(kernels)
        for row, (lane, own) in enumerate(reversed(named.items())):
            for start, end, kind in spans(own, lane.startswith("wire")):
                colour = _COLOURS.get(kind, _OTHER)
                axis.broken_barh(
                    [((start - begin) / 1e3, (end - start) / 1e3)], (row - 0.4, 0.8), color=colour
                )
        axis.set_yticks(range(len(named)), reversed(list(named)))
        axis.set_title(trace.stem, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("ms")
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in (*_COLOURS.values(), _OTHER)]
    figure.legend(handles, [*_COLOURS, "other"], loc="lower center", ncol=7, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)
    return out
