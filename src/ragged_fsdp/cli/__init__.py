"""The command line: one module per subcommand."""

import atexit
import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.core import ParameterSource

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""For every command, not only the group: click remembers the names with which a command was first asked."""


def given_options() -> dict[str, str]:
    """The parameters that came from the command line: their names, and what the user calls them."""
    context = click.get_current_context()
    return {
        str(parameter.name): max(parameter.opts, key=len)
        for parameter in context.command.params
        if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    }


class _Finite(click.FloatRange):
    """Numbers of a range: click finds that "nan" is in each, and "inf" in those without an end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not in the range {self._describe_range()}.", param, ctx)
        return number


FROM_ZERO = _Finite(min=0)
ABOVE_ZERO = _Finite(min=0, min_open=True)


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Do not look for garbage inside, nor when the process ends, in a command that lasts seconds.

    What torch and transformers leave when they are imported is hundreds of thousands of objects: looking
    through them took a third of the time of ``predict``, and found 2 % of its memory. No training run may be
    inside: its cycles hold memory of a GPU.
    """
    was_enabled = gc.isenabled()
    atexit.register(gc.freeze)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # all of it is old now: else the first object after it would look through it
        gc.unfreeze()  # or a process that calls a command would never free cycles that it held before
        if was_enabled:
            gc.enable()
