"""How the gradients of a group get to the ranks that own them, as sums: the interface and the default.

The reducer of a group calls its transport in this order; ``layout`` says where gradients lie, and
everything but ``scatter`` runs on the compute stream:

    ========  =====================================================================================
    call      what it does
    ========  =====================================================================================
    nbytes    says how many bytes it needs beside the gradients
    begin     a first gradient is there: take memory for all of them, or none
    store     keep gradients, or add them to those that earlier backwards left
    ready     last step before the collective; parameters without a gradient count as zero
    target    the buffer that the sum will be in
    scatter   on the reduce stream: add over the shard group, this rank's part goes to the target
    hand_over what the reduction uses now belongs to the function that is returned and frees it
    discard   drop what was collected
    ========  =====================================================================================

:class:`ReduceScatter` casts gradients into one buffer and reduces it with one
:meth:`~ragged_fsdp.DBuffer.redistribute`. ``exchange.py`` has the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard

from ragged_fsdp.collectives import OverGroup
from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.fsdp.reduce.layout import GradLayout, Scaling

__all__ = ["GradTransport", "ReduceScatter"]

_ALONE_NUMEL = 1 << 18


class GradTransport(ABC):
    """What every transport of gradients is; the module's docstring says when each method is called."""

    buffers: bool
    """Whether it takes memory when the first gradient comes; else when they are reduced. Before that the
    reductions that have such memory are waited for."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.companion = False
        """Whether its module has a much larger group: it neither waits for that one's reduction nor takes its
        place in the arena."""
        self._layout: GradLayout = None  # type: ignore[assignment]  # from ``begin`` on
        self._leased: FlatStorage | None = None
        """What the arena has lent for this reduction, if it has."""
        self._partial = (Partial(),) * members.mesh.mesh.ndim
        self._scattered = (*self._partial[1:], Shard(0))
        """Placements after the reduction over the shards and before the one over the replicas."""

    def make_buffer(
        self, layout: GradLayout, dtype: torch.dtype, *, is_reduced: bool = False, **options: Any
    ) -> DBuffer:
        """A buffer of the group's gradients, before or after they are reduced over the shards."""
        placements = self._scattered if is_reduced else self._partial
        mesh, device = self.members.mesh.mesh, self.members.device
        return DBuffer(layout.layout, layout.shapes, mesh, placements, dtype=dtype, device=device, **options)

    def discard(self) -> None:
        """Drop what was collected."""
        self.hand_over()()

    @property
    @abstractmethod
    def sum_dtype(self) -> torch.dtype:
        """In which the sum is taken."""

    @abstractmethod
    def nbytes(self, layout: GradLayout) -> int: ...
    @abstractmethod
    def begin(self, layout: GradLayout, dtype: torch.dtype) -> None: ...
    @abstractmethod
    def store(self, fresh: Mapping[int, torch.Tensor], again: Mapping[int, torch.Tensor]) -> None: ...
    @abstractmethod
    def ready(self, missing: set[int]) -> None: ...
    @abstractmethod
    def target(self, main: DBuffer) -> DBuffer: ...
    @abstractmethod
    def scatter(self, reduced: DBuffer, how: Scaling) -> None: ...
    @abstractmethod
    def hand_over(self) -> Callable[[], None]: ...


