"""Ops that are run by hand rather than by a cached rule: views, factories, random numbers, extremes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor import (
    broadcast,
    factories,
    joins,
    masks,
    pointwise,
    random_ops,
    reduce_direct,
    views,
)
from ragged_fsdp.dtensor.construct import settled
from ragged_fsdp.dtensor.geometry import is_ragged
from ragged_fsdp.torch_internals import OpOverload, pytree, schema_of, spec_of

__all__ = ["HANDLERS", "ragged_operands", "run_direct"]

HANDLERS = {
    **views.HANDLERS,
    **joins.HANDLERS,
    **factories.HANDLERS,
    **masks.HANDLERS,
    **reduce_direct.HANDLERS,
}


def run_direct(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of ``op``, or NotImplemented where it is none of these."""
    settled = tuple(_settled(op, args))
    if any(after is not before for after, before in zip(settled, args)):
        return op(*settled, **kwargs)
    if torch.Tag.nondeterministic_seeded in op.tags:
        return random_ops.run(op, args, kwargs)
    if pointwise.is_elementwise(op) and op not in HANDLERS:
        return broadcast.run(op, args, kwargs)
    handler = HANDLERS.get(op)
    return NotImplemented if handler is None else handler(op, args, kwargs)


def ragged_operands(args: Any, kwargs: Any) -> list[DTensor]:
    """The ragged tensors among the arguments of a call, in order."""
    leaves = pytree.tree_leaves((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, DTensor) and is_ragged(spec_of(leaf))]


def _settled(op: Any, args: tuple[Any, ...]) -> Iterator[Any]:
    """The arguments, ragged ones that are only read without pending reductions of other mesh dims."""
    for argument, value in zip(schema_of(op).arguments, args):
        pending = isinstance(value, DTensor) and any(p.is_partial() for p in value.placements)
        if pending and is_ragged(spec_of(value)) and argument.alias_info is None:
            yield settled(value)
        else:
            yield value
