"""Files, modules and attributes that README and docs name in prose exist."""

import fnmatch
import functools
import re
from importlib import import_module

import pytest
import torch  # noqa: F401  public names need it

from docs_blocks import DOCUMENTS, ROOT

_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(
    r"\w[\w.-]*(?:/[\w.*-]+)*\.(?:py|md|json|svg|png|toml)|(?:tests|benchmarks|examples|src)(?:/[\w.-]+)+/?"
)
_DOTTED = re.compile(r"(ragged_fsdp(?:\.\w+)+)\b")
_FOLDERS = ["src", "docs", "benchmarks", "tests", "examples"]
_OF_READERS = {"config.toml", "best.json", "manifest.json", "owner.json", "config.json", "tensors.json"}
_OF_READERS |= {"ten_lines.py", "adapter_config.json"}


def _spans(document):
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    return _CODE.findall(text)


@functools.cache
def _paths() -> list[str]:
    """Files and folders of the tree, each with a leading slash."""
    found = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*")] + [*ROOT.iterdir()]
    return ["/" + path.relative_to(ROOT).as_posix() for path in found]


def _exists(path: str) -> bool:
    """Whether something in the tree has this name, or this end of its path."""
    return bool(fnmatch.filter(_paths(), "*/" + path.rstrip("/")))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_exist(document):
    for span in _spans(document):
        of_readers = span in _OF_READERS or span.startswith(("runs/", "path/", "hangs/"))
        if _PATH.fullmatch(span) and not of_readers:
            assert _exists(span), f"{document}: {span}"


def test_the_design_names_every_file_of_the_runtime():
    page = (ROOT / "docs" / "design.md").read_text()
    files = {path.name for path in (ROOT / "src" / "ragged_fsdp" / "fsdp").glob("*.py")} - {"__init__.py"}
    assert not {name for name in files if f"`fsdp/{name}`" not in page}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_and_attributes_exist(document):
    for span in _spans(document):
        for dotted in _DOTTED.findall(span):
            module, rest = import_module("ragged_fsdp"), dotted.split(".")[1:]
            for i, name in enumerate(rest):
                try:
                    module = import_module(".".join(["ragged_fsdp", *rest[: i + 1]]))
                except ModuleNotFoundError:
                    assert hasattr(module, name), f"{document}: {dotted}"
                    module = getattr(module, name)
