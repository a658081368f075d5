"""The checkpoint that a user means: a checkpoint folder itself, or one of a run's."""

from pathlib import Path
from typing import Any

import click

from ragged_fsdp.checkpoint.place import AnyPath, is_url, place
from ragged_fsdp.checkpoint.store import MANIFEST, damage, open_store

__all__ = ["PLACE", "find_checkpoint"]


class _Place(click.Path):
    """A folder that is there, or a URL."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not (isinstance(value, str) and is_url(value)):
            return super().convert(value, param, ctx)
        try:
            return place(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


PLACE = _Place(exists=True, file_okay=False, path_type=Path)
"""The type of an argument that names a checkpoint or a run."""


def find_checkpoint(path: AnyPath, *, best: bool = False, verify: bool = False) -> AnyPath:
    """``path`` if it is a checkpoint; of a run's folder the best or the newest one that is whole.

    With ``verify`` a damaged checkpoint is refused even if it was named.
    """
    if (path / ".metadata").exists():
        if verify and (path / MANIFEST).exists() and (problems := damage(path)):
            raise click.ClickException(f"the checkpoint is damaged: {problems[0]}")
        return path
    for root in (path / "checkpoints", path):
        store = open_store(str(root))
        steps = store.steps()
        if not steps:
            continue
        if best:
            if (step := store.best_step()) is None:
                raise click.ClickException(f"{root} has no checkpoint that was evaluated")
            if problems := damage(store.path(step)):
                raise click.ClickException(f"the best checkpoint is damaged: {problems[0]}")
            return store.path(step)
        for step in reversed(steps):
            problems = damage(store.path(step))
            if not problems:
                return store.path(step)
            click.echo(f"passing over a damaged checkpoint: {problems[0]}", err=True)
    raise click.ClickException(f"{path} is neither a checkpoint nor a run with a complete checkpoint")
