"""Code blocks of the documents: where they are, what a reader is assumed to have, what a command names."""

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

__all__ = [
    "DOCUMENTS",
    "PICTURES",
    "ROOT",
    "at_hand",
    "blocks",
    "check_command",
    "flags_of",
    "known_flags",
    "on_this_machine",
    "picture_script",
]

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*.md")),
    ]
]
PICTURES = ROOT / "docs" / "pictures"
_FENCE = re.compile(r"^```(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_GPUS = re.compile(r'init_device_mesh\("cuda", \((\d+),\)\)')


def on_this_machine(text: str, ranks: int) -> str:
    """A block that speaks of a number of GPUs, for the ranks and the device of the test."""
    return _GPUS.sub(f'init_device_mesh("cpu", ({ranks},))', text)


def blocks(document: str, language: str) -> Iterator[tuple[int, str]]:
    """Line number and text of each block in a language."""
    text = (ROOT / document).read_text()
    for match in _FENCE.finditer(text):
        if match.group(1) == language:
            yield text[: match.start()].count("\n") + 2, match.group(2)


def picture_script(name: str) -> ModuleType:
    """A script that draws pictures of the documents, as a module."""
    spec = importlib.util.spec_from_file_location(name, PICTURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def check_command(line: str) -> None:
    """Raise unless a line of a shell block names things that exist: make targets, scripts, subcommands with
    flags of the right kind. Nothing is run; ``...`` stands for further arguments."""
    words = [word for word in shlex.split(line, comments=True) if word != "..."]
    if "ragged-fsdp" in words:
        _parse(words[words.index("ragged-fsdp") + 1 :])
    elif words[:1] == ["make"]:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets, f"make {words[1]}: targets are {targets}"
    elif words:
        scripts = [word for word in words if word.endswith(".py")]
        modules = [words[i + 1].replace(".", "/") for i, word in enumerate(words[:-1]) if word == "-m"]
        known = words[0] in ("torchrun", "python", "diff", "pip", "git", "cd")
        assert known, f"no rule for {words[0]!r}; say here how to check it"
        for path in [*scripts, *(name for name in modules if name.startswith("benchmarks"))]:
            assert (ROOT / path).exists() or (ROOT / f"{path}.py").exists(), f"{path} does not exist"


def _parse(words: list[str]) -> None:
    import click

    from ragged_fsdp.cli.main import main

    name, command, arguments = "ragged-fsdp", main, words
    while isinstance(command, click.Group):
        name, command, arguments = command.resolve_command(click.Context(command), arguments)
    kinds = [getattr(parameter, "type", None) for parameter in command.params]
    files = [kind for kind in kinds if getattr(kind, "exists", False)]
    for kind in files:
        kind.exists = False  # the reader's files
    try:
        command.make_context(name, list(arguments)).close()
    finally:
        for kind in files:
            kind.exists = True


def at_hand(folder: Path) -> dict[str, Any]:
    """Names that a block may use without making them: a small model, its input, sizes for the planner,
    and an empty folder that all ranks see."""
    import torch
    from torch import Tensor, nn

    class Output(NamedTuple):
        loss: Tensor
        logits: Tensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 32)
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
            self.norm = nn.RMSNorm(32)
            self.lm_head = nn.Linear(32, 64, bias=False)

        @property
        def blocks(self) -> nn.ModuleList:
            return self.layers

        def forward(self, tokens: Tensor) -> Output:
            x = self.embed(tokens)
            for layer in self.layers:
                x = x + layer(x)
            logits = self.lm_head(self.norm(x))
            return Output(logits.logsumexp(-1).mean(), logits)

    tokens = torch.randint(64, (2, 8))
    return {
        "torch": torch,
        "model": Model(),
        "block": nn.Linear(8, 8),
        "tokens": tokens,
        "batch": tokens,
        "loss": lambda output: output.loss,
        "folder": str(folder),
        "sizes": [64, 32],
        "blocks": [8, 1],
        "m": 4,
        "unit": 4,
        "__name__": "document",
    }


def flags_of(name: str) -> set[str]:
    """The options of a subcommand, a group's own commands' too."""
    import click

    from ragged_fsdp.cli.main import main

    command = main.get_command(click.Context(main), name)
    assert command is not None, f"ragged-fsdp {name} does not exist"
    return {"-h", "--help"} | {
        flag for option in command.params for flag in (*option.opts, *option.secondary_opts)
    }


def known_flags() -> set[str]:
    """Every option of every subcommand, and of ``python -m ragged_fsdp.run``."""
    import click

    from ragged_fsdp import run
    from ragged_fsdp.cli.main import main

    flags, found = set(re.findall(r"--[a-z][a-z0-9-]*", run._parser().format_help())), [main]
    for command in found:
        if isinstance(command, click.Group):
            context = click.Context(command)
            found += [command.get_command(context, name) for name in command.list_commands(context)]
        for parameter in command.params:
            flags |= {*parameter.opts, *parameter.secondary_opts}
    return flags
