"""Writes ``docs/settings.md``, one page of all settings, from the code: ``python docs/settings_page.py``."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

from ragged_fsdp import fully_shard
from ragged_fsdp.trainer.config import TrainConfig

ENVIRONMENT = {
    "RAGGED_FSDP_CACHE": "where `ragged-fsdp train` keeps tokenised text; `~/.cache/ragged_fsdp` by default",
    "RAGGED_FSDP_DEBUG": "`1`: ranks compare each collective first, released memory is filled with "
    "NaNs, use on the wrong stream raises ([schedule](schedule.md#failures))",
    "RAGGED_FSDP_RANKS_PER_NODE": "how many consecutive ranks share a node, if they cannot find out "
    "([network](network.md#levels))",
    "RAGGED_FSDP_REPLICA_TOKEN": "the secret by which replicas know each other ([replicas](replicas.md))",
}


def page() -> str:
    """The whole page."""
    parts = [
        "# All settings",
        "Generated from the code by `docs/settings_page.py`. [tuning](tuning.md) says which to choose.",
        "## `fully_shard`",
        "The first eight are FSDP2's ([what differs](fully_shard.md#the-arguments)).",
        _table(("argument", "default", "meaning"), _arguments()),
        "## `ragged-fsdp train`",
        "Each is a flag (`seq_len` is `--seq-len`), a key of its section in a TOML file, and a keyword of "
        "`ragged_fsdp.trainer.config_file.from_values`.",
    ]
    for section, cls in TrainConfig.sections().items():
        rows = []
        for field in fields(cls):
            default = field.default_factory() if callable(field.default_factory) else field.default
            rows.append((f"`{field.name}`", _value(default), _escaped(field.metadata["help"])))
        first_line = (cls.__doc__ or "").splitlines()[0]
        parts += [f"### `[{section}]`", first_line, _table(("setting", "default", "meaning"), rows)]
    rows = [(f"`{name}`", meaning) for name, meaning in ENVIRONMENT.items()]
    parts += ["## Environment variables", _table(("variable", "meaning"), rows)]
    return "\n\n".join(parts) + "\n"


def _arguments() -> list[tuple[str, str, str]]:
    """Name, default and description of each argument, the last from the docstring."""
    documented = inspect.getdoc(fully_shard) or ""
    body = documented[documented.index("Args:") : documented.index("Raises:")]
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", body, re.MULTILINE | re.DOTALL)
    meanings = {name: " ".join(text.split()) for name, text in found}
    parameters = inspect.signature(fully_shard).parameters.values()
    return [(f"`{p.name}`", _value(p.default), _escaped(meanings[p.name])) for p in parameters]


def _value(default: object) -> str:
    if default is inspect.Parameter.empty:
        return ""
    if isinstance(default, str | int | float | bool | list | dict | None):
        return f"`{default!r}`"
    return f"`{type(default).__name__}()`"


def _escaped(text: str) -> str:
    """Text in a Markdown table: double backquotes of docstrings become single ones."""
    text = text.replace("``", "`").replace("|", "\\|")
    pieces = text.split("`")
    return "`".join(
        piece if i % 2 else piece.replace("*", "\\*").replace("<", "&lt;") for i, piece in enumerate(pieces)
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(page())
