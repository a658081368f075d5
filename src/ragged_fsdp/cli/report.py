"""``ragged-fsdp report``: the curves of runs in one page."""

from pathlib import Path

import click

from ragged_fsdp.cli import HELP_OPTIONS

__all__ = ["command"]


@click.command(context_settings=HELP_OPTIONS)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), default=None, help="page (.html or .svg)"
)
def command(runs: tuple[str, ...], out: Path | None) -> None:
    """Draw loss, learning rate, speed, memory and step times of each RUN folder into one page.

    A run may be given as LABEL=FOLDER. Without --out the page is report.html in the first run's folder.

    \b
    Examples:
      ragged-fsdp report runs/first
      ragged-fsdp report before=runs/first after=runs/second --out compare.html
    """
    from ragged_fsdp.trainer.report import write_report

    folders: dict[str, Path] = {}
    for text in runs:
        label, separator, folder = text.partition("=")
        if not separator or Path(text).is_dir():  # a folder may be named lr=1e-3
            label, folder = "", text
        path = Path(folder)
        if not path.is_dir():
            raise click.ClickException(f"{path} is not the folder of a run")
        label = label or (path.name if path.name not in folders else str(path))
        if label in folders:
            raise click.ClickException(f"two runs are called {label!r}; give one as LABEL=FOLDER")
        folders[label] = path
    target = out or next(iter(folders.values())) / "report.html"
    if target.suffix not in (".html", ".svg"):
        raise click.ClickException(f"--out {target}: expected a name ending in .html or .svg")
    try:
        write_report(folders, target)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(target)
