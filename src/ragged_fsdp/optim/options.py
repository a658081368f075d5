"""Checks of options that the optimizers have in common."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = [
    "ADAM_RANGES",
    "as_tuple",
    "check_options",
    "is_excluded",
    "name_patterns",
    "number",
    "require_option",
]

_CHECKS: dict[str, Callable[[float], bool]] = {
    "positive": lambda value: value > 0,
    "non-negative": lambda value: value >= 0,
    "at least 1": lambda value: value >= 1,
    "a number": lambda value: not math.isnan(value),
    "an integer": lambda value: value == math.floor(value) if math.isfinite(value) else False,
}

ADAM_RANGES = {"lr": "non-negative", "eps": "positive", "weight_decay": "non-negative"}
"""What optimizers built on Adam expect of the options they share with it."""


def check_options(group: dict[str, Any], expected: dict[str, str]) -> None:
    """Raise, naming the option, unless each has the range that ``expected`` names; betas are in [0, 1)."""
    for key, what in expected.items():
        require_option(group, key, _CHECKS[what](number(group[key])), what)
    if "betas" in group:
        betas = as_tuple(group["betas"])
        ok = isinstance(betas, tuple) and len(betas) == 2 and all(0 <= number(beta) < 1 for beta in betas)
        require_option(group, "betas", ok, "two, in [0, 1)")


def as_tuple(value: Any) -> Any:
    """Several values as a tuple; what is not several stays as it is, for the check that names it."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def number(value: Any) -> float:
    """``value`` as a float; what is no number becomes NaN, which is in no range."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def require_option(group: dict[str, Any], key: str, ok: bool, expected: str) -> None:
    """Raise if an option of a group is not as it must be."""
    if not ok:
        raise ValueError(f"{key} must be {expected}, got {group[key]!r}.")


def name_patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Shell patterns of names, of which one may be given alone."""
    found = (patterns,) if isinstance(patterns, str) else as_tuple(patterns)
    if not isinstance(found, tuple) or not all(isinstance(pattern, str) for pattern in found):
        raise ValueError(f"exclude must be patterns of names, got {patterns!r}.")
    return found


def is_excluded(name: str, group: dict[str, Any]) -> bool:
    """Whether the group's ``exclude`` patterns match a parameter; they need names."""
    if group["exclude"] and "param_names" not in group:
        raise ValueError(
            f"exclude={group['exclude']!r} matches names, but parameters came without; pass "
            "model.named_parameters()."
        )
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in group["exclude"])
