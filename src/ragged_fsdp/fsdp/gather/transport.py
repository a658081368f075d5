"""How the shards of a group become the parameters its modules compute with, and how they are let go.

A group has one :class:`Transport`, chosen when it is built; a cast of some of its parameters may replace it
(``Pieces``). The group calls it in this order, and the transport owns the memory in between:

    =========  ==============  ===================================================================
    call       on stream       what it does
    =========  ==============  ===================================================================
    prepare    compute         makes what the parameters will view, without memory; again after casts
    allocate   compute         takes the memory of one gather
    begin      gather          fills this rank's part and launches the collective
    finish     compute, which  waits for a work that is not on the stream, and does what is left to do
               has waited
    release    compute         gives the memory back; the tensors stay
    adopt_     compute         brings sharded parameters that were replaced, cast or moved back into one
    shards                     main shard
    =========  ==============  ===================================================================

:class:`InPlace` is the default: one buffer whose slots are the ranks' shards, and one
:meth:`~ragged_fsdp.DBuffer.redistribute`. The others are in ``codes.py``, ``packed.py`` and
``tiled.py``; FP8 products have one of their own (:mod:`ragged_fsdp.fp8.gathered`).
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from ragged_fsdp.collectives import explain_failure, wait_all
from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.autograd import on_parameters
from ragged_fsdp.fsdp.parts.left_out import note_gathered
from ragged_fsdp.fsdp.parts.members import MainShard, Members
from ragged_fsdp.layout import GroupLayout
from ragged_fsdp.topology import subgroup
from ragged_fsdp.torch_internals import local_of, spec_of

__all__ = ["InPlace", "Message", "Parking", "Transport", "note_shards", "parking_mesh"]


class Transport(Protocol):
    """What every transport offers; the module's docstring says when each is called, and on which stream."""

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameters."""

    def prepare(self) -> None: ...
    def allocate(self) -> None: ...
    def begin(self, async_op: bool) -> None: ...
    def finish(self) -> None: ...
    def release(self) -> None: ...
    def adopt_shards(self) -> None: ...


def note_shards(members: Members) -> None:
    """Take over dtype and spec of sharded parameters that lie in no common shard."""
    for param in members.params:
        param.dtype = local_of(param.sharded).dtype
        param.spec = spec_of(param.sharded)


class InPlace:
    """One buffer, cut evenly over the ranks: a shard is cast into its slot and gathered where it lies."""

    fills_slot = False
    """Whether what it sends is never the main shard as it lies."""
    gathers_weight = True
    """Whether the buffer that the parameters view is what is gathered."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.layout = members.plan.layout
        """Where the gathered parameters lie."""
        self.weight: DBuffer = None  # type: ignore[assignment]  # from ``prepare`` on
        """Gathered weights in the compute dtypes; its storage comes and goes."""
        self._staged: DBuffer | None = None
        """What the collective writes instead, if it writes only memory of its own."""
        self._out: DBuffer | None = None
        """What the gather under way fills."""

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered parameters."""
        return self.weight.nbytes if self.weight is not None else 0

    def fits_plan(self) -> bool:
        """Whether item sizes are as planned, or all changed alike, so that shards are filled as planned."""
        items, plan = tuple(dtype.itemsize for dtype in self.members.gathered_dtypes), self.members.plan
        return items == plan.item_bytes or (plan.same_items and len(set(items)) == 1)

    def prepare(self) -> None:
        """Make the gathered buffer, without memory; again if the dtypes changed."""
        plan, dtypes = self.members.plan, self.members.gathered_dtypes
        if self.weight is not None and self.weight.dtypes == dtypes:
            return
        self.weight = self.make_buffer(
            self.layout,
            dtype=dtypes[0] if len(set(dtypes)) == 1 else dtypes,
            cell_bytes=dtypes[0].itemsize if plan.same_items else plan.cell_bytes,
        )
        for param in self.members.params:
            param.unsharded = None

    def make_buffer(self, layout: GroupLayout, **options: Any) -> DBuffer:
        """A buffer of all that is gathered, without memory."""
        mesh, shapes = self.members.mesh.mesh, self.members.plan.shapes
        whole = (Replicate(),) * mesh.ndim
        return DBuffer(layout, shapes, mesh, whole, device=self.members.device, allocate=False, **options)

    def allocate(self) -> None:
        """Bring the buffer's memory back, on the compute stream."""
        members, weight, settings = self.members, self.weight, self.members.settings
        if not (settings.keep_storage and weight.is_materialized):
            pool, comm = members.context.gather_pool, settings.gather_comm
            if not comm.common_memory:
                with comm.memory(members.device):
                    weight.materialize()
            elif 0 < weight.nbytes == pool.nbytes:
                with pool.allocating(members.device):
                    weight.materialize()
            else:
                weight.materialize()
        if self.gathers_weight and settings.gather_comm.allocates and members.mesh.shard_size > 1:
            self.stage(weight)
        if members.params[0].unsharded is None:
            self.make_unsharded()

    def make_unsharded(self) -> None:
        """Make the parameters that the computation sees, once for each gathered buffer."""
        for param, view in zip(self.members.params, self.weight.tensors):
            param.make_unsharded(view)

    def stage(self, buffer: DBuffer) -> None:
        """Gather into a buffer like this one, in memory that the comm allocates."""
        members, comm = self.members, self.members.settings.gather_comm
        given = comm.allocate(buffer.flat.shape, dtype=buffer.dtype, device=members.device).view(-1)
        self._staged = buffer.with_placements(buffer.placements, storage=FlatStorage.over(given))

    def begin(self, async_op: bool) -> None:
        """Cast the shard into its slot and gather in place, on the stream of gathers."""
        members, group = self.members, self.members.mesh.shard_group
        main: Any = members.main
        out = self.weight if self._staged is None else self._staged
        source = self.own_part(out) if main.buffer is None or self.fills_slot else main.buffer
        comm, self._out = members.settings.gather_comm, out
        members.launch(
            "all-gather", group, source.redistribute, out.placements, out=out, async_op=async_op, comm=comm
        )

    def own_part(self, out: DBuffer) -> DBuffer:
        """This rank's slot of ``out``, filled: what it sends where that is not the main shard as it lies."""
        main: Any = self.members.main
        # dtypes differ: the pieces lie behind each other, and go to their places one by one
        main.fill(out.slot_buffer.tensors, non_blocking=self.members.pin_memory)
        return out.slot_buffer

    def finish(self) -> None:
        """Wait for a work that is not on the stream; copy out of memory that is not the buffer's."""
        weight, members = self.weight, self.members
        out, self._out = self._out, None
        if out is not None and out.pending is not None:
            with explain_failure("all-gather", members.label, members.mesh.shard_group):
                out.wait()
        if self._staged is not None:
            self._unstage(weight, self._staged)
            self._staged = None

    def _unstage(self, weight: DBuffer, staged: DBuffer) -> None:
        weight.flat.copy_(staged.flat)

    def release(self) -> None:
        """Free the buffer's memory, unless it must keep its address."""
        if not self.members.settings.keep_storage:
            self.weight.release()

    def adopt_shards(self) -> None:
        """Copy shards that were replaced, cast or moved into a new main shard, if any was."""
        members, main = self.members, self.members.main
        assert isinstance(main, MainShard)
        locals_ = [local_of(param.sharded) for param in members.params]
        if all(main.holds(index, local) for index, local in enumerate(locals_)):
            return
        devices = {local.device for local in locals_}
        if len(devices) > 1 or next(iter(devices)).type == "meta":
            note_shards(members)
            return  # partly materialised: lazy init will name those that are missing
        device = devices.pop()
        members.main = made = MainShard(
            members.plan,
            members.mesh,
            [local.dtype for local in locals_],
            device,
            pin_memory=members.pin_memory and device.type == "cpu",
        )
        for param, piece, local in zip(members.params, made.pieces, locals_):
            if not members.without_values:
                piece.copy_(local.reshape(-1))
            param.point_at(piece)


