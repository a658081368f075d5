"""The persistent local shard of a group's parameters, in their original dtypes.

Where all parameters have one dtype the shard is a sharded :class:`DBuffer`: one tensor to cast, to
offload and to hand to optimizers. Where dtypes differ the local pieces are packed behind each other,
each at a multiple of 16 bytes, and move with one foreach call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.mesh import ParallelMesh
from ragged_fsdp.fsdp.plan import GroupPlan

__all__ = ["MainShard", "pins_memory"]

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

    @property
    def flat(self) -> torch.Tensor:
        """Everything as one flat tensor; of bytes where dtypes differ."""
        if self.buffer is not None:
            return self.buffer.flat
        return self.storage.tensor(0, (self.storage.nbytes,), torch.uint8)

    def holds(self, index: int, local: torch.Tensor) -> bool:
        """Whether ``local`` still is this shard's piece of parameter ``index``."""
        piece = self.pieces[index]
        return (
            local.dtype == piece.dtype
            and local.numel() == piece.numel()
            and local.untyped_storage()._cdata == self.storage.untyped._cdata
            and (not piece.numel() or local.storage_offset() == piece.storage_offset())
        )

    def fill_slot(self, gathered: Any, *, non_blocking: bool) -> None:
        """Cast the shard into its own slot of ``gathered``: one kernel, or one foreach call."""
        if self.buffer is not None and gathered.dtype == self.dtypes[0]:
            gathered.slot.copy_(self.buffer.flat, non_blocking=non_blocking)
        elif self.buffer is not None and len(set(gathered.dtypes)) == 1:
            flat = self.buffer.flat
            if self.device != gathered.device:  # cast on the device: between devices the host would do it
                flat = flat.to(gathered.device, non_blocking=non_blocking)
            gathered.slot.copy_(flat)
        else:
            slots = [t.view(-1) for t in gathered.slot_tensors]
            filled = [(s, p) for s, p in zip(slots, self.pieces) if p.numel()]
            if filled:
                sources = [p.to(gathered.device, non_blocking=non_blocking) for _, p in filled]
                torch._foreach_copy_([s for s, _ in filled], sources)
