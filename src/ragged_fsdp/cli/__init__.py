"""The command line: one module per subcommand."""

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Of every command, not only of the group: click remembers the names with which a command was first asked."""
