"""Replacing a function under every name that loaded modules know it by."""

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["rebind"]


def rebind(old: Callable[..., Any], new: Callable[..., Any], *, skip: str) -> None:
    """Replace ``old`` in every loaded module that holds it by name; not in ``skip`` or below it."""
    for module_name, module in list(sys.modules.items()):
        if module_name == skip or module_name.startswith(f"{skip}."):
            continue
        for name, value in list((getattr(module, "__dict__", None) or {}).items()):
            if value is old:
                setattr(module, name, new)
