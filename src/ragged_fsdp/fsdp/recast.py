"""The gathered weights of a group whose item sizes changed after it was planned.

``module.to(dtype)`` after ``fully_shard`` keeps every cut where it is: sharded parameters, optimizer states
and checkpoints do not move. Where all item sizes change alike the layout holds in elements. Where they do not
(int8 codes stay while bf16 norms become fp32), the pieces of a rank no longer fill its shard as planned, and
are packed anew::

    planned   a a a a a a b b|b b b b b b b b|b b c c c c . .      b is 1 byte per element, becomes 4
    recast    a a a a a a . b|b b b b b b b b|b b c c c c . .      a cell is now 4 bytes of b

A tensor usually stays one run of the gathered buffer and a view of it, as before. One that spans a whole
shard which is not the largest any more is in several runs; it gets memory of its own and is copied together
after the gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Replicate

from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.grad_layout import packed_layout
from ragged_fsdp.fsdp.mesh import ParallelMesh
from ragged_fsdp.fsdp.plan import GroupPlan

__all__ = ["RecastWeight", "gathered_weight"]

_ALIGN_BYTES = 16


def gathered_weight(
    plan: GroupPlan, dtypes: Sequence[torch.dtype], mesh: ParallelMesh, device: torch.device
) -> DBuffer | RecastWeight:
    """The buffer that a group is gathered into, without memory: as planned if item sizes allow it."""
    items = tuple(dtype.itemsize for dtype in dtypes)
    if items != plan.item_bytes and not (plan.same_items and len(set(items)) == 1):
        return RecastWeight(plan, dtypes, mesh, device)
    return DBuffer(
        plan.layout,
        plan.shapes,
        mesh.mesh,
        (Replicate(),) * mesh.mesh.ndim,
        dtype=dtypes[0] if len(set(dtypes)) == 1 else dtypes,
        cell_bytes=dtypes[0].itemsize if plan.same_items else plan.cell_bytes,
        device=device,
        allocate=False,
    )


class RecastWeight:
    """Stands in for the gathered :class:`DBuffer` of a group; the same members with the same meaning."""

    def __init__(
        self, plan: GroupPlan, dtypes: Sequence[torch.dtype], mesh: ParallelMesh, device: torch.device
    ) -> None:
        self.dtypes = tuple(dtypes)
        self.device = device
        cell_bytes = math.gcd(*(dtype.itemsize for dtype in dtypes))
        cells = [dtype.itemsize // cell_bytes for dtype in dtypes]
        packed = packed_layout(plan, range(len(dtypes)), cells, max(1, _ALIGN_BYTES // cell_bytes))
        kinds: list[torch.dtype] = [torch.uint8] * len(packed.shapes)
        shapes = list(packed.shapes)
        for index, segments in enumerate(packed.segments):
            for segment in segments:
                kinds[segment.index] = dtypes[index]
            if len(segments) == 1:
                shapes[segments[0].index] = plan.shapes[index]
        self.buffer = DBuffer(
            packed.layout,
            shapes,
            mesh.mesh,
            (Replicate(),) * mesh.mesh.ndim,
            dtype=kinds,
            cell_bytes=cell_bytes,
            device=device,
            allocate=False,
        )
        self._packed, self._rank = packed, mesh.shard_rank
        self._together: dict[int, FlatStorage] = {
            index: FlatStorage(math.prod(plan.shapes[index]) * dtypes[index].itemsize, device, allocate=False)
            for index, segments in enumerate(packed.segments)
            if len(segments) > 1
        }
        self.tensors = tuple(self._tensor(index, plan.shapes[index]) for index in range(len(dtypes)))

    def _tensor(self, index: int, shape: Sequence[int]) -> torch.Tensor:
        segments = self._packed.segments[index]
        if len(segments) == 1:
            return self.buffer.tensors[segments[0].index]
        return self._together.get(index, self.buffer.storage).tensor(0, shape, self.dtypes[index])

    @property
    def nbytes(self) -> int:
        """Bytes that the gather fills."""
        return self.buffer.nbytes

    @property
    def dtype(self) -> torch.dtype:
        """Of :attr:`flat`."""
        return self.buffer.dtype

    @property
    def flat(self) -> torch.Tensor:
        """What the gather fills."""
        return self.buffer.flat

    @property
    def slot(self) -> torch.Tensor:
        """This rank's part of :attr:`flat`."""
        return self.buffer.slot

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """This rank's part of each tensor, in its slot."""
        found = [self._packed.local_piece(index, self._rank) for index in range(len(self.dtypes))]
        parts = self.buffer.slot_tensors
        return tuple(
            self.slot[:0].view(dtype) if piece is None else parts[piece[0]]
            for piece, dtype in zip(found, self.dtypes)
        )

    @property
    def is_materialized(self) -> bool:
        """Whether the storage is allocated."""
        return self.buffer.is_materialized

    def materialize(self) -> None:
        """Bring released storage back, uninitialised, on the current stream."""
        self.buffer.materialize()
        for storage in self._together.values():
            storage.materialize()

    def release(self) -> None:
        """Free the storage; tensors stay valid objects."""
        self.buffer.release()
        for storage in self._together.values():
            storage.release()

    def put_together(self) -> None:
        """After the gather: copy the tensors that are in several runs."""
        for index, storage in self._together.items():
            whole = storage.tensor(0, (storage.nbytes // self.dtypes[index].itemsize,), self.dtypes[index])
            for segment in self._packed.segments[index]:
                part = whole.narrow(0, segment.tensor_start, segment.numel)
                part.copy_(self.buffer.tensors[segment.index])
