"""The code blocks of README and docs run, and the commands in them are understood."""

import re

import pytest

from docs_blocks import (
    DOCUMENTS,
    ROOT,
    at_hand,
    blocks,
    check_command,
    flags_of,
    known_flags,
    on_this_machine,
)
from rank_pool import spmd


def _with(language: str) -> list[str]:
    return [document for document in DOCUMENTS if any(blocks(document, language))]


def _run(document, rank):
    for line, text in blocks(document, "python"):
        code = compile("\n" * (line - 1) + on_this_machine(text, rank.world_size), document, "exec")
        exec(code, at_hand(rank.shared_dir))


_INTEGRATIONS = [
    document for document in _with("python") if "/integrations" in document or "lora" in document
]


@pytest.mark.parametrize("document", [d for d in _with("python") if d not in _INTEGRATIONS])
@spmd(4)
def test_python_blocks_run(rank, document):
    _run(document, rank)


@pytest.mark.parametrize("document", _INTEGRATIONS)
@spmd(2)
def test_integration_blocks_run(rank, document):
    """On the ranks that have imported the libraries for the adapters' tests."""
    if "lora" in document:
        pytest.importorskip("peft")
    _run(document, rank)


@pytest.mark.parametrize("document", _with("bash"))
def test_commands_are_understood(document):
    """Flags exist and have values of the right kind; scripts and targets exist; nothing is run."""
    for _, text in blocks(document, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            check_command(line)


_SPAN = re.compile(r"`(ragged-fsdp [a-z][^`]*)`")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_flags_of_commands_in_prose_are_theirs(document):
    """A command inside a sentence has flags of its own subcommand, not only ones that some other has."""
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    for command in _SPAN.findall(text):
        _, name, *words = command.split()
        flags = [word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word)]
        if flags and name != "bench":
            assert set(flags) <= flags_of(name), f"{document}: {command}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_fit_the_page(document):
    """``docs/_static/page.css`` has room for 124 letters; commands and output are broken by the browser."""
    for language in ("", "python", "toml"):
        for line, text in blocks(document, language):
            assert max(map(len, text.splitlines()), default=0) <= 124, f"{document}:{line}"


def test_no_block_escapes():
    """Commands and Python stand in blocks that the tests above read."""
    for document in DOCUMENTS:
        for language in ("", "text", "py", "sh", "console", "shell"):
            for line, text in blocks(document, language):
                first = text.strip().split(" ")[0]
                assert first not in ("ragged-fsdp", "torchrun", "make", "import", "from"), (
                    f"{document}:{line}"
                )


def test_flags_in_prose_exist():
    known = known_flags() | {
        "--nproc-per-node",
        "--no-python",
        "--checkpoint",
        "--torchao",
        "--lora",
        *("--nnodes", "--max-restarts", "--shutdown-timeout", "--signal", "--requeue", "--kill-on-bad-exit"),
        *("--rdzv-conf", "--overlapping"),
    }  # of other programs, of the examples and of scripts
    for document in DOCUMENTS:
        text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
        for flag in re.findall(r"`(?:[^`\n]* )?(--[a-z][a-z0-9-]*)", text):
            assert flag in known, f"{document}: {flag}"
