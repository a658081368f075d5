"""``ragged-fsdp train``: every setting is a flag; a TOML file may come first."""

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_origin, get_type_hints

import click

from ragged_fsdp.cli import HELP_OPTIONS
from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.config_file import ConfigError, from_values, load_toml

__all__ = ["command"]

_HELP = """Train a language model, sharded over the processes of this machine, torchrun or SLURM.

Flags override the file given with --config; the settings of a run are saved as config.toml in its folder.
Ctrl-C stops after the current step and saves. The same command again continues where the run stopped.

\b
Examples:
  ragged-fsdp train --model nano --data 'text/*.txt' --steps 500 --processes 2
  ragged-fsdp train --model path/to/llama --data tokens.bin --seq-len 4096
  ragged-fsdp train --config runs/first/config.toml --run-dir runs/second
  torchrun --nproc-per-node 8 --no-python ragged-fsdp train --model medium
"""


def _flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """One option per setting, grouped as the sections of the file are."""
    for section in reversed(TrainConfig.sections().values()):
        hints = get_type_hints(section)
        for field in reversed(fields(section)):
            function = _flag(field, hints[field.name])(function)
    return function


def _flag(field: Any, hint: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    name = field.name.replace("_", "-")
    default = field.default_factory() if callable(field.default_factory) else field.default
    shown = " ".join(default) if isinstance(default, list) else default
    text = field.metadata["help"] + (f"  [default: {shown}]" if shown not in ("", {}) else "")
    options: dict[str, Any] = {"default": None, "help": text}
    if hint is bool:
        return click.option(f"--{name}/--no-{name}", field.name, **options)
    if get_origin(hint) in (list, dict):
        options.update(multiple=True, metavar="KEY=VALUE" if get_origin(hint) is dict else "SOURCE")
    elif field.metadata["choices"]:
        # not click.Choice: the settings' own check names the nearest value, as it does for the file
        options["metavar"] = f"[{'|'.join(field.metadata['choices'])}]"
    else:
        options["type"] = hint
    return click.option(f"--{name}", field.name, **options)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags that were on the command line, with ``KEY=VALUE`` texts as tables."""
    hints = {k: h for cls in TrainConfig.sections().values() for k, h in get_type_hints(cls).items()}
    values: dict[str, Any] = {}
    for name, value in flags.items():
        if value is None or value == ():
            continue
        if get_origin(hints[name]) is dict:
            for text in value:
                if "=" not in text:
                    raise ConfigError(f"--{name.replace('_', '-')} {text}: expected KEY=VALUE")
            pairs = [text.split("=", 1) for text in value]
            keys = [key for key, _ in pairs]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise ConfigError(f"--{name.replace('_', '-')} {twice[0]}: given twice")
            values[name] = dict(pairs)
        else:
            values[name] = list(value) if isinstance(value, tuple) else value
    return values


class _TrainCommand(click.Command):
    """Shows the flags under the names of their sections in the file."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {p.name: p.get_help_record(ctx) for p in self.get_params(ctx)}
        sections = TrainConfig.sections().items()
        named = {f"[{name}]: {_first_line(cls)}": [f.name for f in fields(cls)] for name, cls in sections}
        rest = [name for name in records if not any(name in names for names in named.values())]
        for title, names in {"Options": rest, **named}.items():
            with formatter.section(title):
                formatter.write_dl([found for name in names if (found := records[name])])


class _Refused(click.ClickException):
    """Settings, data or a checkpoint that do not go together: how to spell the command is no help there."""

    exit_code = 2


def _first_line(section: type) -> str:
    return (section.__doc__ or "").splitlines()[0].rstrip(".")


@click.command(cls=_TrainCommand, help=_HELP, context_settings=HELP_OPTIONS)
@click.option("--config", type=click.Path(dir_okay=False), default=None, help="settings file (TOML)")
@_flags
def command(config: str | None, **flags: Any) -> None:
    """Merge file and flags, and run."""
    try:
        settings = from_values(load_toml(config) if config else {}, _given(flags))
    except ConfigError as error:
        raise _Refused(str(error)) from error
    run(settings)


def run(settings: TrainConfig) -> dict[str, Any]:
    """Start a run and turn its failures into messages and exit codes."""
    from ragged_fsdp.trainer.launch import RankFailure
    from ragged_fsdp.trainer.start import start

    try:
        outcome = start(settings)
    except ConfigError as error:
        raise _Refused(str(error)) from error
    except RankFailure as error:
        print(f"\n{error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    if outcome["status"] == "interrupted":
        sys.exit(130)
    return outcome
