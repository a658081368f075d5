"""Panels of a report as SVG, drawn by hand: lines over steps, and stacked bars.

Colours are variables of the page, so that a panel follows its light or dark scheme. The values of a panel's
lines are stored beside it, for the page's script to show under the pointer.
"""

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "BOTTOM",
    "HEIGHT",
    "STYLE",
    "TOP",
    "WIDTH",
    "Bars",
    "Line",
    "Panel",
    "draw",
    "robust_range",
    "smooth",
]

WIDTH, HEIGHT = 520, 300
_LEFT, _RIGHT, TOP, BOTTOM = 62, 14, 48, 44
_ROW, _BAR = 58, 30  # of a run in a panel of bars: its label and its bar, and the bar alone
_OUTLIER = 3.0  # how many times the usual range a value may stray before it is left out of the axis
_LIGHT = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
_DARK = ("#7aa2ff", "#ff8a80", "#4ade80", "#fbbf24", "#c4a7ff", "#5ad1e6", "#ff8ac2", "#b4d455")


def _scheme(colors: Sequence[str], ink: str, paper: str, faint: str) -> str:
    named = "".join(f"--c{i}:{color};" for i, color in enumerate(colors))
    return f"{named}--ink:{ink};--paper:{paper};--faint:{faint}"


STYLE = (
    f":root{{color-scheme:light dark;{_scheme(_LIGHT, '#1f2937', '#ffffff', '#d1d5db')}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_scheme(_DARK, '#e5e7eb', '#14171c', '#3b424d')}}}}}"
    "svg{font-family:system-ui,sans-serif;fill:var(--ink)}"
    "svg .grid{stroke:var(--faint);stroke-width:1;opacity:.6}svg .axis{stroke:var(--ink);opacity:.5}"
    "svg .line{fill:none;stroke-width:1.8;stroke-linejoin:round}svg .faint{stroke-width:1;opacity:.3}"
    "svg .dashed{stroke-dasharray:5 3}svg .dotted{stroke-dasharray:2 3}"
)
"""Style sheet of panels, for a page or a file of their own."""


@dataclass(frozen=True)
class Line:
    """Values by step. ``style`` is ``line``, ``faint``, ``dashed``, ``dotted`` or ``dots``."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    color: int
    style: str = "line"

    @property
    def points(self) -> list[tuple[int, float]]:
        """Steps with finite values."""
        return [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]


@dataclass(frozen=True)
class Panel:
    """A chart over steps: ``note`` says what the styles mean, ``marks`` are steps of resumed starts."""

    title: str
    note: str
    y_label: str
    lines: Sequence[Line]
    from_zero: bool = False
    marks: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Bars:
    """A stacked bar for each run, with its parts' numbers on it."""

    title: str
    note: str
    x_label: str
    parts: Sequence[str]
    rows: Sequence[tuple[str, Sequence[float]]]


def smooth(values: Sequence[float]) -> list[float]:
    """A running mean over about a twentieth of the values, at most 50; at the start over those there are."""
    weight = 1 - 1 / max(1.0, min(50.0, len(values) / 20))
    total = count = 0.0
    result = []
    for value in values:
        total, count = weight * total + value, weight * count + 1
        result.append(total / count)
    return result


