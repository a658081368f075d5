"""Where the elements of a ragged DTensor lie: the frozen description of one spec on one rank.

Also the error for operations that have no meaning on such a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import product
from typing import Any

import torch
import torch.compiler.config as compiler_config
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ragged_fsdp.placement import RaggedShard, checked_shape
from ragged_fsdp.policy import Tiles
from ragged_fsdp.routes import Box, Region, boxes_between, chunk_of_chunks, contiguous_stride, starts_of
from ragged_fsdp.torch_internals import DTensorSpec, StridedShard, TensorMeta, spec_of

__all__ = [
    "RaggedLayout",
    "RaggedOpError",
    "check_placements",
    "compute_layout",
    "contiguous_spec",
    "contiguous_stride",
    "is_ragged",
    "outer_index",
    "outer_mesh_dims",
    "ragged_layout",
    "ragged_mesh_dim",
    "ragged_spec",
    "refusal",
    "regions_of",
    "replicated",
    "settled_placements",
    "shard_box",
    "unragged",
    "with_placements",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RaggedLayout:
    """One ragged tensor as a rank sees it, in elements.

    The *inner* tensor is what the other placements leave on this rank; the ragged placement splits
    its flattened elements, in the order of ``tile``s if it has them, into one interval per rank of
    ``mesh_dim``. ``counts`` and ``starts`` are those intervals, ``index`` is this rank's place among them.
    """

    mesh_dim: int
    inner_shape: Shape
    inner_offset: Shape
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    index: int
    rest: Shape
    tile: tuple[int, int] | None = None

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.counts[self.index]

    @property
    def start(self) -> int:
        """First element of this rank in the flattened inner tensor."""
        return self.starts[self.index]

    @property
    def stop(self) -> int:
        """One past the last element of this rank in the flattened inner tensor."""
        return self.start + self.numel

    @property
    def inner_numel(self) -> int:
        """Elements of the inner tensor."""
        return math.prod(self.inner_shape)

    @property
    def cut_dims(self) -> int:
        """How many leading dims the cuts may go through; the local tensor has one in their place."""
        return len(self.inner_shape) - len(self.rest)

    @property
    def even(self) -> bool:
        """Whether every rank holds as many elements."""
        return len(set(self.counts)) == 1

    @property
    def local_shape(self) -> Shape:
        """The shape of the local tensor on this rank."""
        row = math.prod(self.rest)
        return (self.numel // row if row else 0, *self.rest)

    def boxes(self) -> list[Box]:
        """This rank's elements as boxes of the *global* tensor, in the order of the local tensor."""
        return list(self._boxes)

    @cached_property
    def _boxes(self) -> list[Box]:
        return self.boxes_of(self.index)  # a checkpoint asks for them once for each of them

    def boxes_of(self, index: int) -> list[Box]:
        """The boxes of the rank ``index`` of the mesh dim."""
        start, shape = self.starts[index], self.inner_shape
        panels = Tiles(*self.tile).panels(shape) if self.tile else (((0,) * len(shape), shape),)
        return [
            (tuple(o + base for o, base in zip(offsets, self.inner_offset)), sizes)
            for offsets, sizes in boxes_between(panels, start, start + self.counts[index])
        ]


def ragged_mesh_dim(placements: Sequence[Placement]) -> int | None:
    """The mesh dim that carries the ragged placement, if any."""
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            return mesh_dim
    return None


