"""``ragged-fsdp inspect``: what a checkpoint holds, without loading it."""

import json
from typing import Any

import click

from ragged_fsdp.cli import HELP_OPTIONS
from ragged_fsdp.cli.checkpoint_path import PLACE, find_checkpoint

__all__ = ["command"]


@click.command(context_settings=HELP_OPTIONS)
@click.argument("checkpoint", type=PLACE)
@click.option("--verify", is_flag=True, help="read every file and compare its checksum")
@click.option("--all", "show_all", is_flag=True, help="list all tensors, not only the model's")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def command(checkpoint: Any, verify: bool, show_all: bool, as_json: bool) -> None:
    """Show the step, the losses, the tensors and the files of CHECKPOINT (or of a run's newest one).

    CHECKPOINT is a folder, or a URL that fsspec knows. A folder of safetensors, exported or of another
    tool, is shown too; files that are not as long as they say are refused.

    \b
    Examples:
      ragged-fsdp inspect runs/first --verify
      ragged-fsdp inspect runs/first/checkpoints/step-00000040 --json
    """
    from ragged_fsdp.checkpoint.contents import CheckpointReader
    from ragged_fsdp.checkpoint.store import damage

    try:
        names = [path.name for path in checkpoint.iterdir()] if checkpoint.is_dir() else []
        if any(name.endswith(".safetensors") for name in names):
            summary, show_all = _exported(checkpoint), True
            summary["problems"] = [] if verify else None
        else:
            path = find_checkpoint(checkpoint)
            summary = _summary(CheckpointReader(path))
            summary["problems"] = damage(path) if verify else None
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(summary, indent=1))
    else:
        _print(summary, show_all)
    if summary["problems"]:
        raise SystemExit(1)


def _exported(folder: Any) -> dict[str, Any]:
    """What the safetensors of a folder hold, from their headers, which are checked against the files."""
    from ragged_fsdp.weights.files import read_header, safetensors_files

    entries = {}
    for file, wanted in safetensors_files(folder).items():
        entries.update(read_header(folder, file, wanted))
    tensors = [_line(name, entry, 1, entry.nbytes) for name, entry in sorted(entries.items())]
    return {"path": str(folder), "info": {}, "tensors": tensors, "values": [], "files": _sizes(folder)}


def _summary(reader: Any) -> dict[str, Any]:
    return {
        "path": str(reader.path),
        "info": {k: v for k, v in reader.info.items() if k != "config"},
        "tensors": [_line(t.name, t, t.pieces, t.byte_count) for t in reader.tensors()],
        "values": reader.values(),
        "files": _sizes(reader.path),
    }


def _line(name: str, tensor: Any, pieces: int, byte_count: int) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": dtype,
        "pieces": pieces,
        "bytes": byte_count,
    }


def _sizes(folder: Any) -> dict[str, int]:
    """Bytes of each file."""
    return {p.name: p.stat().st_size for p in sorted(folder.iterdir(), key=str) if p.is_file()}


def _print(summary: dict[str, Any], show_all: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 140  # of 80 columns, names would take all
    info = summary["info"]
    console.print(f"[bold]{escape(str(summary['path']))}[/bold]")
    for key in ("step", "samples", "tokens", "train_loss", "eval_loss", "world_size"):
        if info.get(key) is not None:
            shown_value = f"{info[key]:,}" if isinstance(info[key], int) else f"{info[key]:.4f}"
            console.print(f"  {key:<11} {shown_value}")
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "shape", "type"):
        table.add_column(title, no_wrap=True)
    for title in ("pieces", "MiB"):
        table.add_column(title, justify="right", no_wrap=True)
    shown = [t for t in summary["tensors"] if show_all or t["name"].startswith("model.")]
    for t in shown:
        shape = " x ".join(map(str, t["shape"])) or "scalar"
        table.add_row(t["name"], shape, t["dtype"], str(t["pieces"]), f"{t['bytes'] / 2**20:.2f}")
    console.print(table)
    total = sum(t["bytes"] for t in summary["tensors"])
    hidden = len(summary["tensors"]) - len(shown)
    more = f"; {hidden} more with --all" if hidden else ""
    counts = (
        f"{len(summary['tensors'])} tensors, {total / 2**20:,.2f} MiB{more}; {len(summary['files'])} files"
    )
    console.print(counts)
    if summary["problems"] is not None:
        for problem in summary["problems"]:
            console.print(f"[red]damaged:[/red] {escape(str(problem))}")
        if not summary["problems"]:
            console.print("every file is as it was written" if info else "every file is as long as it says")
