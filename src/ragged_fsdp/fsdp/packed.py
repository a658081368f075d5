"""Groups whose gather is not in place: every parameter is cut by itself, so the chunks are copied together.

A gathered parameter is a view of a common buffer only if it is one run of it, and at most one parameter can
run across the border of two shards. Where each is cut into equal chunks (tensor subclasses with all-gather
extensions, an explicit ``Shard(dim)``) the chunks of a rank are copied into a message, and from the gathered
message into the parameters. There is still one collective for the group::

    message   a0 b0|a1 b1|a2 b2      gathered: a part per rank
    weights   a0 a1 a2  b0 b1 b2     persistent tensors, whose storage comes and goes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import _unsafe_preserve_version_counter

from ragged_fsdp import collectives
from ragged_fsdp.fsdp.comm_memory import allocator_of
from ragged_fsdp.fsdp.param_group import ParamGroup
from ragged_fsdp.fsdp.plan import gathered_dtype
from ragged_fsdp.fsdp.row_plan import RowPlan

__all__ = ["Gathered", "PackedGroup"]

_ALIGN_BYTES = 16


@dataclass
class Gathered:
    """What one parameter sends and what was made of it; tensors persist, their storage comes and goes."""

    shapes: list[torch.Size] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Of each input in a rank's part of the message, in bytes."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    inner: list[torch.Tensor] = field(default_factory=list)
    nbytes: dict[int, int] = field(default_factory=dict)
    metadata: Any = None

    def tensors(self) -> list[torch.Tensor]:
        """Everything whose storage is freed by a reshard."""
        return [*self.outputs, *self.inner]

    def materialize(self) -> None:
        """Bring freed storages back, uninitialised."""
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0:
                storage.resize_(self.nbytes.get(id(tensor), 0))

    def release(self) -> None:
        """Free the storages."""
        for tensor in self.tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                self.nbytes[id(tensor)] = storage.nbytes()
        for tensor in self.tensors():
            tensor.untyped_storage().resize_(0)


class PackedGroup(ParamGroup):
    """Sends and receives through a message; subclasses say what goes in and what is made of it."""

    plan: RowPlan

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gathered = [Gathered() for _ in self.params]
        self._message: torch.Tensor | None = None

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        dtypes = [gathered_dtype(param.dtype, self.mp_policy.param_dtype) for param in self.params]
        return sum(p.inner_shape.numel() * dtype.itemsize for p, dtype in zip(self.params, dtypes))

    def _gather_source(self) -> torch.Tensor:
        """This rank's slot of the message, filled; allocated on the compute stream, which frees it."""
        raise NotImplementedError

    def _unpack(self, index: int, state: Gathered, parts: torch.Tensor) -> None:
        """Make a parameter from the gathered message, one row of bytes per rank."""
        raise NotImplementedError

    def _new_message(self, nbytes: Sequence[Sequence[int]]) -> torch.Tensor:
        """Allocate a message for inputs of so many bytes per parameter; this rank's slot of it."""
        end = 0
        for state, sizes in zip(self.gathered, nbytes):
            state.offsets = []
            for size in sizes:
                state.offsets.append(end)
                end += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        group = self.mesh.shard_group
        allocate = allocator_of(self.settings.custom_all_gather) or torch.empty
        with self.settings.allocating(self.device):
            self._message = allocate((group.size() * end,), dtype=torch.uint8, device=self.device)
        return self._message.narrow(0, group.rank() * end, end)

    def _gather(self, slot: torch.Tensor, async_op: bool) -> Any:
        """All inputs with one collective."""
        group, message = self.mesh.shard_group, self._message
        if group.size() == 1 or message is None:
            return None
        launch, comm = collectives.all_gather_, self.settings.custom_all_gather
        return self.launch("all-gather", group, launch, message, slot, group, async_op=async_op, comm=comm)

    def _wait_gather(self) -> None:
        super()._wait_gather()
        message, self._message = self._message, None
        if message is None:
            return  # the data of the forward was kept
        parts = message.view(self.mesh.shard_size, -1)
        for index, state in enumerate(self.gathered):
            state.materialize()
            with _unsafe_preserve_version_counter(tuple(state.outputs)):
                self._unpack(index, state, parts)

    def _release_weight(self) -> None:
        self._message = None
        for state in self.gathered:
            state.release()
