"""Files, modules and attributes that README and docs name in prose exist."""

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
_BASES = ["", "src/ragged_fsdp", "docs", "benchmarks/step", "benchmarks/planner", "tests", "examples"]
_OF_READERS = {"config.toml", "best.json", "manifest.json", "config.json", "tensors.json", "ten_lines.py"}


def _spans(document):
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    return _CODE.findall(text)


def _exists(path: str) -> bool:
    return any(any((ROOT / base).glob(path.rstrip("/"))) for base in _BASES) or any(
        (ROOT / "src").rglob(path) if "/" not in path else ()
    )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_exist(document):
    for span in _spans(document):
        if _PATH.fullmatch(span) and span not in _OF_READERS and not span.startswith(("runs/", "path/")):
            assert _exists(span), f"{document}: {span}"


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
