"""``ragged-fsdp calibrate``: how fast this GPU is, as a card that ``predict`` reads."""

from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from ragged_fsdp.cli import HELP_OPTIONS

__all__ = ["command"]

_HELP = """Run a few layers on this machine's GPU and write their times as a calibration card.

MODELS are any that `train --model` takes; a card may hold several. A model takes 10 to 30 seconds.

\b
Examples:
  ragged-fsdp calibrate llama-3-70b gpt-oss-120b --seq-len 4096 \\
      --out h200.json
  ragged-fsdp predict llama-3-70b --gpus 64 --tokens-per-gpu 8192 \\
      --hardware h200.json
"""


@click.command(help=_HELP, context_settings={"show_default": True, **HELP_OPTIONS})
@click.argument("models", nargs=-1, required=True)
@click.option("--seq-len", type=click.IntRange(min=1), default=4096, help="tokens of a sequence.")
@click.option("--sequences", default="1,2,4", help="numbers of sequences to run: three make a good line.")
@click.option("--name", help="name of the card; the file's by default.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="the card, a .json file."
)
def command(models: tuple[str, ...], seq_len: int, sequences: str, name: str | None, out: Path) -> None:
    """Measure and write the card."""
    status = Console(stderr=True)
    try:
        if out.suffix != ".json":
            raise ValueError(f"--out {str(out)!r}: a card is a .json file.")
        counts = tuple(sorted({int(text) for text in sequences.split(",") if text.strip().isdigit()}))
        if not counts or counts[0] < 1:
            raise ValueError(f"--sequences {sequences!r}: expected numbers such as 1,2,4.")
        from ragged_fsdp.predict.measure import Numbers, measure_card
        from ragged_fsdp.predict.workload import workload_of

        wanted = [Numbers(workload_of(model), seq_len, counts) for model in models]
        card = measure_card(name or out.stem, wanted, lambda text: status.print(text, highlight=False))
        card.save(out)
    except (ValueError, OSError) as error:
        status.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise click.exceptions.Exit(2) from None
    status.print(f"wrote {out}: {card.device}, {len(card.layers)} kinds of layers", highlight=False)
