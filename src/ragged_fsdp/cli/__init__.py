"""The command line: one module per subcommand."""

import click
from click.core import ParameterSource

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Of every command, not only of the group: click remembers the names with which a command was first asked."""


def given_options() -> dict[str, str]:
    """The parameters that came from the command line: their names, and what the user calls them."""
    context = click.get_current_context()
    return {
        str(parameter.name): max(parameter.opts, key=len)
        for parameter in context.command.params
        if context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
    }
