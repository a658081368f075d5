"""Pages for users: the settings are those of the code, and the messages are ones that the code has."""

import importlib.util
import re

import pytest

from docs_blocks import ROOT

SOURCES = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))


def _generator():
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "docs/settings_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_is_that_of_the_code():
    generator = _generator()
    written = (ROOT / "docs/settings.md").read_text()
    assert written == generator.page(), "run: python docs/settings_page.py"
    internal = {"RAGGED_FSDP_LAUNCHER_STORE"}
    assert set(re.findall(r"RAGGED_FSDP_[A-Z_]+", SOURCES)) - internal == set(generator.ENVIRONMENT)


def test_messages_of_the_troubleshooting_page_exist():
    """Each piece of a quoted message stands in the sources, whatever lines and values it is broken over."""
    joined = re.sub(r'"\s*\n\s*f?"', "", SOURCES)  # adjacent literals are one
    page = (ROOT / "docs/troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(messages) > 25
    for message in messages:
        for piece in message.split("..."):
            assert piece.strip() in joined, message


def test_the_sidebar_is_a_path_with_every_page_on_it_once():
    text = (ROOT / "docs/index.md").read_text()
    captions = re.findall(r":caption: '?(\w+)", text)
    assert list(dict.fromkeys(captions)) == [
        "First",
        "Tutorials",
        "Guides",
        "Reference",
        "Benchmarks",
        "Inside",
    ]
    pages = re.findall(r"^[a-z][\w-]+$", text, re.MULTILINE)
    written = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index", "package"}
    assert sorted(pages) == sorted(written)


def test_typography_leaves_flags_alone():
    """Two dashes became one long one, so that flags in the tables of settings could not be copied."""
    smartquotes = pytest.importorskip("docutils.utils.smartquotes")
    action = re.search(r'^smartquotes_action = "(\w+)"', (ROOT / "docs/conf.py").read_text(), re.MULTILINE)[1]
    assert "--model-set layers=2" in smartquotes.smartyPants("such as --model-set layers=2", action)
