"""Where gradients lie in the gradient buffer of a group.

If every parameter is trainable and a layout cell is an element, gradients lie where weights lie. With
frozen parameters, or item sizes that differ, they have a layout of their own: chunk r of the buffer
holds the trainable pieces of rank r, packed, so that only trainable elements are reduced::

    weights   a a a a a F F F|F F F b b b b b|b b b b c c . .     F frozen
    gradients a a a a a . . .|. . . b b b b b|b b b b c c . .     with chunks as large as the shards, or
              a a a a a .|b b b b b .|b b b b c c                 packed; then b lies in two segments

A piece that continues on the next rank is put at the end of its chunk, next to its continuation, so that
the tensor usually stays one segment. A tensor in several segments is written with several copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragged_fsdp.fsdp.plan import GroupPlan
from ragged_fsdp.layout import GroupLayout, LocalRange, TensorSpec

__all__ = ["GradLayout", "Segment", "grad_layout", "packed_layout"]

_ALIGN_ELEMENTS = 8  # 16 bytes of the narrowest reduction dtype


@dataclass(frozen=True)
class Segment:
    """A run of a tensor's gradient that is contiguous in the buffer."""

    index: int
    """Of the segment in the buffer's layout."""
    tensor_start: int
    numel: int


@dataclass(frozen=True)
class GradLayout:
    """A buffer layout over segments, and the segments of each parameter (none if it is frozen)."""

    layout: GroupLayout
    shapes: tuple[tuple[int, ...], ...]
    segments: tuple[tuple[Segment, ...], ...]
    same_as_weights: bool

    def local_piece(self, index: int, rank: int) -> tuple[int, LocalRange] | None:
        """The segment and range with which parameter ``index`` is present on ``rank``."""
        for segment in self.segments[index]:
            part = self.layout.local_range(segment.index, rank)
            if part.numel:
                return segment.index, part
        return None

    def pairs(self, slots: Sequence[Any], grads: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """The ``slots`` of the gradients of parameters, and what goes into each."""
        if self.same_as_weights:
            return [slots[index] for index in grads], list(grads.values())
        targets, sources = [], []
        for index, grad in grads.items():
            flat = grad.reshape(-1)
            for segment in self.segments[index]:
                targets.append(slots[segment.index])
                sources.append(flat[segment.tensor_start : segment.tensor_start + segment.numel])
        return targets, sources


def grad_layout(plan: GroupPlan, trainable: Sequence[bool]) -> GradLayout:
    """The layout of the gradients of the ``trainable`` parameters of a group."""
    if all(trainable) and plan.same_items:
        segments = tuple(
            (Segment(i, 0, spec.numel),) if spec.numel else () for i, spec in enumerate(plan.layout.specs)
        )
        return GradLayout(plan.layout, plan.shapes, segments, True)
    members = [i for i, is_member in enumerate(trainable) if is_member]
    return packed_layout(plan, members, [1] * len(trainable), _ALIGN_ELEMENTS)


def packed_layout(plan: GroupPlan, members: Sequence[int], cells: Sequence[int], align: int) -> GradLayout:
    """The pieces of ``members`` packed by rank; an element of tensor i takes ``cells[i]`` cells."""
    ranks = plan.layout.ranks
    order = sorted(members, key=lambda i: plan.layout.offsets[i])
    chunks: list[list[tuple[int, int, int]]] = []  # per rank: (tensor, tensor_start, numel) in buffer order
    for rank in range(ranks):
        parts = [(i, plan.local_range(i, rank)) for i in order]
        chunks.append([(i, part.tensor_start, part.numel) for i, part in parts if part.numel])

    def room(i: int, numel: int) -> int:
        return -(-numel * cells[i] // align) * align

    shard = max((sum(room(i, numel) for i, _, numel in chunk) for chunk in chunks), default=0)
    placed: dict[int, list[tuple[int, int, int]]] = {i: [] for i in order}  # (tensor_start, offset, numel)
    for rank, chunk in enumerate(chunks):
        position = rank * shard
        for at, (i, tensor_start, numel) in enumerate(chunk):
            continues = tensor_start + numel < _numel(plan, i)
            last = at == len(chunk) - 1
            offset = (rank + 1) * shard - numel * cells[i] if continues and last else position
            placed[i].append((tensor_start, offset, numel))
            position += room(i, numel)
    return _segmented(plan, placed, cells, shard)


def _segmented(
    plan: GroupPlan, placed: dict[int, list[tuple[int, int, int]]], cells: Sequence[int], shard: int
) -> GradLayout:
    """Join the pieces that touch and describe the result as a layout of segments."""
    specs: list[TensorSpec] = []
    offsets: list[int] = []
    shapes: list[tuple[int, ...]] = []
    segments: list[tuple[Segment, ...]] = [()] * len(plan.names)
    for i, pieces in placed.items():
        runs: list[list[int]] = []
        for tensor_start, offset, numel in pieces:
            if runs and runs[-1][1] + runs[-1][2] * cells[i] == offset:
                runs[-1][2] += numel
            else:
                runs.append([tensor_start, offset, numel])
        own = []
        for part, (tensor_start, offset, numel) in enumerate(runs):
            own.append(Segment(len(specs), tensor_start, numel))
            specs.append(TensorSpec(f"{plan.names[i]}[{part}]", numel * cells[i]))
            offsets.append(offset)
            shapes.append((numel,))
        segments[i] = tuple(own)
    layout = GroupLayout(tuple(specs), plan.layout.ranks, 1, shard, tuple(offsets), 0)
    return GradLayout(layout, tuple(shapes), tuple(segments), False)


def _numel(plan: GroupPlan, index: int) -> int:
    return plan.layout.specs[index].numel * plan.cell_bytes // plan.item_bytes[index]