class Message:
    """Memory of one gather that is not the parameters' own, a row per rank: it is there from the allocation
    until it has arrived."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.rows: Any = None
        self._work: Any = None

    def allocate(self, width: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Take the memory, on the compute stream; this rank's row of it."""
        members, mesh = self._members, self._members.mesh
        comm, size = members.settings.gather_comm, (mesh.shard_size * width,)
        self.rows = comm.allocate(size, dtype=dtype, device=members.device).view(mesh.shard_size, width)
        return self.rows[mesh.shard_rank]

    def send(self, async_op: bool) -> None:
        """Gather the rows, of which this rank's is filled."""
        members, group, rows = self._members, self._members.mesh.shard_group, self.rows
        if group.size() > 1:
            gather, own = members.settings.gather_comm.gather, rows[group.rank()]
            self._work = members.launch(
                "all-gather", group, gather, rows.view(-1), own, group, async_op=async_op
            )

    def take(self) -> torch.Tensor | None:
        """Wait for a work that is not on the stream; the rows, which are the caller's now, or were before."""
        rows, work, self.rows, self._work = self.rows, self._work, None, None
        if work is not None:
            with explain_failure("all-gather", self._members.label, self._members.mesh.shard_group):
                wait_all(work)
        return rows


# By process group, which lives until it is destroyed. An entry of a mesh would go when a rank's garbage is
# collected, and that rank alone would make new groups.
_PARKING: weakref.WeakKeyDictionary[ProcessGroup, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


def parking_mesh(shard_group: ProcessGroup, size: int, device: torch.device) -> DeviceMesh:
    """The mesh of this rank's part of ``shard_group``, which is cut into parts of ``size`` consecutive ranks.

    One for all layers over the group: each would have communicators of its own. Only the ranks of a part make
    it: torch's meshes are made by all ranks of the world, and those of other meshes do not come.
    """
    known = _PARKING.setdefault(shard_group, {})
    if size not in known:
        first = shard_group.rank() // size * size
        own = subgroup(shard_group, range(first, first + size), device)
        known[size] = DeviceMesh.from_group(own, device.type)
    return known[size]


class Parking(InPlace):
    """Gathers what the ranks of a smaller group have kept of the gathered buffer, from forward to backward.

    With ``reshard_after_forward=k`` consecutive ranks form groups of k. Each keeps the k-th part of the
    buffer that is its own, as the transport of the group left it: decoded, untiled::

        gathered   0 1 2 3 4 5 6 7      8 ranks, k = 4
        rank 5 keeps   2 3              its group is ranks 4 to 7, it is the second of them
    """

    def __init__(self, transport: InPlace, mesh: DeviceMesh) -> None:
        super().__init__(transport.members)
        self._transport, self._mesh, self._group = transport, mesh, mesh.get_group()
        self.kept: Any = None
        """A DBuffer, from forward until it has been gathered."""
        self._seen: DBuffer | None = None
        """The memory that was gathered into last, over the smaller groups."""

    @on_parameters
    def park(self) -> None:
        """Keep a slice of what was gathered, register its pieces as parameters, free the rest."""
        self.weight = self._transport.weight
        own = self._seen_over(self.weight).slot_buffer
        self.kept = own.empty_like().copy_(own)
        for index, param in enumerate(self.members.params):
            if param.inner_spec is not None:
                raise NotImplementedError(
                    f"Resharding to smaller mesh is not supported for DTensor parameters yet: {param.fqn}"
                )
            param.parked = nn.Parameter(self.kept.dtensor(index), requires_grad=param.sharded.requires_grad)
            note_gathered(param.parked, param.fqn)
            param.register(param.parked)
        self._transport.release()

    def forget(self) -> None:
        """Let go of what was kept, and of the parameters over it."""
        self.kept = None
        for param in self.members.params:
            param.parked = None

    def begin(self, async_op: bool) -> None:
        """Gather the slices of the smaller group, on the stream of gathers."""
        out = self._out = self._seen_over(self.weight if self._staged is None else self._staged)
        gather, comm = self.kept.redistribute, self.members.settings.gather_comm
        self.members.launch(
            "all-gather", self._group, gather, out.placements, out=out, async_op=async_op, comm=comm
        )

    def finish(self) -> None:
        """Wait as for any gather; the slice is not needed any more."""
        if self._staged is not None:
            self._seen = None  # else what it is in would stay allocated until the next forward
        super().finish()
        self.forget()

    def _seen_over(self, weight: DBuffer) -> DBuffer:
        """The memory of ``weight`` as a buffer over the smaller groups, whose borders may cut blocks."""
        found = self._seen
        if found is None or found.storage is not weight.storage or found.dtypes != weight.dtypes:
            found = self._seen = DBuffer(
                weight.layout.recut(self._group.size()),
                weight.shapes,
                self._mesh,
                (Replicate(),),
                dtype=weight.dtype if weight.is_uniform else weight.dtypes,
                cell_bytes=weight.cell_bytes,
                device=weight.device,
                storage=weight.storage,
            )
        return found