def robust_range(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest value, leaving out the few that would flatten all others."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return 0.0, 1.0
    last = len(ordered) - 1
    low, high = ordered[round(0.02 * last)], ordered[round(0.98 * last)]
    far = _OUTLIER * (high - low)
    near = [value for value in ordered if low - far <= value <= high + far]
    return near[0], near[-1]


def draw(panel: Panel | Bars) -> str:
    """A panel as an SVG element."""
    body = "".join(_bars(panel) if isinstance(panel, Bars) else _lines(panel))
    data = "" if isinstance(panel, Bars) else f" data-lines='{_stored(panel)}'"
    text = html.escape(panel.title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {_height(panel)}" preserveAspectRatio="xMinYMin" role="img" '
        f'aria-label="{text}" xmlns="http://www.w3.org/2000/svg"{data}>'
        f"{_text(0, 16, panel.title, size=15, weight=600)}"
        f"{_text(0, 34, panel.note, size=11, opacity=0.75)}{body}</svg>"
    )


def _stored(panel: Panel) -> str:
    """What the script needs: the places of points on the panel and their values, by line."""
    scale = _Scale.of(panel)
    lines = [
        {
            "label": line.label,
            "color": line.color % len(_LIGHT),
            "points": [[s, round(scale.x(s), 1), v] for s, v in line.points],
        }
        for line in panel.lines
        if line.style != "faint"
    ]
    return html.escape(json.dumps(lines, separators=(",", ":")), quote=True)


@dataclass(frozen=True)
class _Scale:
    first: float
    last: float
    low: float
    high: float

    @classmethod
    def of(cls, panel: Panel) -> "_Scale":
        steps = [step for line in panel.lines for step in line.steps] or [0, 1]
        low, high = robust_range([value for line in panel.lines for value in line.values])
        low = 0.0 if panel.from_zero else low
        margin = 0.04 * (high - low) or abs(high) * 0.05 or 1.0
        return cls(min(steps), max(steps), low if panel.from_zero else low - margin, high + margin)

    def x(self, step: float) -> float:
        share = (step - self.first) / ((self.last - self.first) or 1)
        return _LEFT + share * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Clamped: what lies outside is drawn at the edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _lines(panel: Panel) -> Iterator[str]:
    scale = _Scale.of(panel)
    bottom, right = HEIGHT - BOTTOM, WIDTH - _RIGHT
    for value in _ticks(scale.low, scale.high, 5):
        y = scale.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield _text(_LEFT - 6, y + 4, _short(value), anchor="end")
    for step in _ticks(scale.first, scale.last, 6):
        yield _text(scale.x(step), bottom + 16, _short(step), anchor="middle")
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>'
    yield _text((_LEFT + right) / 2, HEIGHT - 8, "step", anchor="middle")
    middle = (TOP + bottom) / 2
    yield _text(13, middle, panel.y_label, anchor="middle", turn=True)
    for step, run in panel.marks:
        x = scale.x(step)
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"'
        yield f'<line class="dotted" stroke="var(--c{run % 8})" {ends}/>'
    outside = 0
    for line in panel.lines:
        points = [(scale.x(s), scale.y(v)) for s, v in line.points]
        outside += sum(not scale.low <= v <= scale.high for v in line.values if line.style != "faint")
        color = f"var(--c{line.color % 8})"
        if line.style == "dots" or len(points) == 1:
            yield from (f'<circle fill="{color}" r="3" cx="{x:.1f}" cy="{y:.1f}"/>' for x, y in points)
        if len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline class="line {line.style}" stroke="{color}" points="{path}"/>'
    if outside:
        yield _text(right, TOP - 4, f"{outside} beyond the axis, drawn at its edge", anchor="end", size=10)


def _bars(panel: Bars) -> Iterator[str]:
    longest = max((sum(values) for _, values in panel.rows), default=0.0) or 1.0
    for index, part in enumerate(panel.parts):
        x = index * (WIDTH - _RIGHT) / len(panel.parts)
        yield f'<rect x="{x:.0f}" y="{TOP - 6}" width="10" height="10" fill="var(--c{index % 8})"/>'
        yield _text(x + 14, TOP + 3, part)
    for number, (label, values) in enumerate(panel.rows):
        y, x = TOP + 18 + number * _ROW + 18, 0.0
        yield _text(0, y - 5, label)
        for index, value in enumerate(values):
            width = value / longest * (WIDTH - _RIGHT - 46)
            name = f"{label}: {panel.parts[index]} {_milliseconds(value)}"
            yield (
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_BAR}" '
                f'fill="var(--c{index % 8})"><title>{html.escape(name)}</title></rect>'
            )
            if width > 34:
                yield _text(
                    x + width / 2, y + _BAR / 2 + 4, _milliseconds(value), anchor="middle", paper=True
                )
            x += width
        yield _text(x + 4, y + _BAR / 2 + 4, _milliseconds(sum(values)))
    yield _text((WIDTH - _RIGHT) / 2, _height(panel) - 8, panel.x_label, anchor="middle")


def _height(panel: Panel | Bars) -> float:
    """Bars are as high as all rows need, so that none is squeezed."""
    return TOP + 18 + len(panel.rows) * _ROW + 26 if isinstance(panel, Bars) else HEIGHT


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else _short(value)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    anchor: str = "start",
    weight: int = 400,
    opacity: float = 1.0,
    turn: bool = False,
    paper: bool = False,
) -> str:
    more = f' transform="rotate(-90 {x:.0f} {y:.0f})"' if turn else ""
    more += ' style="fill:var(--paper)"' if paper else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}" '
        f'opacity="{opacity}"{more}>{html.escape(text)}</text>'
    )


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers between two ends: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _short(value: float) -> str:
    """A number in few characters: 1.2k, 3e-4, 0.25."""
    if value == 0:
        return "0"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}" if size >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")
