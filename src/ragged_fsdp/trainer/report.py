"""The curves of one or several runs, drawn from their metrics into one HTML page or SVG file.

The page needs nothing else: its style follows the reader's light or dark scheme, its script shows values
under the pointer, and on a narrow screen panels stand below each other and tables become cards.
"""

import html
import statistics
import tomllib
from pathlib import Path
from typing import Any

from ragged_fsdp.trainer.charts import BOTTOM, HEIGHT, STYLE, TOP, WIDTH, Bars, Line, Panel, draw, smooth
from ragged_fsdp.trainer.metrics import read_metrics

__all__ = ["write_report"]

_PHASES = ("data", "forward", "backward", "optimizer", "reduce_loss")
_OF_THE_RUN = ("run_dir", "resume", "resume_changed", "stop_at")  # settings that say nothing about training
_PAGE_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1120px;margin:2em auto;padding:0 1em;color:var(--ink);
background:var(--paper)}h1{font-size:1.5em;overflow-wrap:anywhere}h2{font-size:1.1em;margin-top:2em}
table{border-collapse:collapse}td,th{padding:.3em .8em;text-align:right;border-bottom:1px solid var(--faint);
overflow-wrap:break-word}td:first-child,th:first-child{text-align:left}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:1.5em 2em}
.panels svg{width:100%;height:auto;touch-action:pan-y}.legend span{margin-right:1.2em;white-space:nowrap}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
#tip{position:fixed;display:none;pointer-events:none;background:var(--paper);border:1px solid var(--faint);
border-radius:4px;padding:.3em .6em;font-size:13px;box-shadow:0 2px 8px #0003;white-space:nowrap}
@media(max-width:640px){thead{display:none}
tr{display:block;margin-bottom:1em;border-bottom:2px solid var(--faint)}
td{display:flex;justify-content:space-between;gap:1em;text-align:right}td:first-child{font-weight:600}
td::before{content:attr(data-name);opacity:.7;text-align:left}
.panels svg text{font-size:14px}.panels svg text:first-of-type{font-size:19px}}
"""
_SCRIPT = """
const tip=document.getElementById('tip');
const near=(points,x)=>points.reduce((a,b)=>Math.abs(b[1]-x)<Math.abs(a[1]-x)?b:a);
for(const svg of document.querySelectorAll('svg[data-lines]')){
 const lines=JSON.parse(svg.dataset.lines).filter(line=>line.points.length);
 const rule=document.createElementNS('http://www.w3.org/2000/svg','line');
 rule.setAttribute('class','axis');rule.setAttribute('y1',TOP);rule.setAttribute('y2',BOTTOM);
 rule.style.display='none';svg.append(rule);
 svg.addEventListener('pointermove',event=>{
  const box=svg.getBoundingClientRect();
  const x=(event.clientX-box.left)*WIDTH/box.width;
  const found=lines.map(line=>[line,near(line.points,x)]);
  if(!found.length)return;
  const step=found.reduce((a,b)=>Math.abs(b[1][1]-x)<Math.abs(a[1][1]-x)?b:a)[1];
  rule.setAttribute('x1',step[1]);rule.setAttribute('x2',step[1]);rule.style.display='';
  tip.replaceChildren(`step ${step[0]}`);
  for(const [line,point] of found){
   if(point[0]!==step[0])continue;
   const row=document.createElement('div');row.style.color=`var(--c${line.color})`;
   row.textContent=`${line.label}: ${Number(point[2].toPrecision(5))}`;tip.append(row);}
  tip.style.display='block';
  tip.style.left=Math.max(0,Math.min(event.clientX+14,innerWidth-tip.offsetWidth-8))+'px';
  tip.style.top=Math.min(event.clientY+14,innerHeight-tip.offsetHeight-8)+'px';});
 svg.addEventListener('pointerleave',()=>{tip.style.display='none';rule.style.display='none';});}
