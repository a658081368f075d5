"""Reductions that need more than a cached rule: extremes, means, reductions along dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HANDLERS: dict[Any, Callable[..., Any]] = {}
