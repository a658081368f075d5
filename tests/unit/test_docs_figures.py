"""The figures in README are those of the benchmark pages, rounded: one source for both."""

import re

from docs_blocks import ROOT


def _rows(text):
    """The cells of every table row."""
    return [
        [cell.strip(" *`") for cell in line.strip("| ").split("|")]
        for line in text.splitlines()
        if "|" in line
    ]


def test_readme_compares_with_the_figures_of_the_benchmarks():
    compared = (ROOT / "README.md").read_text().split("## How it compares")[1].split("\n## ")[0]
    table = [row for row in _rows(compared) if any(re.fullmatch(r"[\d.]+", cell) for cell in row)]
    assert len(table) >= 3, "README has no table of figures"
    pages = ("benchmarks.md", "benchmarks-log.md")
    source = [row for page in pages for row in _rows((ROOT / "docs" / page).read_text())]
    for name, *cells in table:
        measured = [
            float(x) for row in source if row[0] == name for x in row[1:] if re.fullmatch(r"[\d.]+", x)
        ]
        for cell in cells:
            digits = len(cell.partition(".")[2])
            known = cell == "-" or float(cell) in {round(x, digits) for x in measured}
            assert known, f"README says {cell} of {name!r}; {' and '.join(pages)} do not"