"""

MetricRows = list[dict[str, Any]]


def write_report(runs: dict[str, Path], out: Path) -> None:
    """Draw the runs, by label, into ``out``: an HTML page, or the panels alone if its name ends in .svg."""
    metrics = {label: read_metrics(path) for label, path in runs.items()}
    for label, rows in metrics.items():
        if not any(row["kind"] == "train" for row in rows):
            raise ValueError(f"{runs[label]} has no metrics.jsonl with training steps")
    panels = [draw(panel) for panel in _panels(metrics)]
    out.parent.mkdir(parents=True, exist_ok=True)
    page = _file(panels) if out.suffix == ".svg" else _page(runs, metrics, panels)
    out.write_text(page, encoding="utf-8")


def _panels(metrics: dict[str, MetricRows]) -> list[Panel | Bars]:
    losses, marks = [], []
    for color, (label, rows) in enumerate(metrics.items()):
        steps, values = _series(rows, "train", "loss")
        losses.append(Line(f"{label} training", steps, values, color, "faint"))
        losses.append(Line(f"{label} training, smoothed", steps, smooth(values), color))
        losses.append(Line(f"{label} validation", *_series(rows, "eval", "loss"), color, "dots"))
        marks += [(row["step"], color) for row in rows if row["kind"] == "start" and row["step"]]
    note = "training faint, its running mean bold, validation as dots" + (", resumed dotted" if marks else "")
    memory = [
        Line(f"{label} {kind}", steps, [value / 2**20 for value in values], color, style)
        for color, (label, rows) in enumerate(metrics.items())
        for kind, style in (("allocated", "line"), ("reserved", "dashed"), ("held", "dotted"))
        for steps, values in [_series(rows, "train", "memory", kind)]
    ]
    return [
        Panel("Loss", note, "loss", losses, marks=marks),
        Panel("Gradient norm", "before clipping", "norm", _one_line(metrics, "grad_norm")),
        Panel(
            "Learning rate",
            "under Muon that of its matrices",
            "rate",
            _one_line(metrics, "lr"),
            from_zero=True,
        ),
        Panel(
            "Speed", "all processes together", "tokens/s", _one_line(metrics, "tokens_per_s"), from_zero=True
        ),
        Panel(
            "Memory of rank 0", "peak as a line, reserved dashed, held dotted", "MiB", memory, from_zero=True
        ),
        Bars("Where a step goes", "medians over the run", "ms per step", _PHASES, _phase_rows(metrics)),
    ]


def _one_line(metrics: dict[str, MetricRows], *keys: str) -> list[Line]:
    return [
        Line(label, *_series(rows, "train", *keys), color)
        for color, (label, rows) in enumerate(metrics.items())
    ]


def _phase_rows(metrics: dict[str, MetricRows]) -> list[tuple[str, list[float]]]:
    """The median milliseconds of each phase, run by run."""
    found = []
    for label, rows in metrics.items():
        series = [_series(rows, "train", "phases_s", phase)[1] for phase in _PHASES]
        found.append((label, [1e3 * statistics.median(values) if values else 0.0 for values in series]))
    return found


def _series(rows: MetricRows, kind: str, *keys: str) -> tuple[list[int], list[float]]:
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


def _file(panels: list[str]) -> str:
    """The panels in two columns, in one SVG with its own style."""
    gap = 24
    placed = [
        panel.replace(
            "<svg ",
            f'<svg x="{column * (WIDTH + gap) + gap}" y="{row * (HEIGHT + gap) + gap}" width="{WIDTH}" '
            f'height="{HEIGHT}" ',
            1,
        )
        for number, panel in enumerate(panels)
        for row, column in [divmod(number, 2)]
    ]
    width, height = 2 * (WIDTH + gap) + gap, -(-len(panels) // 2) * (HEIGHT + gap) + gap
    return (
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}"><style>{STYLE}</style><rect width="100%" height="100%" '
        f'style="fill:var(--paper)"/>{"".join(placed)}</svg>\n'
    )


def _page(runs: dict[str, Path], metrics: dict[str, MetricRows], panels: list[str]) -> str:
    legend = "".join(
        f'<span><i style="background:var(--c{color % 8})"></i>{html.escape(label)}</span>'
        for color, label in enumerate(metrics)
    )
    changed = _differences(runs)
    differences = f"<h2>What differs in the settings</h2>{_table(changed)}" if changed else ""
    script = _SCRIPT
    for name, value in (("WIDTH", WIDTH), ("BOTTOM", HEIGHT - BOTTOM), ("TOP", TOP)):
        script = script.replace(name, str(value))
    title = html.escape(" · ".join(metrics))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}{_PAGE_STYLE}</style></head><body><h1>{title}</h1>"
        f'{_table(_summary(metrics))}<h2>Curves</h2><p class="legend">{legend}</p>'
        f'<div class="panels">{"".join(panels)}</div>{differences}'
        f'<div id="tip"></div><script>{script}</script>'
        "</body></html>\n"
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    """A table whose first row is its head; each cell knows its column, for narrow screens."""
    head, *body = rows
    cells = (
        "".join(
            f'<td data-name="{html.escape(name)}">{cell}</td>' for name, cell in zip(head, row, strict=True)
        )
        for row in body
    )
    titles = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def _summary(metrics: dict[str, MetricRows]) -> list[tuple[str, ...]]:
    head = (
        "run",
        "processes",
        "sharding",
        "reduction",
        "parameters",
        "steps",
        "train loss",
        "validation loss",
    )
    table: list[tuple[str, ...]] = [(*head, "tokens/s")]
    for label, rows in metrics.items():
        starts = [row for row in rows if row["kind"] == "start"]
        train = [row for row in rows if row["kind"] == "train"]
        _, evals = _series(rows, "eval", "loss")
        last = starts[-1] if starts else {}
        cells = (
            html.escape(label),
            " then ".join(str(row["world_size"]) for row in starts),
            html.escape(last.get("sharding", "")),
            "<br>".join(html.escape(line.removeprefix("gradients: ")) for line in last.get("reductions", ())),
            f"{last['parameters']:,}" if last else "",
            f"{train[-1]['step']:,}",
            f"{train[-1]['loss']:.4f}",
            f"{evals[-1]:.4f}" if evals else "",
            f"{statistics.median(row['tokens_per_s'] for row in train):,.0f}",
        )
        table.append(cells)
    return table


def _differences(runs: dict[str, Path]) -> list[tuple[str, ...]]:
    """Settings that all runs have and that are not the same in all; needs ``config.toml`` of two runs."""
    stored = {label: path / "config.toml" for label, path in runs.items()}
    settings: dict[str, dict[str, Any]] = {}
    for label, path in stored.items():
        if path.exists():
            sections = tomllib.loads(path.read_text(encoding="utf-8")).values()
            settings[label] = {key: value for section in sections for key, value in section.items()}
    if len(settings) < 2:
        return []
    shared = set.intersection(*(set(of_run) for of_run in settings.values())) - set(_OF_THE_RUN)
    rows = []
    for name in (name for name in next(iter(settings.values())) if name in shared):
        values = [_readable(of_run[name]) for of_run in settings.values()]
        if len(set(values)) > 1:
            rows.append((html.escape(name), *(html.escape(value) for value in values)))
    return [("setting", *settings), *rows] if rows else []


def _readable(value: Any) -> str:
    """A setting as one would type it."""
    if isinstance(value, dict):
        value = [f"{key}={inner}" for key, inner in value.items()]
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return "none" if value == "" else str(value)
