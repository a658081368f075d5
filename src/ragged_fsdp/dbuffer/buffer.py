"""DBuffer: tensors of a group as slices of one distributed buffer.

The buffer is a flat global array of ``ranks * shard_numel`` cells whose tensors lie where a
:class:`~ragged_fsdp.layout.GroupLayout` puts them. It has one placement per mesh dim, as a DTensor
has; the array as a whole is cut evenly, so ``Shard(0)`` is its sharded placement, while the tensors
inside are ragged::

    layout             a a a a a a a a|a a c c c c c .|b b b b b b . .
    Shard(0)  rank 1                   a a c c c c c .                    S cells
    Replicate rank 1   a a a a a a a a|a a c c c c c .|b b b b b b . .    m S cells
    Partial   rank 1   as long as Replicate; the value is the sum over the ranks

The last mesh dims, as many as their sizes multiply to the layout's ranks, are its *levels*. Over the levels
(node, local) the array is one of slots, node by node, and each level cuts it along its own axis::

    slots                      0,0  0,1 | 1,0  1,1       2 nodes of 2 ranks; rank (1, 0) holds
    (Shard(0), Shard(0))                  1,0            its own slot
    (Shard(0), Replicate())               1,0  1,1       the slots of its node
    (Replicate(), Shard(0))    0,0        1,0            those of its place in every node, side by side

``redistribute`` is the only dispatcher; :mod:`ragged_fsdp.dbuffer.redistribute` has its table.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.collectives import Comm, wait_all
from ragged_fsdp.dbuffer.checks import (
    check_arguments,
    check_tensors,
    check_transition,
    checked_placements,
    coordinate_of,
    device_of,
    expect,
    group_specs,
    levels_of,
)
from ragged_fsdp.dbuffer.redistribute import Move, plan_move
from ragged_fsdp.dbuffer.storage import FlatStorage
from ragged_fsdp.dtensor import ragged_spec, wrap_local
from ragged_fsdp.layout import ALIGN_BYTES, GroupLayout
from ragged_fsdp.placement import placement_from_layout
from ragged_fsdp.planner import plan_group
from ragged_fsdp.policy import Granularity
from ragged_fsdp.tiling import tiled, untiled
from ragged_fsdp.torch_internals import local_of, storage_id

__all__ = ["DBuffer"]

_MOVES_KEPT = 8
_OF_ONE = ("storage", "flat", "slot", "tensors", "slot_buffer")  # of a buffer itself; the rest is its kind
# By the address of the storage object. A buffer keeps its storage alive, so an address in the table cannot be
# reused while its buffer exists; no tensor is referenced, not even weakly (torch.utils.swap_tensors refuses
# tensors that have weak references).
_BUFFERS: weakref.WeakValueDictionary[int, DBuffer] = weakref.WeakValueDictionary()
_TORCH = Comm()


class _Kind(dict[str, Any]):
    """The attributes that buffers of one kind share; kinds are told apart by identity."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class DBuffer:
    """A group of tensors in one buffer over a mesh.

    Args:
        layout: where the tensors lie; ``layout.ranks`` is the size of the last mesh dim, or the product of
            the sizes of the last few, which then are its levels.
        shapes: the shape of each tensor, in the order of ``layout.specs``.
        mesh: the mesh; its last dims shard.
        placements: one per mesh dim: ``Shard(0)``, ``Replicate()`` or ``Partial()`` for a level,
            ``Replicate()`` or ``Partial()`` for the dims before. Default: sharded over all levels.
        dtype: of all tensors, or one per tensor; then a layout cell is ``cell_bytes`` bytes wide
            and the flat tensor holds bytes.
        device: where it lives; default is the mesh's device.
        allocate: False leaves the storage empty until :meth:`materialize`.
        storage, offset_bytes: an existing storage to lie in, instead of a new one.
    """

    def __init__(
        self,
        layout: GroupLayout,
        shapes: Sequence[Sequence[int]],
        mesh: DeviceMesh,
        placements: Sequence[Placement] | None = None,
        *,
        dtype: torch.dtype | Sequence[torch.dtype],
        cell_bytes: int | None = None,
        device: torch.device | str | None = None,
        pin_memory: bool = False,
        allocate: bool = True,
        storage: FlatStorage | None = None,
        offset_bytes: int = 0,
    ) -> None:
        check_arguments(layout, shapes, mesh, dtype, cell_bytes, offset_bytes)
        expect(": storage", storage, FlatStorage | None, "a FlatStorage or None")
        self.layout = layout
        self.shapes = tuple(torch.Size(shape) for shape in shapes)
        self.mesh = mesh
        self.dtypes = (dtype,) * len(self.shapes) if isinstance(dtype, torch.dtype) else tuple(dtype)
        kinds = {*self.dtypes, *([dtype] if isinstance(dtype, torch.dtype) else [])}
        self.is_uniform = len(kinds) <= 1
        """Whether all tensors have one dtype, so that the flat tensor holds numbers, and not bytes."""
        self.dtype = kinds.pop() if len(kinds) == 1 else torch.uint8
        self.cell_bytes = cell_bytes or self.dtype.itemsize
        self.levels = levels_of(mesh, layout.ranks)
        self.placements = checked_placements(self.mesh, placements, self.levels)
        self.device = torch.device(device) if device is not None else device_of(mesh)
        check_tensors(layout, self.shapes, self.dtypes, self.cell_bytes)
        self.coordinate = coordinate_of(mesh)
        self.rank = self._index(self.levels)
        cut = [isinstance(self.placements[dim], Shard) for dim in self.levels]
        self.is_sharded = any(cut) and not self._whole_levels
        """Whether a rank holds its own slot only; one rank alone may see it as its slot or as the whole."""
        self.nbytes = layout.shard_numel * self.cell_bytes * math.prod(map(mesh.size, self._whole_levels))
        self.offset_bytes = offset_bytes
        self.pin_memory = pin_memory
        self.pending: Any = None
        """Works of a collective that makes this buffer or reads it; see :meth:`wait`."""
        self._moves: dict[_Kind | None, tuple[Any, Move]] = {}
        """By the kind of ``out``: the placements :meth:`redistribute` was called with, and what to do."""
        if storage is None:
            storage = FlatStorage(self.nbytes, self.device, pin_memory=pin_memory, allocate=allocate)
            _BUFFERS[storage_id(storage.untyped)] = self
        self.storage = storage
        self._is_fresh = False
        """Whether it came from :meth:`empty_like` and nobody has asked for its storage: the bytes exist."""

    @classmethod
    def distribute(
        cls,
        tensors: Mapping[str, torch.Tensor],
        mesh: DeviceMesh,
        *,
        granularity: Mapping[str, Granularity] | None = None,
        unit: int = 1,
    ) -> DBuffer:
        """Plan a group of full tensors, the same on every rank, and keep this rank's shard of it.

        Args:
            tensors: full tensors of one dtype by name.
            mesh: the mesh; its last dim shards.
            granularity: of tensors that may not be cut anywhere, by name.
            unit: the shard size is a multiple of this many elements.
        """
        specs = group_specs(tensors, {} if granularity is None else granularity, mesh)
        dtype = next(iter(tensors.values())).dtype
        align = max(1, ALIGN_BYTES // dtype.itemsize)
        layout = plan_group(specs, mesh.size(mesh.ndim - 1), unit=unit, align=align)
        buffer = cls(layout, [t.shape for t in tensors.values()], mesh, dtype=dtype)
        buffer.zero_()
        for index, tensor in enumerate(tensors.values()):
            part = layout.local_range(index, buffer.rank)
            flat = tiled(tensor.detach(), specs[index].tile)
            flat = flat[part.tensor_start : part.tensor_start + part.numel]
            buffer.tensor(index).view(-1).copy_(flat)
        return buffer

    def empty_like(self) -> DBuffer:
        """A new, uninitialised buffer of the same kind; nothing is checked again. :meth:`of` ignores it."""
        made = object.__new__(DBuffer)
        made.__dict__.update(self._kind)
        numel = self.nbytes // self.dtype.itemsize
        made.flat = torch.empty(numel, dtype=self.dtype, device=self.device, pin_memory=self.pin_memory)
        return made

    @cached_property
    def _kind(self) -> _Kind:
        kind = _Kind({name: value for name, value in vars(self).items() if name not in _OF_ONE})
        kind.update(offset_bytes=0, pending=None, _is_fresh=True, _moves={}, _kind=kind)
        return kind

    @cached_property
    def storage(self) -> FlatStorage:
        """The memory; of a buffer from :meth:`empty_like` it is described when it is first asked for."""
        self._is_fresh = False
        return FlatStorage.of(self.flat)

    @staticmethod
    def of(tensor: torch.Tensor) -> tuple[DBuffer, int] | None:
        """The buffer that holds a DTensor's local part, and the tensor's index in it; None if none does.

        Empty local parts have no address of their own: they answer with the first tensor of equal shape of
        which this rank holds nothing.
        """
        expect(".of: tensor", tensor, torch.Tensor, "a tensor")
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        buffer = _BUFFERS.get(storage_id(local.untyped_storage()))
        return None if buffer is None else buffer._index_of(tensor, local)

    # -- shape of the buffer ---------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Ranks over which the buffer is cut."""
        return self.layout.ranks

    def __len__(self) -> int:
        return len(self.shapes)

    def __repr__(self) -> str:
        return (
            f"DBuffer({len(self)} tensors, {self.layout.shard_numel} x {self.ranks} cells of "
            f"{self.cell_bytes} bytes, {self.dtype}, {self.placements}, rank {self.rank})"
        )

    @cached_property
    def flat(self) -> torch.Tensor:
        """What this rank holds, as one flat tensor; of bytes if the dtypes differ."""
        return self.storage.tensor(self.offset_bytes, (self.nbytes // self.dtype.itemsize,), self.dtype)

    @cached_property
    def slot(self) -> torch.Tensor:
        """This rank's slot in :attr:`flat`: all of it if sharded, else its part of what is held."""
        if self.is_sharded:
            return self.flat
        held = self._whole_levels
        slots = self.flat.view(math.prod(map(self.mesh.size, held)), -1)
        return slots[self._index(held)]

    @property
    def _whole_levels(self) -> tuple[int, ...]:
        """The levels, of more than one rank, that this rank holds all slots of."""
        held = (dim for dim in self.levels if not isinstance(self.placements[dim], Shard))
        return tuple(dim for dim in held if self.mesh.size(dim) > 1)

    @property
    def _ragged_dim(self) -> int:
        """The level that cuts tensors, of a buffer that only one level cuts."""
        return next((dim for dim in self.levels if self.mesh.size(dim) > 1), self.levels[-1])

    def _index(self, dims: Sequence[int]) -> int:
        """This rank's place among the ranks of ``dims``, the last of them counting fastest."""
        index = 0
        for dim in dims:
            index = index * self.mesh.size(dim) + self.coordinate[dim]
        return index

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, or this rank's part of each: views at addresses that never change.

        One that lies in the order of its tiles is flat here, whole or not.
        """
        slots = math.prod(map(self.mesh.size, self._whole_levels))
        if not self.is_sharded and slots < self.ranks:
            raise ValueError(
                f"DBuffer: with placements {self.placements} a rank holds some of the slots; tensors are "
                "seen where all levels are sharded, or none."
            )
        return tuple(self._make_tensor(index) for index in range(len(self)))

    def tensor(self, index: int) -> torch.Tensor:
        """One of :attr:`tensors`; its bytes must exist."""
        self._check_live("tensor")
        return self.tensors[index]

    def dtensor(self, index: int) -> DTensor:
        """One tensor as a DTensor over the mesh: ragged where the buffer is sharded.

        Of a whole one that lies in the order of its tiles it is a copy in the ordinary order.
        """
        self._check_live("dtensor")
        placements = list(self.placements)
        if self.is_sharded:
            if sum(self.mesh.size(dim) > 1 for dim in self.levels) > 1:
                raise ValueError(f"DBuffer: no DTensor is ragged over {len(self.levels)} mesh dims at once.")
            placements[self._ragged_dim] = self._ragged(index)
        spec = ragged_spec(self.mesh, tuple(placements), self.shapes[index], self.dtypes[index])
        local = self.tensors[index]
        if not self.is_sharded:
            local = untiled(local, self.shapes[index], self.layout.specs[index].tile)
        return wrap_local(local, spec)

    # -- memory ----------------------------------------------------------------------------------

    def materialize(self) -> DBuffer:
        """Bring released storage back, uninitialised, on the current stream."""
        self.storage.materialize()
        return self

    def release(self) -> None:
        """Free the storage; views see new bytes after :meth:`materialize`, and must not be read before."""
        if self.pending is not None:
            self.wait()
        self.storage.release()

    @property
    def is_materialized(self) -> bool:
        """Whether the storage is allocated."""
        return self.storage.is_materialized

    # -- operations on the whole group, one kernel each -------------------------------------------

    def zero_(self) -> DBuffer:
        """Set everything, padding included, to zero."""
        self._check_live("zero_")
        self.flat.zero_()
        return self

    def mul_(self, factor: float) -> DBuffer:
        """Scale all tensors."""
        expect(".mul_: factor", factor, int | float | torch.Tensor, "a number")
        self.check_arithmetic("mul_")
        self._check_live("mul_")
        self.flat.mul_(factor)
        return self

    def add_(self, other: DBuffer, *, alpha: float = 1.0) -> DBuffer:
        """Add another buffer of the same layout and placements, in this buffer's dtype."""
        self.check_arithmetic("add_")
        self._check_fits("other", other, self.placements)
        self._check_live("add_", other)
        self.flat.add_(other.flat, alpha=alpha)
        return self

    def copy_(self, other: DBuffer, *, non_blocking: bool = False) -> DBuffer:
        """Take the values of another buffer of the same layout and placements, cast to this dtype."""
        self._check_fits("other", other, self.placements)
        self._check_live("copy_", other)
        if self.dtypes != other.dtypes and not (self.is_uniform and other.is_uniform):
            torch._foreach_copy_(list(self.tensors), list(other.tensors), non_blocking=non_blocking)
        else:
            flat = other.flat
            if self.dtype != other.dtype and self.device != other.device:  # else the host would cast
                flat = flat.to(self.device, non_blocking=non_blocking)
            self.flat.copy_(flat, non_blocking=non_blocking)
        return self

    def to(self, dtype: torch.dtype) -> DBuffer:
        """A copy in another dtype."""
        expect(".to: dtype", dtype, torch.dtype, "a torch.dtype")
        self.check_arithmetic("a cast of the whole")
        made = DBuffer(self.layout, self.shapes, self.mesh, self.placements, dtype=dtype, device=self.device)
        return made.copy_(self)

    # -- placements ------------------------------------------------------------------------------

    def redistribute(
        self,
        placements: Sequence[Placement],
        *,
        out: DBuffer | None = None,
        average: bool = False,
        async_op: bool = False,
        comm: Comm = _TORCH,
    ) -> DBuffer:
        """What this buffer holds in other placements, by one collective per mesh dim that changes.

        Args:
            placements: one per mesh dim. A tuple that a caller passes again, with an ``out`` of the same
                kind, is not checked again.
            out: receives the result, in its dtype; a buffer of this layout with these placements.
            average: reductions are means over the ranks.
            async_op: return at once; call :meth:`wait` on the result before using it.
            comm: who gathers and reduces.

        Raises:
            ValueError: no such transition, as from anything to ``Partial()``, or ``out`` does not fit.
            RuntimeError: this buffer's storage is released.
        """
        try:
            kind = None if out is None else out._kind
        except AttributeError:
            raise TypeError(f"DBuffer.redistribute: out must be a DBuffer, got {out!r}.") from None
        known = self._moves.get(kind)
        if known is None or known[0] is not placements:
            target = self._checked_target(placements, out)
            if len(self._moves) == _MOVES_KEPT:  # each ``out`` that is a new buffer is a kind of its own
                self._moves.clear()
            # by the tuple: a list that a caller changes between two calls must be read again
            known = self._moves[kind] = (target, plan_move(self, target, out))
        if self.pending is not None or not (self._is_fresh or self.storage.is_materialized):
            self._check_live("redistribute")
        if out is not None:
            if out.pending is not None:
                out.wait()
            if not (out._is_fresh or out.storage.is_materialized):
                out.materialize()
        result, works = known[1](self, out, average, async_op, comm)
        result.pending = self.pending = works or None  # it may still read this buffer
        return result

    def _checked_target(self, placements: Sequence[Placement], out: DBuffer | None) -> tuple[Placement, ...]:
        expect(".redistribute: placements", placements, Sequence, "a list, one per mesh dim")
        target = checked_placements(self.mesh, placements, self.levels)
        check_transition(self.placements, target)
        if out is not None:
            self._check_fits("out", out, target)
        return target

    def wait(self) -> DBuffer:
        """Wait for an asynchronous :meth:`redistribute` that made this buffer, or reads it."""
        if self.pending is not None:
            wait_all(self.pending)
            self.pending = None
        return self

    def with_placements(
        self, placements: Sequence[Placement], *, storage: FlatStorage | None = None, offset_bytes: int = 0
    ) -> DBuffer:
        """A buffer of the same kind under other placements, uninitialised or in an existing storage."""
        return DBuffer(
            self.layout,
            self.shapes,
            self.mesh,
            placements,
            dtype=self.dtype if self.is_uniform else self.dtypes,
            cell_bytes=self.cell_bytes,
            device=self.device,
            storage=storage,
            offset_bytes=offset_bytes,
        )

    @cached_property
    def slot_buffer(self) -> DBuffer:
        """This rank's own slot as a sharded buffer, in place."""
        placements = [Shard(0) if dim in self.levels else p for dim, p in enumerate(self.placements)]
        return self if self.is_sharded else self._inside(placements, self.slot)

    def part_as(self, dim: int, placements: Sequence[Placement]) -> DBuffer:
        """This rank's part along ``dim``, the first level that is held whole, in place, as ``placements``."""
        return self._inside(placements, self.flat.view(self.mesh.size(dim), -1)[self.coordinate[dim]])

    def now_has(self, placements: tuple[Placement, ...]) -> DBuffer:
        """Note that a collective in place has made this a buffer of other ``placements``."""
        self.placements, self._moves = placements, {}
        for made_before in ("slot_buffer", "_kind"):
            self.__dict__.pop(made_before, None)
        return self

    def _inside(self, placements: Sequence[Placement], part: torch.Tensor) -> DBuffer:
        offset = int(part.storage_offset()) * self.dtype.itemsize
        return self.with_placements(placements, storage=self.storage, offset_bytes=offset)

    # -- checks and geometry ---------------------------------------------------------------------

    def _make_tensor(self, index: int) -> torch.Tensor:
        dtype = self.dtypes[index]
        if not self.is_sharded:
            start = self.offset_bytes + self.layout.offsets[index] * self.cell_bytes
            shape = self.shapes[index]
            if self.layout.specs[index].tile is not None:
                shape = torch.Size((shape.numel(),))
            return self.storage.tensor(start, shape, dtype)
        part = self.layout.local_range(index, self.rank)
        numel = part.numel * self.cell_bytes // dtype.itemsize
        row = self.shapes[index][len(self._ragged(index).dims) :]
        rows = numel // max(1, row.numel())
        return self.storage.tensor(
            self.offset_bytes + part.shard_start * self.cell_bytes, (rows, *row), dtype
        )

    def _ragged(self, index: int) -> Any:
        cells = self.dtypes[index].itemsize // self.cell_bytes
        return placement_from_layout(self.layout.alone(index, cells), 0, self.shapes[index])

    def _index_of(self, tensor: torch.Tensor, local: torch.Tensor) -> tuple[DBuffer, int] | None:
        for index, mine in enumerate(self.tensors):
            same = mine.storage_offset() == local.storage_offset() and mine.numel() == local.numel()
            if not (same or local.numel() == mine.numel() == 0):
                continue
            if isinstance(tensor, DTensor) and self.shapes[index] != tensor.shape:
                continue
            return self, index
        return None

    def _check_fits(self, what: str, other: DBuffer, placements: tuple[Placement, ...]) -> None:
        """Raise unless ``other`` has this layout and ``placements``: a sum and its parts differ in value."""
        expect(f": {what}", other, DBuffer, "a DBuffer")
        if other.layout is not self.layout and other.layout.digest != self.layout.digest:
            raise ValueError(f"DBuffer: {what} has another layout; expected that of {self}, got {other}.")
        if other.placements != placements:
            raise ValueError(f"DBuffer: {what} has placements {other.placements}, expected {placements}.")

    def _check_live(self, what: str, *others: DBuffer) -> None:
        """Before ``what``: raise unless the bytes exist, and wait for a collective that still has them."""
        for buffer in (self, *others):
            if not (buffer._is_fresh or buffer.storage.is_materialized):
                raise RuntimeError(
                    f"DBuffer: {what} needs memory that was released; materialize() brings it back."
                )
            if buffer.pending is not None:
                buffer.wait()

    def check_arithmetic(self, what: str) -> None:
        """Raise unless all tensors have one dtype, so that the flat tensor holds numbers."""
        if not self.is_uniform:
            raise TypeError(
                f"DBuffer: {what} needs tensors of one dtype, got {sorted(set(map(str, self.dtypes)))}."
            )
