"""The code blocks of README and docs run, and the commands in them are understood."""

import shlex

import pytest

from docs_blocks import DOCUMENTS, at_hand, blocks, on_this_machine
from rank_pool import spmd


@pytest.mark.parametrize("document", DOCUMENTS)
@spmd(4)
def test_python_blocks_run(rank, document):
    for line, text in blocks(document, "python"):
        code = compile("\n" * (line - 1) + on_this_machine(text, rank.world_size), document, "exec")
        exec(code, at_hand(rank.shared_dir))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_are_understood(document):
    """Flags exist and have values of the right kind; nothing is run."""
    from ragged_fsdp.cli.train import command as train

    for _, text in blocks(document, "bash"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            if "ragged-fsdp" not in words:
                continue
            name, *arguments = words[words.index("ragged-fsdp") + 1 :]
            assert name in ("train", "demo", "export", "inspect", "report", "plan", "bench"), line
            if name == "train":
                train.make_context("train", list(arguments)).close()
