"""Sphinx: the pages of this folder, README as the front page, and the reference from the docstrings.

``make docs`` builds into ``build/docs``; a warning is an error.
"""

import re
from pathlib import Path
from typing import Any

import ragged_fsdp

project = "ragged_fsdp"
copyright = "Apache-2.0"
version = release = ragged_fsdp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["pictures", "package.md"]  # that page is the wheel's description
myst_heading_anchors = 4  # as GitHub makes them
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures have them
autodoc_preserve_defaults = True
autodoc_mock_imports = ["torchft", "ray"]  # pages are built without them
python_use_unqualified_type_names = True
smartquotes_action = "qe"  # not dashes: a flag in a table would lose one of its two

html_theme = "furo"
html_title = f"ragged_fsdp {version}"
html_copy_source = False
html_static_path = ["_static"]
html_js_files = ["copy.js"]
html_css_files = ["page.css"]


_ELSEWHERE = re.compile(r"(?<!!)\[([^\]]+)\]\(\.\./([^)\s]+\.md)\)")


def _as_a_page(app: Any, docname: str, source: list[str]) -> None:
    """Sources are written for the repository: README is in front here, and there are no pages elsewhere."""
    if docname == "index":  # README's links start in the top folder
        readme = Path(__file__).parent.parent / "README.md"
        text = readme.read_text().replace("](docs/", "](").replace("](benchmarks/", "](../benchmarks/")
        source[0] = text + "\n" + source[0]
    source[0] = _ELSEWHERE.sub(r"\1 (`\2`)", source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _as_a_page)
