"""Resharding to a smaller world after forward: a larger slice of the gathered buffer is kept.

With ``reshard_after_forward=k`` consecutive ranks form groups of k. After forward each keeps the k-th part
of the gathered buffer that is its own, and backward gathers within the group::

    gathered   0 1 2 3 4 5 6 7      8 ranks, k = 4
    rank 5 keeps   2 3              its group is ranks 4 to 7, it is the second of them
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ragged_fsdp.dbuffer import DBuffer
from ragged_fsdp.dtensor import ragged_spec, wrap_local
from ragged_fsdp.fsdp.param import ManagedParam
from ragged_fsdp.fsdp.plan import GroupPlan
from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.placement import placement_from_layout

__all__ = ["ParkingSpot", "parking_mesh"]


def parking_mesh(mesh: DeviceMesh, size: int) -> DeviceMesh:
    """Groups of ``size`` consecutive ranks; all dims before the last are copies."""
    return DeviceMesh(mesh.device_type, mesh.mesh.view(-1, size))


class ParkingSpot:
    """Keeps this rank's part of a group's gathered weights between forward and backward."""

    def __init__(self, mesh: DeviceMesh, plan: GroupPlan) -> None:
        self.mesh = mesh
        self.plan = plan
        self.group: dist.ProcessGroup = mesh.get_group(1)
        self.size, self.rank = self.group.size(), self.group.rank()
        self.kept: torch.Tensor | None = None

    def keep(self, weight: DBuffer, params: Sequence[ManagedParam]) -> None:
        """Copy the slice to keep and register its pieces as the parameters."""
        self.kept = self._slot(weight).clone()
        for index, param in enumerate(params):
            if param.inner_spec is not None:
                raise NotImplementedError(
                    "Resharding to smaller mesh is not supported for DTensor parameters yet: "
                    f"{param.fqn or param.name}"
                )
            param.register(self._parked_param(index, param, weight))

    def _parked_param(self, index: int, param: ManagedParam, weight: DBuffer) -> nn.Parameter:
        assert self.kept is not None
        layout = self._layout(index)
        part = layout.local_range(0, self.rank)
        dtype = weight.dtypes[index]
        elements = self.kept.view(dtype) if self.kept.dtype != dtype else self.kept
        piece = elements.narrow(0, part.shard_start, part.numel)
        placement = placement_from_layout(layout, 0, param.inner_shape)
        spec = ragged_spec(self.mesh, (Replicate(), placement), param.global_shape, dtype)
        row = param.inner_shape[len(placement.dims) :]
        local = piece.view(-1, *row) if row.numel() else piece.view(0, *row)
        return nn.Parameter(wrap_local(local, spec), requires_grad=param.sharded.requires_grad)

    def _layout(self, index: int) -> GroupLayout:
        """The same buffer seen as ``size`` shards."""
        wide = self.plan.tensor_layout(index)
        spec = TensorSpec(wide.specs[0].name, wide.specs[0].numel)
        return GroupLayout((spec,), self.size, 1, wide.buffer_numel // self.size, wide.offsets, 0)

    def fill(self, weight: DBuffer) -> tuple[torch.Tensor, dist.ProcessGroup]:
        """Put the kept slice back; the slot it fills and the group to gather in."""
        assert self.kept is not None
        slot = self._slot(weight)
        slot.copy_(self.kept)
        return slot, self.group

    def clear(self) -> None:
        """Drop the kept slice."""
        self.kept = None

    def _slot(self, weight: DBuffer) -> torch.Tensor:
        numel = weight.flat.numel() // self.size
        return weight.flat.narrow(0, self.rank * numel, numel)
