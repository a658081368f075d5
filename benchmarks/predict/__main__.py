"""``python -m benchmarks.predict``: calibrate on a GPU, compare on any machine."""

from __future__ import annotations

from pathlib import Path

import click
from benchmarks.predict.layers import CALIBRATED, stack_workload
from benchmarks.step.shapes import MODELS

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


if __name__ == "__main__":
    main()
