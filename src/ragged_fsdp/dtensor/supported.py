"""Refuses a torch that is too old, in one line, before any of its internals are looked for.

Newer releases than those tested are judged by what they have (:mod:`ragged_fsdp.dtensor.patches`).
"""

import re

import torch

__all__ = ["require_supported"]


def require_supported(version: str) -> None:
    """Raise ``ImportError`` unless ``version`` is at least the oldest release that is tested."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match and (int(match[1]), int(match[2])) < (2, 11):
        raise ImportError(f"ragged_fsdp supports torch 2.11 to 2.15; this is torch {version}.")


require_supported(torch.__version__)
