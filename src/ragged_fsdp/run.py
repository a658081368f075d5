"""``python -m ragged_fsdp.run script.py``: a script written for FSDP2, with our ``fully_shard`` in its place.

    torchrun --nproc-per-node 8 -m ragged_fsdp.run train.py --epochs 3
    accelerate launch -m ragged_fsdp.run --granularity '*_proj.weight=32rows' sft.py
    torchrun --nproc-per-node 8 -m ragged_fsdp.run -m my.trainer --epochs 3

The script is not changed: it, and every library it uses, finds this package's function under the names of
torch's. Everything behind the script's name is the script's.
"""

from __future__ import annotations

import argparse
import fnmatch
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Shard

from ragged_fsdp.integrations.substitute import ragged_fully_shard
from ragged_fsdp.policy import Granularity, parse_granularity

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script that ``arguments`` name, as ``__main__``."""
    parser = _parser()
    given = parser.parse_args(arguments)
    options: dict[str, Any] = {} if given.reduction is None else {"reduction": given.reduction}
    if given.placement == "shard0":
        options["shard_placement_fn"] = _rows_of_fsdp2
    rules = [_rule(parser, text) for text in given.granularity]
    if not given.module and not Path(given.script).is_file():
        parser.error(f"{given.script}: no such script")
    sys.argv = [given.script, *given.arguments]
    taken: set[str] = set()
    with ragged_fully_shard(_policy(rules, taken) if rules else None, **options) as sharded:
        if given.module:
            runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(given.script).resolve().parent)  # as python itself does for a script
            runpy.run_path(given.script, run_name="__main__")
    if not sharded:
        print(
            f"ragged_fsdp.run: {given.script} never called torch's fully_shard; it ran as it is.",
            file=sys.stderr,
        )
        return
    for pattern, _ in rules:
        if pattern not in taken:
            print(
                f"ragged_fsdp.run: --granularity {pattern!r}: no parameter took this rule.", file=sys.stderr
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ragged_fsdp.run",
        description="Run a script that is written for FSDP2 with ragged_fsdp's fully_shard in its place.",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument(
        "--granularity",
        action="append",
        default=[],
        metavar="PATTERN=UNIT",
        help="parameters whose name matches keep so much on one rank: 32rows, tiles:128x128, 256elements, "
        "whole; the first that matches counts; may be repeated",
    )
    parser.add_argument(
        "--placement",
        choices=("ragged", "shard0"),
        default="ragged",
        help="shard0: FSDP2's own chunks of rows, with its copies, where the script does not say; for "
        "projects that ask placements for their dim (default: ragged)",
    )
    parser.add_argument("--reduction", help="how gradients are reduced, where the script does not say")
    parser.add_argument("script", help="the script, or the module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return parser


def _rows_of_fsdp2(parameter: Any) -> Shard:
    """How FSDP2 cuts every parameter."""
    return Shard(0)


def _rule(parser: argparse.ArgumentParser, text: str) -> tuple[str, Granularity]:
    pattern, found, unit = text.rpartition("=")
    if not found or not pattern:
        parser.error(f"--granularity {text!r}: expected PATTERN=UNIT, such as '*_proj.weight=32rows'")
    try:
        return pattern, parse_granularity(unit)
    except ValueError as error:
        parser.error(f"--granularity {text!r}: {error}")


def _policy(
    rules: Sequence[tuple[str, Granularity]], taken: set[str]
) -> Callable[[str, Any], Granularity | None]:
    """The first rule whose pattern matches; its pattern is noted in ``taken``."""

    def policy(name: str, parameter: Any) -> Granularity | None:
        for pattern, unit in rules:
            if fnmatch.fnmatchcase(name, pattern):
                taken.add(pattern)
                return unit
        return None

    return policy


if __name__ == "__main__":
    main()
