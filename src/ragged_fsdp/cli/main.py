"""``ragged-fsdp``: finds the subcommand, and imports only the module that holds it."""

import difflib
import importlib
import sys
from typing import Any

import click

from ragged_fsdp.cli import HELP_OPTIONS

__all__ = ["main"]

_COMMANDS = {
    "demo": "the two-minute tour: train, checkpoint, resume at another size, export",
    "plan": "lay a model's parameters out over FSDP ranks and show the padding",
    "predict": "say what a training step will cost on any number of GPUs",
    "calibrate": "measure this machine's GPU for predict",
    "train": "train a model, sharded over the processes of this machine, torchrun or SLURM",
    "inspect": "show what a checkpoint holds without loading it",
    "export": "write a checkpoint as safetensors",
    "report": "draw the curves of runs into one page",
    "bench": "measure this package and its peers (from a checkout)",
}


class _LazyGroup(click.Group):
    """Subcommands live in ``ragged_fsdp.cli.<name>`` as a command named ``command``."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand; an interrupt while it is being imported exits with 130, as a later one does."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            sys.exit(130)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        return importlib.import_module(f"ragged_fsdp.cli.{name}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS:
            close = difflib.get_close_matches(args[0], _COMMANDS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"commands are {', '.join(_COMMANDS)}"
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={**HELP_OPTIONS, "max_content_width": 110},
)
@click.version_option(package_name="ragged-fsdp")
def main() -> None:
    """Fully sharded data parallelism on ragged, block-aligned DTensors."""