def outer_mesh_dims(placements: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh dims that cut before the ragged placement: of ``Shard``, and of a second one of whole rows."""
    ragged = ragged_mesh_dim(placements)
    return tuple(
        d
        for d, p in enumerate(placements)
        if isinstance(p, Shard) or (isinstance(p, RaggedShard) and d != ragged)
    )


def is_ragged(tensor_or_spec: Any) -> bool:
    """Whether a DTensor or a DTensorSpec has a ragged placement; anything else has none."""
    spec = spec_of(tensor_or_spec) if isinstance(tensor_or_spec, DTensor) else tensor_or_spec
    return ragged_mesh_dim(getattr(spec, "placements", ())) is not None


def unragged(placements: Sequence[Placement], instead: Placement | None = None) -> tuple[Placement, ...]:
    """The placements with the ragged one replaced (by Replicate)."""
    return tuple((instead or Replicate()) if isinstance(p, RaggedShard) else p for p in placements)


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Replicate on every mesh dim."""
    return (Replicate(),) * mesh.ndim


def settled_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The placements with Replicate where a reduction is pending."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def ragged_layout(tensor_or_spec: Any) -> RaggedLayout:
    """The layout of a ragged DTensor or DTensorSpec on this rank."""
    spec: Any = spec_of(tensor_or_spec) if isinstance(tensor_or_spec, DTensor) else tensor_or_spec
    if not isinstance(spec, DTensorSpec):
        raise TypeError(f"expected a ragged DTensor or its spec, got {type(tensor_or_spec).__name__}.")
    mesh, coordinate = spec.mesh, spec.mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"this rank is not in the mesh {mesh}, so it holds no part of {spec.placements}.")
    # Sizes are SymInts under dynamic shapes; a ragged layout specialises on them.
    shape = tuple(int(s) for s in spec.shape)
    return _cached_layout(shape, mesh, tuple(coordinate), spec.placements)


def ragged_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a contiguous ragged tensor; raises where the placements do not fit the shape."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a DeviceMesh, got {mesh!r}.")
    shape = checked_shape(shape)
    check_placements(shape, mesh.shape, placements)
    normal = tuple(Shard(p.dim + len(shape)) if isinstance(p, Shard) and p.dim < 0 else p for p in placements)
    spec = contiguous_spec(mesh, normal, shape, dtype)
    if is_ragged(spec):
        ragged_layout(spec)
    return spec