class ReduceScatter(GradTransport):
    """One buffer of the whole group in the reduction dtype, reduced in one collective.

    It exists from the first gradient that is stored to the end of its reduction (or, without gradient sync,
    of a later one).
    """

    buffers = True

    def __init__(self, members: Members) -> None:
        super().__init__(members)
        self.full: Any = None
        """A DBuffer, from the first gradient until a reduction takes it over."""
        self._fulls: dict[FlatStorage | None, DBuffer] = {}
        """The buffer in each storage it has been in: its views are made once."""

    def nbytes(self, layout: GradLayout) -> int:
        """Bytes of the buffer."""
        return self.members.plan.layout.buffer_numel * self.members.gradient_dtype.itemsize

    def begin(self, layout: GradLayout, dtype: torch.dtype) -> None:
        """Allocate the buffer, on the compute stream."""
        members, self._layout = self.members, layout
        comm, numel = members.settings.reduce_comm, layout.layout.buffer_numel
        if comm.allocates:  # the user's object allocates what it reduces
            given = comm.allocate((numel,), dtype=dtype, device=members.device)
            self._leased = None
            storage = FlatStorage.over(given)
            self.full = self.make_buffer(layout, dtype, storage=storage)
            return
        # without sync the gradients of every group stay, and memory of the user's communication is not ours
        lends = members.settings.reduce_grads and comm.common_memory and not self.companion
        context = members.context
        self._leased = (
            context.arena.lease(numel * dtype.itemsize, context.max_grad_buffers) if lends else None
        )
        full = self._fulls.get(self._leased)
        if full is None or full.dtype != dtype or full.layout is not layout.layout:
            full = self.make_buffer(layout, dtype, allocate=False, storage=self._leased)
            self._fulls[self._leased] = full
        if self._leased is None:
            with comm.memory(members.device):
                full.materialize()
        self.full = full

    def store(self, fresh: Mapping[int, torch.Tensor], again: Mapping[int, torch.Tensor]) -> None:
        """Cast gradients into their slots, or add them there."""
        full, layout, members = self.full, self._layout, self.members
        if members.reduce_dtype is None:
            for index, grad in (*fresh.items(), *again.items()):
                if grad.dtype != full.dtype:
                    raise AssertionError(
                        f"FSDP reduce-scatter expects uniform gradient dtype but got {full.dtype} and "
                        f"{grad.dtype} for {members.params[index].name}"
                    )
        _copy_all(*layout.pairs(full.tensors, fresh))
        targets, sources = layout.pairs(full.tensors, again, copied=False)
        if targets:
            torch._foreach_add_(targets, sources)

    def ready(self, missing: set[int]) -> None:
        """Write zeros into the slots without a gradient: what lay in the memory would be reduced."""
        if missing:
            torch._foreach_zero_([self.full.tensors[r.index] for i in missing for r in self._layout.runs[i]])

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of the buffer."""
        return self.full.dtype

    def target(self, main: DBuffer) -> DBuffer:
        """Straight into ``main``, if dtypes agree and any memory will do; else the slot of the buffer."""
        if main.dtype == self.full.dtype and self.members.settings.reduce_comm.common_memory:
            return main
        if self.members.mesh.replicate_group is None:
            return self.full.slot_buffer
        # a buffer of this step alone: the all-reduce over the replicas changes its placements
        return self.full.part_as(self.full.levels[-1], self._scattered)

    def scatter(self, reduced: DBuffer, how: Scaling) -> None:
        """Reduce-scatter the buffer."""
        members, full = self.members, self.full
        if how.before not in (None, 1.0):
            full.flat.div_(how.before)
        settings, group = members.settings, members.mesh.shard_group
        comm = settings.reduce_comm
        if settings.reduce_group is not None:
            group = settings.reduce_group
            comm = OverGroup(comm, group)
        members.launch(
            "reduce-scatter",
            group,
            full.redistribute,
            self._scattered,
            out=reduced,
            average=how.average,
            comm=comm,
        )

    def hand_over(self) -> Callable[[], None]:
        """The buffer goes back to the arena, or to the allocator."""
        full, leased, arena = self.full, self._leased, self.members.context.arena
        self.full = self._leased = None

        def release() -> None:
            full.release() if leased is None else arena.give_back(leased)

        return release

    def discard(self) -> None:
        """Free the buffer."""
        if self.full is not None:
            super().discard()


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy large tensors of the same dtype one by one: a foreach cuts them into pieces with a launch each.

    Casts stay with the foreach: its kernel is half again as fast as ``copy_``'s.
    """
    if not targets:
        return
    dtype = targets[0].dtype
    alone = [i for i, s in enumerate(sources) if s.dtype == dtype and s.numel() >= _ALONE_NUMEL]
    for index in reversed(alone):
        targets.pop(index).copy_(sources.pop(index))
    if targets:
        torch._foreach_copy_(targets, sources)
