"""The code blocks of README and docs run, and the commands in them are understood."""

import re

import pytest

from docs_blocks import DOCUMENTS, ROOT, at_hand, blocks, check_command, known_flags, on_this_machine
from rank_pool import spmd


def _with(language: str) -> list[str]:
    return [document for document in DOCUMENTS if any(blocks(document, language))]


def _run(document, rank):
    for line, text in blocks(document, "python"):
        code = compile("\n" * (line - 1) + on_this_machine(text, rank.world_size), document, "exec")
        exec(code, at_hand(rank.shared_dir))


_INTEGRATIONS = [document for document in _with("python") if "/integrations" in document]


@pytest.mark.parametrize("document", [d for d in _with("python") if d not in _INTEGRATIONS])
@spmd(4)
def test_python_blocks_run(rank, document):
    _run(document, rank)


@pytest.mark.parametrize("document", _INTEGRATIONS)
@spmd(2)
def test_integration_blocks_run(rank, document):
    """On the ranks that have imported the libraries for the adapters' tests."""
    _run(document, rank)


@pytest.mark.parametrize("document", _with("bash"))
def test_commands_are_understood(document):
    """Flags exist and have values of the right kind; scripts and targets exist; nothing is run."""
    for _, text in blocks(document, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            check_command(line)


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
        *("--nnodes", "--max-restarts", "--shutdown-timeout", "--signal", "--requeue", "--kill-on-bad-exit"),
    }  # of other programs
    for document in DOCUMENTS:
        text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
        for flag in re.findall(r"`(?:[^`\n]* )?(--[a-z][a-z-]*)", text):
            assert flag in known, f"{document}: {flag}"