def contiguous_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a contiguous tensor, unchecked."""
    meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def with_placements(
    spec: DTensorSpec, placements: Sequence[Placement], dtype: torch.dtype | None = None
) -> DTensorSpec:
    """``spec`` with other placements (and another dtype)."""
    meta: Any = spec.tensor_meta
    if dtype is not None:
        meta = TensorMeta(meta.shape, meta.stride, dtype)
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta)


@lru_cache(maxsize=8192)
def _cached_layout(
    shape: Shape, mesh: DeviceMesh, coordinate: Shape, placements: tuple[Placement, ...]
) -> RaggedLayout:
    """The coordinate counts: meshes of two ranks are equal where one process has been both."""
    _tag_rank()
    _check_all_ranks(shape, mesh.shape, placements)
    return compute_layout(shape, mesh.shape, coordinate, placements)


def _tag_rank() -> None:
    """Give each rank compile cache entries of its own.

    The cache key holds neither the rank nor the local shape, so a rank could load the graph compiled
    for the piece of another (an uneven ``Shard(0)`` has the same problem). A tag that the user has
    set is kept, and extended.
    """
    if not dist.is_initialized():
        return
    tag = f"ragged_fsdp-rank{dist.get_rank()}of{dist.get_world_size()}"
    present = compiler_config.cache_key_tag
    if tag not in present:
        compiler_config.cache_key_tag = f"{present}{'-' if present else ''}{tag}"


@lru_cache(maxsize=8192)
def _check_all_ranks(shape: Shape, mesh_shape: Shape, placements: tuple[Placement, ...]) -> None:
    """Raise, alike on every rank, where the placements do not fit what is left for any of them.

    A rank that looked at its own part alone would go on, into a collective that the others never enter.
    """
    cut = outer_mesh_dims(placements)
    outer = [range(n if d in cut else 1) for d, n in enumerate(mesh_shape)]
    for coordinate in product(*outer):
        compute_layout(shape, mesh_shape, coordinate, placements)
    shards = math.prod(map(len, outer))
    units = placements[ragged_mesh_dim(placements) or 0].local_units
    if isinstance(units[0], tuple) and len(units) != shards:
        raise ValueError(f"{placements}: {len(units)} tuples of units for {shards} outer shards.")


def compute_layout(
    shape: Shape, mesh_shape: Shape, coordinate: Shape, placements: tuple[Placement, ...]
) -> RaggedLayout:
    """The layout on the rank at ``coordinate``; raises where the placements do not fit."""
    mesh_dim = _checked_ragged_dim(shape, mesh_shape, placements)
    ragged: Any = placements[mesh_dim]
    inner_offset, inner_shape = shard_box(shape, mesh_shape, coordinate, placements)
    units = ragged.units_of(outer_index(mesh_shape, coordinate, placements))
    if len(units) != mesh_shape[mesh_dim]:
        raise ValueError(
            f"{ragged}: {len(units)} units for mesh dim {mesh_dim} of {mesh_shape[mesh_dim]} ranks."
        )
    counts = _counts(ragged, units, inner_shape)
    rest = inner_shape[len(ragged.dims) :]
    row = math.prod(rest)
    if row and any(count % row for count in counts):
        raise ValueError(
            f"{ragged}: pieces of {counts} elements cut through the dims {rest} after dims={ragged.dims} of "
            f"shape {inner_shape}; make pieces multiples of {row} or add dims."
        )
    starts, index = starts_of(counts), coordinate[mesh_dim]
    return RaggedLayout(mesh_dim, inner_shape, inner_offset, counts, starts, index, rest, ragged.tile)


def check_placements(shape: Shape, mesh_shape: Shape, placements: Any) -> None:
    """Raise unless there is one placement per mesh dim and each fits a tensor of ``shape``."""
    if not isinstance(placements, (list, tuple)) or not all(isinstance(p, Placement) for p in placements):
        raise TypeError(f"placements must be a list of placements, one per mesh dim, got {placements!r}.")
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"{len(placements)} placements {tuple(placements)} for a mesh of {len(mesh_shape)} dims."
        )
    for placement in placements:
        if isinstance(placement, Shard) and not -len(shape) <= placement.dim < len(shape):
            raise ValueError(f"{placement} does not fit shape {shape}.")


def _checked_ragged_dim(shape: Shape, mesh_shape: Shape, placements: tuple[Placement, ...]) -> int:
    check_placements(shape, mesh_shape, placements)
    found = [d for d, p in enumerate(placements) if isinstance(p, RaggedShard)]
    if not 1 <= len(found) <= 2:
        raise ValueError(f"a ragged tensor has one ragged placement, or two, got {placements}.")
    ragged: Any = placements[found[0]]
    if len(found) == 2:
        _check_outer_rows(shape, mesh_shape, placements, found[1], ragged)
    if len(ragged.dims) > len(shape) or (shape and not ragged.dims):
        raise ValueError(f"{ragged}: dims must be a non-empty prefix of the dims of shape {shape}.")
    if ragged.tile is not None and (len(shape) < 2 or len(ragged.dims) != len(shape)):
        raise ValueError(f"{ragged}: tiles need two dims or more, and dims of all of them; shape {shape}.")
    for mesh_dim, other in enumerate(placements):
        if isinstance(other, StridedShard):
            raise ValueError(f"{ragged} beside {other}: only Shard, Replicate and Partial compose with it.")
        if not isinstance(other, Shard):
            continue
        after = mesh_dim > found[0] and other.dim % len(shape) < len(ragged.dims)
        if after and type(ragged) is RaggedShard:
            raise ValueError(
                f"{ragged} before {other} would cut dim {other.dim} twice; use StridedRaggedShard, "
                "which is applied after it."
            )
    return found[0]


def _check_outer_rows(
    shape: Shape, mesh_shape: Shape, placements: tuple[Placement, ...], mesh_dim: int, inner: RaggedShard
) -> None:
    """Raise unless the second ragged placement leaves whole rows that the first, ``inner``, cuts again."""
    outer: Any = placements[mesh_dim]
    if type(inner) is RaggedShard:
        raise ValueError(f"{inner} before {outer} would cut dim 0 twice; use StridedRaggedShard first.")
    if type(outer) is not RaggedShard or outer.dims != (0,) or outer.tile is not None:
        raise ValueError(f"{outer} after {inner} must be a RaggedShard of whole rows, dims=(0,).")
    if len(outer.local_units) != mesh_shape[mesh_dim]:
        raise ValueError(
            f"{outer}: {len(outer.local_units)} units for mesh dim {mesh_dim} of {mesh_shape[mesh_dim]}."
        )
    if any(isinstance(p, Shard) and p.dim % len(shape) == 0 for p in placements):
        raise ValueError(f"{outer} beside Shard(0) would cut dim 0 twice, got {placements}.")
    _counts(outer, outer.local_units, shape[:1])  # raises unless units are whole rows


def shard_box(
    shape: Shape, mesh_shape: Shape, coordinate: Shape, placements: Sequence[Placement]
) -> tuple[Shape, Shape]:
    """Offsets and sizes of what Shard placements leave on the rank at ``coordinate``.

    Strided ones are applied after the others, from right to left. A second ragged placement counts as one: it
    leaves whole rows.
    """
    ragged = ragged_mesh_dim(placements)
    plain = [d for d, p in enumerate(placements) if isinstance(p, Shard)]
    strided = [d for d, p in enumerate(placements) if isinstance(p, StridedShard)]
    cuts = (
        (placements[d].dim % len(shape), mesh_shape[d], coordinate[d])  # type: ignore[attr-defined]
        for d in plain + strided[::-1]
    )
    offsets, sizes = chunk_of_chunks(shape, cuts)
    for d, placement in enumerate(placements):
        if isinstance(placement, RaggedShard) and d != ragged:  # nothing else cuts dim 0
            rows = _counts(placement, placement.local_units, shape[:1])
            offsets = (starts_of(rows)[coordinate[d]], *offsets[1:])
            sizes = (rows[coordinate[d]], *sizes[1:])
    return offsets, sizes


def regions_of(
    shape: Shape, mesh_shape: Shape, placements: tuple[Placement, ...]
) -> Callable[[Shape], Region]:
    """A function from the coordinate of a rank to what it holds, for who asks for many ranks."""
    ragged_dim = ragged_mesh_dim(placements)
    if ragged_dim is None:
        return lambda coordinate: (shard_box(shape, mesh_shape, coordinate, placements),)
    cut_before = outer_mesh_dims(placements)

    @cache
    def layout_of(outer: Shape) -> RaggedLayout:
        return compute_layout(shape, mesh_shape, outer, placements)

    @cache
    def region(coordinate: Shape) -> Region:
        # one layout for all ranks that differ along the ragged dim or in replicas: it is as long as that dim
        outer = tuple(place if d in cut_before else 0 for d, place in enumerate(coordinate))
        return tuple(layout_of(outer).boxes_of(coordinate[ragged_dim]))

    return region


def outer_index(mesh_shape: Shape, coordinate: Shape, placements: tuple[Placement, ...]) -> int:
    """Which of the outer shards, in mesh order, the rank at ``coordinate`` lies in."""
    index = 0
    for mesh_dim in outer_mesh_dims(placements):
        index = index * mesh_shape[mesh_dim] + coordinate[mesh_dim]
    return index


def _counts(ragged: RaggedShard, units: tuple[int, ...], inner_shape: Shape) -> tuple[int, ...]:
    numel, total = math.prod(inner_shape), sum(units)
    if not numel:
        return (0,) * len(units)
    if not total or numel % total:
        raise ValueError(
            f"{ragged}: the sum {total} of the units does not divide the {numel} elements of shape "
            f"{inner_shape}."
        )
    return tuple(unit * (numel // total) for unit in units)


class RaggedOpError(NotImplementedError):
    """An operation that a ragged tensor does not support; the message names the way out."""


def refusal(op: Any, operand: Any, why: str) -> RaggedOpError:
    """The error for ``op`` on ``operand`` (a DTensor or a spec), raised alike on every rank."""
    spec = spec_of(operand) if isinstance(operand, DTensor) else operand
    return RaggedOpError(
        f"{op} of a ragged tensor: {why}; shape {tuple(spec.shape)}, placements {spec.placements}. "
        "Use full_tensor() for the whole tensor, redistribute(placements=...) for another layout, or "
        "to_local() for this rank's piece."
    )
