"""Ops on tensors of several meshes at once: one clip over ragged, sharded and replicated parameters.

Stock refuses them, and so do we where nothing of ours takes part. The cases an optimizer step needs are
element-wise on lists, where each tensor meets only those of its own position (see
:mod:`ragged_fsdp.dtensor.pointwise`), and scalars such as norms and clip factors, which are the same number
on every rank once they are reduced.

Norms of several meshes, stacked, lie on a *number mesh*: one with the ranks and groups of the first mesh, but
with dim names of its own. What is computed from them lies on it too, so the clip factor is known for ours
when it meets the gradients of any other mesh.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.construct import whole, wrap_local
from ragged_fsdp.dtensor.geometry import contiguous_spec, is_ragged, replicated
from ragged_fsdp.dtensor.reductions import is_pending
from ragged_fsdp.torch_internals import DTensorSpec, pytree, spec_of, unset_fake_temporarily

__all__ = ["across_meshes", "is_ours"]

aten = torch.ops.aten
_NUMBER_DIM = "ragged_fsdp_number"


def is_ours(spec: Any) -> bool:
    """Whether a tensor is ragged, what a reduction of a ragged one left, or a number of several meshes."""
    if type(spec) is not DTensorSpec:
        return False
    return is_ragged(spec) or is_pending(spec) or _is_number_mesh(spec.mesh)


def across_meshes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` with the numbers of other meshes at home; NotImplemented if there are none.

    A stack of scalars becomes a replicated tensor of a number mesh.
    """
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    if op is aten.stack.default and all(leaf.numel() == 1 for leaf in leaves):
        stacked = op([whole(t) if isinstance(t, DTensor) else t for t in args[0]], *args[1:], **kwargs)
        return _replicated_on(_number_mesh(leaves[0].device_mesh), stacked)
    home = _home(leaves)
    at_home = [_brought_to(home, leaf) for leaf in leaves]
    if all(after is before for after, before in zip(at_home, leaves)):
        return NotImplemented
    moved = iter(at_home)
    plain = pytree.tree_map(lambda v: next(moved) if isinstance(v, DTensor) else v, (args, kwargs))
    return op(*plain[0], **plain[1])


def _home(leaves: list[DTensor]) -> DeviceMesh:
    """The mesh of the first tensor that is no scalar: numbers of other meshes come to it."""
    placed = [leaf for leaf in leaves if not _is_number_mesh(leaf.device_mesh)] or leaves
    return next((leaf.device_mesh for leaf in placed if leaf.numel() != 1), placed[0].device_mesh)


def _brought_to(home: DeviceMesh, value: DTensor) -> torch.Tensor:
    """A number of another mesh as a plain one, other results of a number mesh replicated at home."""
    if value.device_mesh == home or is_ragged(spec_of(value)):
        return value
    if value.numel() == 1:
        return whole(value)
    return _replicated_on(home, whole(value)) if _is_number_mesh(value.device_mesh) else value


def _replicated_on(mesh: DeviceMesh, tensor: torch.Tensor) -> DTensor:
    return wrap_local(tensor, contiguous_spec(mesh, replicated(mesh), tensor.shape, tensor.dtype))


@lru_cache(maxsize=256)
def _number_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` under dim names that tell its tensors from those of ``mesh``; no group is made."""
    if _is_number_mesh(mesh):
        return mesh
    names = tuple(f"{_NUMBER_DIM}_{dim}" for dim in range(mesh.ndim))
    groups = mesh.get_all_groups()
    with unset_fake_temporarily():
        return DeviceMesh.from_group(
            groups if mesh.ndim > 1 else groups[0], mesh.device_type, mesh.mesh, mesh_dim_names=names
        )


def _is_number_mesh(mesh: DeviceMesh) -> bool:
    names = mesh.mesh_dim_names
    return names is not None and names[0].startswith(_NUMBER_DIM)
