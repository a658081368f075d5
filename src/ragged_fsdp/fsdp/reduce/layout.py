"""Where gradients lie in the gradient buffer of a group, and where their sum is divided.

If every parameter is trainable and a layout cell is an element, gradients lie where weights lie. With
frozen parameters, or item sizes that differ, they have a layout of their own: chunk r of the buffer
holds the trainable pieces of rank r, packed, so that only trainable elements are reduced::

    weights   a a a a a F F F|F F F b b b b b|b b b b c c . .     F frozen
    gradients a a a a a . . .|. . . b b b b b|b b b b c c . .     with chunks as large as the shards, or
              a a a a a .|b b b b b .|b b b b c c                 packed; then b lies in two runs

A piece that continues on the next rank is put at the end of its chunk, next to its continuation, so that
the tensor usually stays one run. A tensor in several runs is written with several copies.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ragged_fsdp.fsdp.parts.plan import GroupPlan
from ragged_fsdp.layout import GroupLayout, LocalRange, TensorSpec, align_up
from ragged_fsdp.tiling import kind_views, tiled

__all__ = ["GradLayout", "GradRun", "Scaling", "grad_layout", "scaling"]

_ALIGN_ELEMENTS = 8  # 16 bytes of the narrowest reduction dtype


@dataclass(frozen=True)
class GradRun:
    """A run of a tensor's gradient that is contiguous in the buffer."""

    index: int
    """Which tensor of the buffer's layout it is."""
    tensor_start: int
    numel: int


@dataclass(frozen=True)
class GradLayout:
    """A buffer layout over runs of gradients, and the runs of each parameter (none if it is frozen)."""

    layout: GroupLayout
    shapes: tuple[tuple[int, ...], ...]
    runs: tuple[tuple[GradRun, ...], ...]
    same_as_weights: bool
    tiles: tuple[tuple[int, int] | None, ...] = ()
    """The tiles in whose order each parameter's gradient lies in the buffer; none at all is row-major."""

    def local_piece(self, index: int, rank: int) -> tuple[int, LocalRange] | None:
        """The run and range with which parameter ``index`` is present on ``rank``."""
        for run in self.runs[index]:
            part = self.layout.local_range(run.index, rank)
            if part.numel:
                return run.index, part
        return None

    def pairs(
        self, slots: Sequence[Any], grads: Mapping[int, Any], *, copied: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """The ``slots`` of the gradients of parameters, and what goes into each, to be copied or added."""
        if self.same_as_weights and not self.tiles:
            return [slots[index] for index in grads], list(grads.values())
        targets, sources = [], []
        for index, grad in grads.items():
            tile = self.tiles[index] if self.tiles else None
            if self.same_as_weights and tile is not None:  # the copy into the slot tiles
                for stored, ordinary in kind_views(slots[index], grad, tile, wide=copied):
                    targets.append(stored)
                    sources.append(ordinary)
                continue
            flat = tiled(grad, tile)
            for run in self.runs[index]:
                targets.append(slots[run.index])
                sources.append(flat[run.tensor_start : run.tensor_start + run.numel])
        return targets, sources


def grad_layout(plan: GroupPlan, trainable: Sequence[bool]) -> GradLayout:
    """The layout of the gradients of the ``trainable`` parameters of a group."""
    tiles = tuple(spec.tile for spec in plan.layout.specs)
    tiles = tiles if any(tiles) else ()
    if all(trainable) and plan.same_items:
        runs = tuple(
            (GradRun(i, 0, spec.numel),) if spec.numel else () for i, spec in enumerate(plan.layout.specs)
        )
        if not tiles:
            return GradLayout(plan.layout, plan.shapes, runs, True)
        flat = tuple((spec.numel,) for spec in plan.layout.specs)
        return GradLayout(plan.layout.recut(plan.layout.ranks), flat, runs, True, tiles)
    members = [i for i, is_member in enumerate(trainable) if is_member]
    return replace(_packed_layout(plan, members), tiles=tiles)


def _packed_layout(plan: GroupPlan, members: Sequence[int]) -> GradLayout:
    """The pieces of ``members`` packed by rank."""
    ranks = plan.layout.ranks
    order = sorted(members, key=lambda i: plan.layout.offsets[i])
    chunks: list[list[tuple[int, int, int]]] = []  # per rank: (tensor, tensor_start, numel) in buffer order
    for rank in range(ranks):
        parts = [(i, plan.local_range(i, rank)) for i in order]
        chunks.append([(i, part.tensor_start, part.numel) for i, part in parts if part.numel])

    shard = max(
        (sum(align_up(numel, _ALIGN_ELEMENTS) for _, _, numel in chunk) for chunk in chunks), default=0
    )
    placed: dict[int, list[tuple[int, int, int]]] = {i: [] for i in order}  # (tensor_start, offset, numel)
    for rank, chunk in enumerate(chunks):
        position = rank * shard
        for at, (i, tensor_start, numel) in enumerate(chunk):
            whole = plan.layout.specs[i].numel * plan.cell_bytes // plan.item_bytes[i]
            last = at == len(chunk) - 1
            continues = last and tensor_start + numel < whole
            offset = (rank + 1) * shard - numel if continues else position
            placed[i].append((tensor_start, offset, numel))
            position += align_up(numel, _ALIGN_ELEMENTS)
    return _in_runs(plan, placed, shard)


def _in_runs(plan: GroupPlan, placed: dict[int, list[tuple[int, int, int]]], shard: int) -> GradLayout:
    """Join the pieces that touch and describe the result as a layout of runs."""
    specs: list[TensorSpec] = []
    offsets: list[int] = []
    shapes: list[tuple[int, ...]] = []
    runs: list[tuple[GradRun, ...]] = [()] * len(plan.names)
    for i, pieces in placed.items():
        joined: list[list[int]] = []
        for tensor_start, offset, numel in pieces:
            if joined and joined[-1][1] + joined[-1][2] == offset:
                joined[-1][2] += numel
            else:
                joined.append([tensor_start, offset, numel])
        own = []
        for part, (tensor_start, offset, numel) in enumerate(joined):
            own.append(GradRun(len(specs), tensor_start, numel))
            specs.append(TensorSpec(f"{plan.names[i]}[{part}]", numel))
            offsets.append(offset)
            shapes.append((numel,))
        runs[i] = tuple(own)
    layout = GroupLayout(tuple(specs), plan.layout.ranks, 1, shard, tuple(offsets), 0)
    return GradLayout(layout, tuple(shapes), tuple(runs), False)


@dataclass(frozen=True)
class Scaling:
    """How a sum over the ranks becomes the gradient."""

    average: bool
    before: float | None = None
    after: float | None = None


@functools.cache
def scaling(dtype: torch.dtype, ranks: int, divide_factor: float | None, sum_only: bool) -> Scaling:
    """Divide in the collective if it can, else the small shard afterwards; half precision in two steps.

    fp16 sums overflow and pre-divided ones underflow: dividing by about the square root on either side of
    the reduction avoids both.
    """
    factor = float(ranks) if divide_factor is None else divide_factor
    safe_range = dtype in (torch.float32, torch.bfloat16)
    if safe_range and divide_factor is None and not sum_only:
        return Scaling(average=ranks > 1)
    if safe_range:
        return Scaling(average=False, after=factor)
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Scaling(average=False, before=before, after=factor / before)
