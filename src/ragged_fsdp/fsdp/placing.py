"""The ragged placement of each parameter of a planned group, beside tensor and expert parallelism.

Uneven tensor parallelism leaves inner tensors of different sizes (5 rows over 2 ranks: 3 and 2). The group
is planned once, for the largest, and every rank uses those offsets: shorter inner tensors end earlier. So
all ranks agree on one placement, whose units are then given per outer shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dtensor import StridedRaggedShard, placement_from_layout
from ragged_fsdp.fsdp.plan import GroupPlan
from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.placement import ragged_dims

__all__ = ["outer_shapes", "place", "shrink_to"]


def outer_shapes(param: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of the inner tensors of a DTensor, in the order of its outer shards; largest first."""
    if not isinstance(param, DTensor):
        return [tuple(param.shape)]
    cuts = [
        (p.dim % param.ndim, param.device_mesh.size(d))
        for d, p in enumerate(param.placements)
        if isinstance(p, Shard)
    ]
    shapes = []
    for coordinate in itertools.product(*(range(count) for _, count in cuts)):
        sizes = list(param.shape)
        for (dim, count), index in zip(cuts, coordinate):
            chunk = -(-sizes[dim] // count)
            sizes[dim] = max(0, min(chunk, sizes[dim] - index * chunk))
        shapes.append(tuple(sizes))
    return shapes


def shrink_to(plan: GroupPlan, shapes: Sequence[Sequence[int]]) -> GroupPlan:
    """The plan of the largest inner tensors as it is for this rank's ``shapes``."""
    if plan.shapes == tuple(tuple(s) for s in shapes):
        return plan
    specs = tuple(
        TensorSpec(spec.name, math.prod(shape) * (item // plan.cell_bytes), spec.block_numel)
        for spec, shape, item in zip(plan.layout.specs, shapes, plan.item_bytes)
    )
    layout = replace(plan.layout, specs=specs, lower_bound=0)
    return replace(plan, shapes=tuple(tuple(s) for s in shapes), layout=layout)


def place(plan: GroupPlan, index: int, param: torch.Tensor) -> Callable[[Sequence[Placement]], Any]:
    """A function from the placements that stand after the ragged one to the ragged placement."""
    shapes = outer_shapes(param)

    def ragged(later: Sequence[Placement]) -> Any:
        layout = plan.tensor_layout(index)
        if len(set(shapes)) > 1:
            return _per_outer_shard(layout, shapes)
        layout = _widest_blocks(layout)
        inner = param._local_tensor.shape if isinstance(param, DTensor) else param.shape
        placement = placement_from_layout(layout, 0, inner)
        twice = any(isinstance(p, Shard) and p.dim % param.ndim < len(placement.dims) for p in later)
        return placement_from_layout(layout, 0, inner, strided=True) if twice else placement

    return ragged


def _widest_blocks(layout: GroupLayout) -> GroupLayout:
    """The same cuts with the largest block they respect: rows stay rows where no cut falls inside one."""
    spec = layout.specs[0]
    block = math.gcd(*(layout.local_range(0, rank).numel for rank in range(layout.ranks)))
    return replace(layout, specs=(TensorSpec(spec.name, spec.numel, max(block, 1)),))


def _per_outer_shard(layout: GroupLayout, shapes: Sequence[tuple[int, ...]]) -> StridedRaggedShard:
    spec = layout.specs[0]
    rows, common = [], spec.block_numel
    for shape in shapes:
        own = replace(layout, specs=(TensorSpec(spec.name, math.prod(shape), spec.block_numel),))
        counts = tuple(own.local_range(0, rank).numel for rank in range(layout.ranks))
        rows.append(counts)
        common = math.gcd(common, *counts)
    prefix = max((ragged_dims(shape, common) for shape in shapes if math.prod(shape)), key=len)
    return StridedRaggedShard(prefix, rows)
