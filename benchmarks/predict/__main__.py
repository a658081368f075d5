"""``python -m benchmarks.predict``: calibrate on a GPU, compare on any machine."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from benchmarks.predict.layers import CALIBRATED, stack_workload
from benchmarks.predict.paper import draw, model_scaling, strong_scaling, weak_scaling
from benchmarks.predict.public import PUBLIC, predicted_seconds
from benchmarks.predict.step_rows import APART, Row, compared, left_out
from benchmarks.step.shapes import MODELS

from ragged_fsdp.predict.card import load_card
from ragged_fsdp.predict.costs import count_costs
from ragged_fsdp.predict.measure import roofline_of

RESULTS = Path(__file__).parent / "results"


@click.group()
def main() -> None:
    """Predictions beside measurements."""


@main.command()
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS / "h200-layers.json")
def calibrate(out: Path) -> None:
    """Measure the step benchmark's layers on this machine's GPU (about 40 seconds)."""
    from ragged_fsdp.predict.measure import Numbers, measure_card

    wanted = [
        Numbers(stack_workload(name), MODELS[name].sequence, sequences)
        for name, sequences in CALIBRATED.items()
    ]
    card = measure_card(out.stem, wanted, lambda text: click.echo(text, err=True))
    card.save(out)
    click.echo(f"wrote {out}")


@main.command()
@click.option("--card", "path", type=click.Path(path_type=Path), default=RESULTS / "h200-layers.json")
def recount(path: Path) -> None:
    """Count the operations of a card's layers again (CPU): times and bytes that were measured stay."""
    card = load_card(path)
    roofline = roofline_of(card)
    layers = []
    for layer in card.layers:
        workload = stack_workload(layer.model)
        kind = next(kind for kind in workload.kinds if kind.name == layer.kind)
        points = []
        for point in layer.points:
            cost = count_costs(workload, point.tokens // layer.seq_len, layer.seq_len)[kind.signature]
            counted = [phase.seconds(roofline) * 1e3 for phase in (cost.forward, cost.backward)]
            points.append(replace(point, roofline_forward_ms=counted[0], roofline_backward_ms=counted[1]))
        layers.append(replace(layer, signature=kind.signature, points=tuple(points)))
    replace(card, layers=tuple(layers)).save(path)
    click.echo(f"wrote {path}")


@main.command()
@click.option("--card", type=click.Path(path_type=Path), default=RESULTS / "h200-layers.json")
def compare(card: Path) -> None:
    """Write predictions beside the step benchmark, the published rows and the paper (CPU, two minutes)."""
    if card.exists():
        _save("step", _step_rows(card))
    else:
        click.echo(f"{card}: no card; the rows of the step benchmark are left out", err=True)
    rows = []
    for row in PUBLIC:
        seconds = predicted_seconds(row)
        error = round(seconds / row.seconds - 1, 4)
        rows.append(asdict(row) | {"predicted_s": round(seconds, 3), "error": error})
    mean = statistics.fmean(abs(row["error"]) for row in rows)
    _save("public", {"mean_error": round(mean, 4), "rows": rows})
    paper = {"weak": weak_scaling(), "strong": strong_scaling(), "model": model_scaling()}
    _save("paper", paper)
    draw(paper, RESULTS / "paper.svg")


def _step_rows(path: Path) -> dict[str, Any]:
    card = load_card(path)
    rows = list(compared(card))
    held_out = [row for name in (*CALIBRATED, APART) for row in compared(card, name)]
    return {
        "calibrated": _summary([row for row in rows if not row.earlier and row.model in CALIBRATED]),
        "held_out": _summary([row for row in held_out if not row.earlier]),
        "earlier_code": _summary([row for row in rows if row.earlier]),
        "left_out": [asdict(row) for row in left_out()],
    }


def _summary(rows: list[Row]) -> dict[str, Any]:
    return {
        "mean_time_error": round(statistics.fmean(abs(row.time_error) for row in rows), 4),
        "mean_memory_error": round(statistics.fmean(abs(row.memory_error) for row in rows), 4),
        "time_within_5_percent": sum(abs(row.time_error) <= 0.05 for row in rows),
        "time_within_8_percent": sum(abs(row.time_error) <= 0.08 for row in rows),
        "memory_within_3_percent": sum(abs(row.memory_error) <= 0.03 for row in rows),
        "count": len(rows),
        "rows": [
            {
                key: round(value, 3) if isinstance(value, float) else value
                for key, value in asdict(row).items()
            }
            | {"time_error": round(row.time_error, 4), "memory_error": round(row.memory_error, 4)}
            for row in rows
        ],
    }


def _save(name: str, content: Any) -> None:
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()
