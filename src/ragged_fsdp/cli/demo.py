"""``ragged-fsdp demo``: the two-minute tour."""

import shutil
import time
from pathlib import Path
from typing import Any

import click

from ragged_fsdp.cli import HELP_OPTIONS

__all__ = ["SETTINGS", "command"]

SETTINGS: dict[str, Any] = {
    "model": "demo",
    "data": ["stdlib"],
    "seq_len": 128,
    "batch": 24,
    "steps": 120,
    "optimizer": "muon",
    "lr": 4e-3,
    "warmup": 10,
    "eval_every": 20,
    "eval_sequences": 48,
    "checkpoint_every": 40,
    "log_every": 10,
    "sharding": "ragged",
    "granularity": {"*.experts.*": "rows:32"},
}
_STOP_AT = 80
_CONTENTS = ("run", "export", "report.html")


@click.command(context_settings={"show_default": True, **HELP_OPTIONS})
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    help="folder to write to",
)
@click.option("--processes", type=click.IntRange(min=1), default=4, help="processes of the first part")
@click.option("--then", "then_processes", type=click.IntRange(min=1), default=3, help="processes afterwards")
@click.option("--steps", type=click.IntRange(min=4), default=SETTINGS["steps"], help="steps in all")
@click.option("--model", default=SETTINGS["model"], help="a built-in size")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="cuda if there is one"
)
def command(out: Path, processes: int, then_processes: int, steps: int, model: str, device: str) -> None:
    """Train a small mixture-of-experts model on the Python standard library's sources, sharded.

    Shows the layout, trains on 4 processes, stops, resumes from the checkpoint on 3, writes a sample of
    text, exports safetensors and draws the curves. Replaces what an earlier demo left in its folder, and
    refuses a folder that holds anything else.
    """
    from rich.console import Console

    from ragged_fsdp.cli.train import run
    from ragged_fsdp.trainer.config_file import from_values

    console = Console(highlight=False)
    began = time.monotonic()
    _make_room(out)
    stop_at = max(2, steps * _STOP_AT // SETTINGS["steps"])
    common = {**SETTINGS, "steps": steps, "model": model, "device": device, "run_dir": str(out / "run")}

    console.rule(f"[bold]1. train on {processes} processes", align="left")
    run(from_values(common, {"processes": processes, "stop_at": stop_at}))
    console.rule(
        f"[bold]2. resume the checkpoint on {then_processes} processes, and write a sample of text",
        align="left",
    )
    sampling = {"sample_tokens": 200, "sample_prompt": "def ", "temperature": 0.8}
    last = run(from_values(common, {"processes": then_processes, "resume": "must", **sampling}))
    console.rule("[bold]3. export and report", align="left")
    exported = _export_and_report(out)
    console.rule("[bold]done", align="left")
    _summarize(console, out, exported, stop_at, last, (processes, then_processes))
    console.print(f"in {time.monotonic() - began:.0f} s")


def _make_room(out: Path) -> None:
    """Remove an earlier demo; never what somebody else has put there."""
    others = sorted({path.name for path in out.iterdir()} - set(_CONTENTS)) if out.exists() else []
    if others:
        raise click.UsageError(f"--out {out}: holds {others[0]!r}, which no demo wrote; use another folder")
    shutil.rmtree(out, ignore_errors=True)


def _export_and_report(out: Path) -> Path:
    from ragged_fsdp.cli.checkpoint_path import find_checkpoint
    from ragged_fsdp.trainer.exporting import export
    from ragged_fsdp.trainer.report import write_report

    checkpoint = find_checkpoint(out / "run")
    files = export(checkpoint, out / "export", overwrite=True)
    click.echo(f"{checkpoint} -> {files[0]} ({files[0].stat().st_size / 2**20:.1f} MiB)")
    write_report({"demo": out / "run"}, out / "report.html")
    return files[0]


def _summarize(
    console: Any,
    out: Path,
    exported: Path,
    stop_at: int,
    last: dict[str, Any],
    processes: tuple[int, int],
) -> None:
    from ragged_fsdp.trainer.metrics import losses_by_step

    losses = losses_by_step(out / "run")
    evals = losses_by_step(out / "run", "eval")
    curve = "  ".join(f"{step}: {loss:.3f}" for step, loss in evals.items())
    console.print(f"validation loss    {curve}", soft_wrap=True)
    console.print(
        f"across the resume  step {stop_at} on {processes[0]} processes: {losses[stop_at]:.3f}; "
        f"step {stop_at + 1} on {processes[1]}: {losses[stop_at + 1]:.3f}",
        soft_wrap=True,
    )
    console.print(f"at the end         training {last['train_loss']:.4f}, validation {last['eval_loss']:.4f}")
    for what, where in (
        ("checkpoints", out / "run" / "checkpoints"),
        ("metrics", out / "run" / "metrics.jsonl"),
        ("safetensors", exported),
        ("curves", out / "report.html"),
    ):
        console.print(f"{what:<18} {where}", soft_wrap=True)
