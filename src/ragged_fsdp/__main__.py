"""``ragged-fsdp`` and ``python -m ragged_fsdp``: the command line, or one line on how to get it."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line."""
    try:
        from ragged_fsdp.cli.main import main as command_line
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "ragged_fsdp":
            raise
        sys.exit(f"ragged-fsdp: {error.name} is not installed; in a checkout: pip install '.[cli]'")
    except KeyboardInterrupt:
        sys.exit(130)
    command_line(prog_name="ragged-fsdp")


if __name__ == "__main__":
    main()
