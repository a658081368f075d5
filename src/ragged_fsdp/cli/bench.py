"""``ragged-fsdp bench``: the benchmarks of the source tree, which installed packages do not carry."""

import importlib
import os
import sys
from pathlib import Path

import click

__all__ = ["command"]

_MARK = Path("benchmarks") / "step" / "app.py"


def _source_tree() -> Path | None:
    """The checkout: around the current folder, or around this file where the install is editable."""
    starts = (Path.cwd(), Path(__file__).resolve())
    return next((p for start in starts for p in (start, *start.parents) if (p / _MARK).is_file()), None)


def _load() -> click.Command:
    root = _source_tree()
    if root is None:

        @click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
        def absent() -> None:
            """The benchmarks are part of the source tree; run this from a checkout."""
            raise click.ClickException(
                f"no {_MARK} here or above: run this from a checkout of the source tree"
            )

        return absent
    sys.path.insert(0, str(root))
    # The measuring processes import the benchmarks too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return importlib.import_module("benchmarks.step.app").app


command = _load()
