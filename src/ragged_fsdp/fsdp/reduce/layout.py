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
    """The pieces of ``members`` packed by rank; those of a tensor that touch are one run."""
    order = sorted(members, key=lambda i: plan.layout.offsets[i])
    pieces = [[(i, plan.local_range(i, rank)) for i in order] for rank in range(plan.layout.ranks)]
    chunks = [[(i, part) for i, part in chunk if part.numel] for chunk in pieces]
    sizes = [sum(align_up(part.numel, _ALIGN_ELEMENTS) for _, part in chunk) for chunk in chunks]
    shard = max(sizes, default=0)
    placed: dict[int, list[list[int]]] = {i: [] for i in order}  # runs: tensor_start, offset, numel
    for rank, chunk in enumerate(chunks):
        position = rank * shard
        for i, part in chunk:
            whole = plan.layout.specs[i].numel * plan.cell_bytes // plan.item_bytes[i]
            continues = i == chunk[-1][0] and part.tensor_start + part.numel < whole
            offset = (rank + 1) * shard - part.numel if continues else position
            if placed[i] and placed[i][-1][1] + placed[i][-1][2] == offset:
                placed[i][-1][2] += part.numel
            else:
                placed[i].append([part.tensor_start, offset, part.numel])
            position += align_up(part.numel, _ALIGN_ELEMENTS)
    specs: list[TensorSpec] = []
    offsets: list[int] = []
    runs: list[tuple[GradRun, ...]] = [()] * len(plan.names)
    for i, own in placed.items():
        runs[i] = tuple(GradRun(len(specs) + at, start, numel) for at, (start, _, numel) in enumerate(own))
        specs += [TensorSpec(f"{plan.names[i]}[{at}]", numel) for at, (_, _, numel) in enumerate(own)]
        offsets += [offset for _, offset, _ in own]
    layout = GroupLayout(tuple(specs), plan.layout.ranks, 1, shard, tuple(offsets), 0)
    return GradLayout(layout, tuple((spec.numel,) for spec in specs), tuple(runs), False)


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
