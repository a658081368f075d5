"""Ops on tensors of several meshes at once: one clip over ragged, sharded and replicated parameters.

Stock refuses them. The cases an optimizer step needs are element-wise on lists, where each tensor
meets only those of its own position (see :mod:`ragged_fsdp.dtensor.pointwise`), and scalars such as
norms and clip factors, which are the same number on every rank once they are reduced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.construct import whole, wrap_local
from ragged_fsdp.dtensor.geometry import contiguous_spec, is_ragged, replicated
from ragged_fsdp.torch_internals import pytree, spec_of

__all__ = ["reduced_scalars"]

aten = torch.ops.aten


def reduced_scalars(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` with the scalars of other meshes as plain numbers; NotImplemented if none is left to.

    A stack of scalars becomes a replicated tensor of the first mesh.
    """
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    if op is aten.stack.default and all(leaf.numel() == 1 for leaf in leaves):
        mesh = leaves[0].device_mesh
        stacked = op([_number(t) for t in args[0]], *args[1:], **kwargs)
        return wrap_local(stacked, contiguous_spec(mesh, replicated(mesh), stacked.shape, stacked.dtype))
    home = _home(leaves)
    plain = pytree.tree_map(lambda v: _number(v) if _is_foreign_scalar(v, home) else v, (args, kwargs))
    if all(
        after is before
        for after, before in zip(pytree.tree_leaves(plain), pytree.tree_leaves((args, kwargs)))
    ):
        return NotImplemented
    return op(*plain[0], **plain[1])


def _home(leaves: list[DTensor]) -> Any:
    """The mesh of the first tensor that is no scalar: the others' scalars come to it."""
    return next((leaf.device_mesh for leaf in leaves if leaf.numel() != 1), leaves[0].device_mesh)


def _is_foreign_scalar(value: Any, home: Any) -> bool:
    if not isinstance(value, DTensor) or value.numel() != 1 or value.device_mesh == home:
        return False
    return not is_ragged(spec_of(value))


def _number(value: Any) -> Any:
    return whole(value) if isinstance(value, DTensor) else value
