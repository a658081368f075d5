"""Ops that are run by hand rather than by a cached rule: views, factories, random numbers, extremes."""

from __future__ import annotations

from typing import Any

import torch

from ragged_fsdp.dtensor import factories, random_ops, reduce_direct, views

__all__ = ["run_direct"]


def run_direct(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``op``, or NotImplemented where it is none of these."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return random_ops.run(op, args, kwargs)
    for handlers in (views.HANDLERS, factories.HANDLERS, reduce_direct.HANDLERS):
        if op in handlers:
            return handlers[op](op, args, kwargs)
    return NotImplemented
