"""Parameters with an explicit ``Shard(dim)``: cut as the user says, at the price of copies.

Without a ``shard_placement_fn`` a parameter is cut wherever its group's plan finds it best, and gathered in
place. One for which the function returns ``Shard(dim)`` gets exactly that: its sharded form is a DTensor with
that placement (strided beside tensor parallelism on the same dim), whose local tensor is a contiguous chunk.
Such parameters form a group of their own: see :mod:`ragged_fsdp.fsdp.packed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ragged_fsdp.fsdp.packed import Gathered, PackedGroup
from ragged_fsdp.fsdp.plan import gathered_dtype
from ragged_fsdp.fsdp.row_plan import rank_major

__all__ = ["ChunkGroup", "chunk_placement"]


def chunk_placement(param: torch.Tensor, dim: int) -> Callable[[Sequence[Placement]], Any]:
    """A function from the placements that stand after it to the placement of a parameter cut along ``dim``.

    Placements apply from left to right, but data parallelism cuts what tensor parallelism left: on the same
    dim that is a stride.
    """

    def placement(later: Sequence[Placement]) -> Any:
        if not isinstance(param, DTensor):
            return Shard(dim)
        sizes = param.device_mesh.shape[param.device_mesh.ndim - len(later) :]
        cuts = [size for p, size in zip(later, sizes) if isinstance(p, Shard) and p.dim % param.ndim == dim]
        split = math.prod(cuts)
        return _StridedShard(dim, split_factor=split) if split > 1 else Shard(dim)

    return placement


class ChunkGroup(PackedGroup):
    """Gathers chunks along any dim into whole parameters."""

    def _prepare_weight(self, param_dtype: torch.dtype | None) -> None:
        """Make the gathered tensors, without memory; again if the dtypes changed."""
        dtypes = [gathered_dtype(param.dtype, param_dtype) for param in self.params]
        for index, (param, dtype) in enumerate(zip(self.params, dtypes)):
            state = self.gathered[index]
            if state.outputs and state.outputs[0].dtype == dtype:
                continue
            whole = torch.empty(
                self.mesh.shard_size * self._chunk_numel(index), dtype=dtype, device=self.device
            )
            self.gathered[index] = state = Gathered(outputs=[whole])
            state.release()
            param.unsharded = None

    def _chunk_numel(self, index: int) -> int:
        return self.plan.chunk_rows(index) * self.plan.row_numel(index)

    def _gather_source(self) -> torch.Tensor:
        """Cast the chunks into this rank's slot of a new message."""
        outputs = [state.outputs[0] for state in self.gathered]
        nbytes = [[out.nbytes // self.mesh.shard_size] for out in outputs]
        slot = self._new_message(nbytes)
        targets, sources = [], []
        for index, (param, out) in enumerate(zip(self.params, outputs)):
            local = param.sharded._local_tensor
            if not local.numel():
                continue
            at = slot.narrow(0, self.gathered[index].offsets[0], local.numel() * out.dtype.itemsize)
            targets.append(at.view(out.dtype).view(local.shape))
            sources.append(local.to(self.device, non_blocking=self.pin_memory))
        if targets:
            torch._foreach_copy_(targets, sources)
        return slot

    def _unpack(self, index: int, state: Gathered, parts: torch.Tensor) -> None:
        whole, param, dim = state.outputs[0], self.params[index], self.plan.dims[index]
        ranks, chunk = self.mesh.shard_size, self._chunk_numel(index)
        if whole.numel():
            nbytes = chunk * whole.dtype.itemsize
            chunks = parts.narrow(1, state.offsets[0], nbytes).view(whole.dtype)
            target = whole.view(ranks, chunk)
            if dim:  # divides evenly
                target = rank_major(whole.view(param.inner_shape), dim, ranks)
            target.copy_(chunks.view(target.shape))
        if param.unsharded is None:
            param.make_unsharded(whole.narrow(0, 0, param.inner_shape.numel()).view(param.inner_shape))
