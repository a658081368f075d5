"""docs/raggedshard.md is true: pictures, transition table, names."""

import re
from pathlib import Path

import ragged_fsdp.dtensor
from docs_blocks import PICTURES, ROOT, picture_script
from ragged_fsdp import placement

PAGE = (ROOT / "docs" / "raggedshard.md").read_text()


def test_the_pictures_are_those_of_the_code():
    module = picture_script("ragged_layouts")
    for name, panels in module.PICTURES.items():
        assert (PICTURES / name).read_text() == module.draw(panels), f"run docs/pictures/{module.__name__}.py"
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
        folder = Path(ragged_fsdp.dtensor.__file__).parent
        assert (folder / file).exists() or (folder.parent / file).exists(), file
