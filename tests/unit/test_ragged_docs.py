"""docs/raggedshard.md is true: pictures, transition table, names."""

import importlib.util
import re
import sys
from pathlib import Path

import ragged_fsdp.dtensor
from ragged_fsdp import placement

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "raggedshard.md").read_text()


def _pictures():
    spec = importlib.util.spec_from_file_location("ragged_layouts", DOCS / "pictures" / "ragged_layouts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_those_of_the_code():
    module = _pictures()
    for name, panels in module.PICTURES.items():
        assert (DOCS / "pictures" / name).read_text() == module.draw(panels), (
            f"run docs/pictures/{module.__name__}.py"
        )
        assert f"pictures/{name}" in PAGE
    rows = module.owners(module.PICTURES["ragged-granularity.svg"][0])
    assert [rows[row, 0] for row in range(6)] == [[0], [2], [2], [2], [3], [3]]
    strided = module.owners(module.PICTURES["ragged-composition.svg"][0])
    assert [strided[row, 0] for row in range(6)] == [[0], [0], [2], [1], [1], [3]]


def test_the_transition_tables_are_those_of_the_module():
    lines = [line.strip() for line in placement.__doc__.splitlines()]
    rules = [i for i, line in enumerate(lines) if line.startswith("====")]
    assert len(rules) == 6  # two tables: above and below the heading, at the end
    for head, end in ((rules[1], rules[2]), (rules[4], rules[5])):
        starts = [m.start() for m in re.finditer("=+", lines[head])]
        for line in lines[head + 1 : end]:
            cells = [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None])]
            assert "| " + " | ".join(cells) + " |" in PAGE, cells


def test_the_names_on_the_page_exist():
    for name in (
        "placement_from_layout",
        "legal_granularity",
        "RaggedOpError",
        "ragged_layout",
        "wrap_local",
    ):
        assert name in PAGE and hasattr(ragged_fsdp.dtensor, name)
    for name in re.findall(r"RaggedShard\.(\w+)\(", PAGE):
        assert hasattr(placement.RaggedShard, name), name
    for file in re.findall(r"`(?:dtensor/)?(\w+\.py)`", PAGE):
        assert (Path(ragged_fsdp.dtensor.__file__).parent / file).exists(), file
