"""What a buffer may be: placements, transitions, tensors that fit their layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.placement import block_numel
from ragged_fsdp.policy import Elements, Tiles

__all__ = [
    "check_arguments",
    "check_tensors",
    "check_transition",
    "checked_placements",
    "coordinate_of",
    "device_of",
    "expect",
    "group_specs",
    "levels_of",
]


def expect(what: str, value: Any, kind: Any, expected: str) -> None:
    """Raise unless ``value`` is of a kind; ``expected`` says which, in words."""
    if not isinstance(value, kind):
        raise TypeError(f"DBuffer{what} must be {expected}, got {value!r}.")


def check_arguments(
    layout: Any, shapes: Any, mesh: Any, dtype: Any, cell_bytes: Any, offset_bytes: Any
) -> None:
    """Raise, naming it, on an argument of a type that no buffer can be made of."""
    expect(": layout", layout, GroupLayout, "a GroupLayout")
    expect(": mesh", mesh, DeviceMesh, "a DeviceMesh")
    expect(": shapes", shapes, Sequence, "a sequence of shapes")
    expect(": cell_bytes", cell_bytes, int | None, "an int or None")
    expect(": offset_bytes", offset_bytes, int, "an int")
    if isinstance(dtype, torch.dtype):
        return
    expect(": dtype", dtype, Sequence, "a torch.dtype, or one per tensor")
    for one in dtype:
        expect(": dtype", one, torch.dtype, "a torch.dtype, or one per tensor")


def levels_of(mesh: DeviceMesh, ranks: int) -> tuple[int, ...]:
    """The last mesh dims, as many as have ``ranks`` ranks together: they cut a buffer of so many shards."""
    together, first = 1, mesh.ndim
    while first and (together < ranks or mesh.size(first - 1) == 1):
        first -= 1
        together *= mesh.size(first)
    if together != ranks or first == mesh.ndim:
        raise ValueError(
            f"DBuffer: the layout has {ranks} ranks, but no number of last dims of the mesh of shape "
            f"{tuple(mesh.shape)} has."
        )
    return tuple(range(first, mesh.ndim))


def coordinate_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """This rank's place along each dim of ``mesh``; raise where it has none, or its process group another.

    Torch's groups count ranks in ascending order. A mesh that lists them in another would have each rank's
    slot, which the mesh says, where the collectives bring another's.
    """
    place_in_mesh = mesh.get_coordinate()
    if place_in_mesh is None:
        raise ValueError(f"DBuffer: this rank is not in the mesh {mesh}, so it holds no part of the buffer.")
    coordinate = tuple(place_in_mesh)
    for dim, place in enumerate(coordinate):
        group = mesh.get_group(dim)
        if group.rank() != place:
            raise ValueError(
                f"along dim {dim} of the mesh {mesh.mesh.tolist()} this rank has place {place}, but in its "
                f"process group, of ranks {dist.get_process_group_ranks(group)}, place {group.rank()}; list "
                "ranks in ascending order."
            )
    return coordinate


def checked_placements(
    mesh: DeviceMesh, placements: Sequence[Placement] | None, levels: Sequence[int]
) -> tuple[Placement, ...]:
    """One placement per mesh dim; by default sharded over the levels and replicated over the others."""
    if placements is None:
        return tuple(Shard(0) if dim in levels else Replicate() for dim in range(mesh.ndim))
    expect(": placements", placements, Sequence, "a list, one per mesh dim")
    given = tuple(placements)
    if len(given) != mesh.ndim:
        raise ValueError(f"DBuffer: expected {mesh.ndim} placements, one per mesh dim, got {given}.")
    for dim, placement in enumerate(given):
        level = dim in levels
        if placement in (Replicate(), Partial()) or (level and placement == Shard(0)):
            continue
        kinds = "Shard(0), Replicate() or Partial()" if level else "Replicate() or Partial()"
        raise ValueError(f"DBuffer: mesh dim {dim} takes {kinds}, got {placement}.")
    return given


def check_transition(source: Sequence[Placement], target: Sequence[Placement]) -> None:
    """Raise where no redistribution exists: nothing becomes Partial."""
    for dim, (have, want) in enumerate(zip(source, target)):
        if isinstance(want, Partial) and not isinstance(have, Partial):
            raise ValueError(f"DBuffer: no redistribution from {have} to {want} on mesh dim {dim}.")


def group_specs(
    tensors: Mapping[str, torch.Tensor], granularity: Mapping[str, Any], mesh: DeviceMesh
) -> tuple[TensorSpec, ...]:
    """What to plan of a group of full tensors; raise unless they have one dtype and can be cut so."""
    expect(".distribute: tensors", tensors, Mapping, "a dict of tensors by name")
    expect(".distribute: granularity", granularity, Mapping, "a dict by name")
    expect(".distribute: mesh", mesh, DeviceMesh, "a DeviceMesh")
    if not tensors:
        raise ValueError("DBuffer.distribute: a group needs at least one tensor, got none.")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"DBuffer.distribute: {name} must be a tensor, got {type(tensor).__name__}.")
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) != 1:
        raise ValueError(f"DBuffer.distribute: expected tensors of one dtype, got {sorted(map(str, kinds))}.")
    unknown = sorted(granularity.keys() - tensors.keys())
    if unknown:
        raise ValueError(
            f"DBuffer.distribute: granularity names {unknown}; the tensors are {sorted(tensors)}."
        )
    specs = []
    for name, tensor in tensors.items():
        kind = granularity.get(name, Elements())
        tile = (kind.rows, kind.columns) if isinstance(kind, Tiles) else None
        try:
            specs.append(TensorSpec(name, tensor.numel(), block_numel(tensor.shape, kind), tile))
        except (TypeError, ValueError) as error:
            raise type(error)(f"DBuffer.distribute: {name}: {error}") from None
    return tuple(specs)


def check_tensors(
    layout: GroupLayout,
    shapes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
    cell_bytes: int,
) -> None:
    """Raise unless the tensors are those of the layout."""
    if not len(shapes) == len(dtypes) == len(layout.specs):
        raise ValueError(
            f"DBuffer: {len(layout.specs)} tensors in the layout, "
            f"got {len(shapes)} shapes and {len(dtypes)} dtypes."
        )
    for spec, shape, dtype in zip(layout.specs, shapes, dtypes):
        nbytes = shape.numel() * dtype.itemsize
        if nbytes != spec.numel * cell_bytes:
            raise ValueError(
                f"{spec.name}: shape {tuple(shape)} of {dtype} has {nbytes} bytes, "
                f"its layout has {spec.numel} cells of {cell_bytes}."
            )


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank on ``mesh``."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
