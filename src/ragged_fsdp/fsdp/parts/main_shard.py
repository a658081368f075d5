"""The persistent local shard of a group's parameters, in their original dtypes.

Where all parameters have one dtype the shard is a sharded :class:`DBuffer`: one tensor to cast, to
offload and to hand to optimizers. Where dtypes differ the local pieces are packed behind each other,
each at a multiple of 16 bytes, and move with one foreach call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.parts.plan import ChunkPlan, GroupPlan
from ragged_fsdp.torch_internals import storage_id

__all__ = ["MainShard", "RowPieces", "pins_memory"]

_ALIGN_BYTES = 16


def pins_memory(policy: OffloadPolicy, device: torch.device) -> bool:
    """Whether offloaded memory is pinned: only an accelerator's copies gain from it."""
    return isinstance(policy, CPUOffloadPolicy) and policy.pin_memory and device.type != "cpu"


class MainShard:
    """Local pieces of a group, one per parameter; see the module's docstring."""

    def __init__(
        self,
        plan: GroupPlan,
        mesh: ParallelMesh,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        *,
        pin_memory: bool = False,
    ) -> None:
        self.plan = plan
        self.rank = mesh.shard_rank
        self.dtypes = tuple(dtypes)
        self.device = device
        self.buffer: DBuffer | None = None
        if plan.same_items and len(set(self.dtypes)) == 1:
            self.buffer = DBuffer(
                plan.layout,
                plan.shapes,
                mesh.mesh,
                dtype=self.dtypes[0],
                device=device,
                pin_memory=pin_memory,
            )
            self.buffer.zero_()  # padding must not gather garbage
            self.storage = self.buffer.storage
            starts = [
                plan.layout.local_range(i, self.rank).shard_start * self.buffer.cell_bytes
                for i in range(len(self.dtypes))
            ]
        else:
            starts, nbytes = self._packed_starts()
            self.storage = FlatStorage(nbytes, device, pin_memory=pin_memory)
            self.storage.tensor(0, (nbytes,), torch.uint8).zero_()
        numels = [plan.local_range(i, self.rank).numel for i in range(len(self.dtypes))]
        # views of one tensor, not tensors over one storage: the compiler can only trace the former
        whole = self.storage.tensor(0, (self.storage.nbytes,), torch.uint8)
        self.pieces = tuple(
            whole.narrow(0, start, numel * dtype.itemsize).view(dtype)
            for start, numel, dtype in zip(starts, numels, self.dtypes)
        )

    def _packed_starts(self) -> tuple[list[int], int]:
        starts, position = [], 0
        for index, dtype in enumerate(self.dtypes):
            starts.append(position)
            nbytes = self.plan.local_range(index, self.rank).numel * dtype.itemsize
            position += -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return starts, position

    def holds(self, index: int, local: torch.Tensor) -> bool:
        """Whether ``local`` still is this shard's piece of parameter ``index``."""
        piece = self.pieces[index]
        return (
            local.dtype == piece.dtype
            and local.numel() == piece.numel()
            and storage_id(local.untyped_storage()) == storage_id(self.storage.untyped)
            and (not piece.numel() or local.storage_offset() == piece.storage_offset())
        )

    def fill(self, slots: Sequence[torch.Tensor], *, non_blocking: bool) -> None:
        """Cast each piece into the slot of its parameter, with one foreach call."""
        filled = [(slot.view(-1), piece) for slot, piece in zip(slots, self.pieces) if piece.numel()]
        if filled:
            sources = [piece.to(slot.device, non_blocking=non_blocking) for slot, piece in filled]
            torch._foreach_copy_([slot for slot, _ in filled], sources)


class RowPieces:
    """This rank's rows of each parameter, in the parameter's own class, each with memory of its own."""

    def __init__(
        self, plan: ChunkPlan, rank: int, inners: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        pieces = []
        for index, inner in enumerate(inners):
            part = plan.local_range(index, rank)
            row = max(1, math.prod(plan.shapes[index][1:]))
            rows = inner.detach().narrow(0, min(part.tensor_start // row, inner.shape[0]), part.numel // row)
            pieces.append(rows.clone() if inner.is_meta else rows.clone().to(device))
        self.pieces = tuple(pieces)
