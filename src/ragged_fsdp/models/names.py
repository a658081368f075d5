"""Names: of parameters whatever is wrapped around their modules, and the one that was meant."""

import difflib
from collections.abc import Collection

__all__ = ["nearest", "plain_name"]

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # activation checkpointing, torch.compile


def plain_name(name: str) -> str:
    """``layers.0._checkpoint_wrapped_module.norm.weight`` is ``layers.0.norm.weight``."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def nearest(name: str, valid: Collection[str]) -> str:
    """A sentence that names the closest valid name, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"valid names are {', '.join(sorted(valid))}"
