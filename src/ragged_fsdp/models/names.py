"""The name that was meant."""

import difflib
from collections.abc import Collection

__all__ = ["nearest"]

_SHOWN = 40


def nearest(name: str, valid: Collection[str]) -> str:
    """A sentence that names the closest valid name, or all of them, if they are not very many."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    shown = sorted(valid)[:_SHOWN]
    return f"valid names are {', '.join(shown)}" + (", ..." if len(valid) > _SHOWN else "")
