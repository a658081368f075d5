"""What optimizers ask of options, parameters and gradients; each error names what is wrong."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = [
    "ADAM_RANGES",
    "as_tuple",
    "check_options",
    "is_excluded",
    "name_patterns",
    "number",
    "require_distinct",
    "require_matching_grad",
    "require_optimisable",
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
    """``value`` as a float; what is no number becomes NaN, which is in no range.

    Nor is a text that reads like one (YAML takes ``1e-3`` for text): it would fail in the first step.
    """
    try:
        return math.nan if isinstance(value, str) else float(value)
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
    patterns = name_patterns(group["exclude"])  # a group may have one alone, whose letters are no patterns
    if patterns and "param_names" not in group:
        raise ValueError(
            f"exclude={patterns!r} matches names, but parameters came without; pass model.named_parameters()."
        )
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def require_optimisable(name: str, param: Tensor) -> None:
    """Raise unless the parameter holds floats of which each rank may update its part alone."""
    if not param.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point parameter, got {param.dtype}.")
    for placement in getattr(param, "placements", ()):
        if placement.is_partial():
            raise ValueError(f"{name}: a parameter cannot be {placement}; redistribute it first.")


def require_distinct(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a parameter comes twice: it would be updated twice, with one state for both."""
    seen: dict[int, str] = {}
    for name, param in named:
        if (first := seen.get(id(param))) is not None:
            raise ValueError(f"{name}: the same parameter as {first}; an optimizer takes each of them once.")
        seen[id(param)] = name


def require_matching_grad(name: str, param: Tensor) -> None:
    """Raise unless the gradient lies where the parameter does: then it can be used part by part."""
    grad = param.grad
    if grad is None or grad.layout is not torch.strided:
        raise RuntimeError(
            f"{name}: expected a dense gradient, got {'none' if grad is None else 'a sparse one'}."
        )
    if not isinstance(param, DTensor) and not isinstance(grad, DTensor):
        return
    ours, theirs = getattr(param, "placements", None), getattr(grad, "placements", None)
    if ours != theirs:
        raise RuntimeError(f"{name}: the gradient's placements {theirs} differ from the parameter's {ours}.")
