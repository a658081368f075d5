"""Names: of parameters whatever is wrapped around their modules, and the one that was meant."""

import difflib
from collections.abc import Collection

from ragged_fsdp.weights.names import plain_name

__all__ = ["nearest", "plain_name"]


def nearest(name: str, valid: Collection[str]) -> str:
    """A sentence that names the closest valid name, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid names are {', '.join(sorted(valid))}"
