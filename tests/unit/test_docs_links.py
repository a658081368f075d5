"""Links and pictures in README and docs lead somewhere, anchors too."""

import re

import pytest

from docs_blocks import DOCUMENTS, ROOT

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def _anchor(heading: str) -> str:
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.replace(" ", "-")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    document = ROOT / name
    for link in _LINK.findall(_CODE.sub("", document.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        assert target.exists(), f"{document.name}: {link} does not exist"
        if anchor:
            assert anchor in {_anchor(h) for h in _HEADING.findall(target.read_text())}, (
                f"{document.name}: {link}"
            )
