"""DBuffer: tensors of a group as slices of one distributed buffer.

The buffer is a flat global array of ``ranks * shard_numel`` cells whose tensors lie where a
:class:`~ragged_fsdp.layout.GroupLayout` puts them. It has one placement per mesh dim, as a DTensor
has; the array as a whole is cut evenly, so ``Shard(0)`` is its sharded placement, while the tensors
inside are ragged::

    layout             a a a a a a a a|a a c c c c c .|b b b b b b . .
    Shard(0)  rank 1                   a a c c c c c .                    S cells
    Replicate rank 1   a a a a a a a a|a a c c c c c .|b b b b b b . .    m S cells
    Partial   rank 1   the same shape; the value is the sum over the ranks

``redistribute`` is the only dispatcher; :mod:`ragged_fsdp.dbuffer.redistribute` has its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dbuffer.checks import (
    check_arguments,
    check_group,
    check_tensors,
    check_transition,
    checked_placements,
    common_dtype,
    device_of,
    expect,
    in_elements,
    wait_all,
)
from ragged_fsdp.dbuffer.redistribute import redistribute
from ragged_fsdp.dbuffer.registry import attached_buffer, buffer_of_storage, register
from ragged_fsdp.dbuffer.storage import FlatStorage, debug_enabled
from ragged_fsdp.dtensor import ragged_spec, wrap_local
from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.placement import block_numel, placement_from_layout
from ragged_fsdp.planner import plan_group
from ragged_fsdp.policy import Elements, Granularity

__all__ = ["DBuffer"]

_ALIGN_BYTES = 16
_KIND = (
    "layout",
    "shapes",
    "mesh",
    "dtypes",
    "dtype",
    "cell_bytes",
    "placements",
    "device",
    "group",
    "rank",
    "nbytes",
    "pin_memory",
)


class DBuffer:
    """A group of tensors in one buffer over a mesh.

    Args:
        layout: where the tensors lie; ``layout.ranks`` is the size of the sharding mesh dim.
        shapes: the shape of each tensor, in the order of ``layout.specs``.
        mesh: the mesh; its last dim shards.
        placements: one per mesh dim: ``Shard(0)``, ``Replicate()`` or ``Partial()`` for the last,
            ``Replicate()`` or ``Partial()`` for the others. Default: replicated, and sharded last.
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
        self.dtype = dtype if isinstance(dtype, torch.dtype) else common_dtype(self.dtypes)
        self.cell_bytes = cell_bytes or self.dtype.itemsize
        self.placements = checked_placements(self.mesh, placements)
        self.device = torch.device(device) if device is not None else device_of(mesh)
        check_tensors(layout, self.shapes, self.dtypes, self.cell_bytes, mesh)
        self.group = mesh.get_group(mesh.ndim - 1)
        self.rank = mesh.get_local_rank(mesh.ndim - 1)
        numel = layout.shard_numel if self.is_sharded else layout.buffer_numel
        self.nbytes = numel * self.cell_bytes
        self.offset_bytes = offset_bytes
        self.pin_memory = pin_memory
        self.storage = storage or FlatStorage(
            self.nbytes, self.device, pin_memory=pin_memory, allocate=allocate
        )
        self._pending: Any = None
        if storage is None:
            register(self, self.storage.untyped)

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
        blocks = {} if granularity is None else granularity
        dtype = check_group(tensors, blocks, mesh)
        specs = tuple(
            TensorSpec(name, tensor.numel(), block_numel(tensor.shape, blocks.get(name, Elements())))
            for name, tensor in tensors.items()
        )
        align = max(1, _ALIGN_BYTES // dtype.itemsize)
        layout = plan_group(specs, mesh.size(mesh.ndim - 1), unit=unit, align=align)
        buffer = cls(layout, [t.shape for t in tensors.values()], mesh, dtype=dtype)
        buffer.zero_()
        for index, tensor in enumerate(tensors.values()):
            part = layout.local_range(index, buffer.rank)
            flat = tensor.detach().reshape(-1)[part.tensor_start : part.tensor_start + part.numel]
            buffer.tensor(index).view(-1).copy_(flat)
        return buffer

    def empty_like(self) -> DBuffer:
        """A new, uninitialised buffer of the same kind; nothing is checked again."""
        made = object.__new__(DBuffer)
        made.__dict__.update(self._kind)
        numel = self.nbytes // self.dtype.itemsize
        made.flat = torch.empty(numel, dtype=self.dtype, device=self.device, pin_memory=self.pin_memory)
        register(made, made.flat.untyped_storage())
        return made

    @cached_property
    def _kind(self) -> dict[str, Any]:
        """The attributes that buffers of one kind share."""
        return {name: self.__dict__[name] for name in _KIND} | {"offset_bytes": 0, "_pending": None}

    @cached_property
    def storage(self) -> FlatStorage:
        """The memory; of a buffer from :meth:`empty_like` it is described when it is first asked for."""
        return FlatStorage.of(self.flat, debug=debug_enabled())

    @staticmethod
    def of(tensor: torch.Tensor) -> tuple[DBuffer, int] | None:
        """The buffer that holds a DTensor's local part, and the tensor's index in it; None if none does.

        Empty local parts have no address of their own: they answer with the first tensor of equal
        placement and shape.
        """
        expect(".of: tensor", tensor, torch.Tensor, "a tensor")
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        buffer = attached_buffer(tensor) or buffer_of_storage(local.untyped_storage())
        if buffer is None:
            return None
        return buffer._index_of(tensor, local)

    # -- shape of the buffer ---------------------------------------------------------------------

    @property
    def is_sharded(self) -> bool:
        """Whether a rank holds its shard only."""
        return isinstance(self.placements[-1], Shard)

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
        """This rank's shard of :attr:`flat`: all of it if sharded, else its part of the whole."""
        if self.is_sharded:
            return self.flat
        shard_numel = self.flat.numel() // self.ranks
        return self.flat.narrow(0, self.rank * shard_numel, shard_numel)

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors, or this rank's part of each: views at addresses that never change."""
        return tuple(self._make_tensor(index) for index in range(len(self)))

    def tensor(self, index: int) -> torch.Tensor:
        """One of :attr:`tensors`; its bytes must exist."""
        self._check_live("tensor")
        return self.tensors[index]

    def dtensor(self, index: int, *, requires_grad: bool = False) -> DTensor:
        """One tensor as a DTensor over the mesh: ragged where the buffer is sharded."""
        self._check_live("dtensor")
        placements = list(self.placements)
        if self.is_sharded:
            placements[-1] = self._ragged(index)
        spec = ragged_spec(self.mesh, tuple(placements), self.shapes[index], self.dtypes[index])
        return wrap_local(self.tensors[index], spec, requires_grad=requires_grad)

    # -- memory ----------------------------------------------------------------------------------

    def materialize(self) -> DBuffer:
        """Bring released storage back, uninitialised, on the current stream."""
        self.storage.materialize()
        return self

    def release(self) -> None:
        """Free the storage; views see new bytes after :meth:`materialize`, and must not be read before."""
        if self._pending is not None:
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
        self._check_same_shape(other)
        self._check_live("add_", other)
        self.flat.add_(other.flat, alpha=alpha)
        return self

    def copy_(self, other: DBuffer, *, non_blocking: bool = False) -> DBuffer:
        """Take the values of another buffer of the same layout and placements, cast to this dtype."""
        self._check_same_shape(other)
        self._check_live("copy_", other)
        if self.dtypes == other.dtypes or (self._is_uniform and other._is_uniform):
            self.flat.copy_(other.flat, non_blocking=non_blocking)
        else:
            torch._foreach_copy_(list(self.tensors), list(other.tensors), non_blocking=non_blocking)
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
    ) -> DBuffer:
        """The same buffer in other placements, by one collective per mesh dim that changes.

        Args:
            placements: one per mesh dim.
            out: receives the result, in its dtype; a buffer of this layout with these placements.
            average: reductions are means over the ranks.
            async_op: return at once; call :meth:`wait` on the result before using it.

        Raises:
            ValueError: no such transition, as from anything to ``Partial()``, or ``out`` does not fit.
            RuntimeError: this buffer's storage is released.
        """
        expect(".redistribute: placements", placements, Sequence, "a list, one per mesh dim")
        target = checked_placements(self.mesh, placements)
        check_transition(self.placements, target)
        self._check_live("redistribute")
        if out is not None:
            self._check_out(out, target)
            out.wait().materialize()
        result, works = redistribute(self, target, out, average, async_op)
        result._pending = self._pending = works  # it may still read this buffer
        return result

    def wait(self) -> DBuffer:
        """Wait for an asynchronous :meth:`redistribute` that made this buffer, or reads it."""
        wait_all(self._pending or [])
        self._pending = None
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
            dtype=self.dtype if self._is_uniform else self.dtypes,
            cell_bytes=self.cell_bytes,
            device=self.device,
            storage=storage,
            offset_bytes=offset_bytes,
        )

    @cached_property
    def slot_buffer(self) -> DBuffer:
        """This rank's shard of a full buffer, in place."""
        return self if self.is_sharded else self.slot_as((*self.placements[:-1], Shard(0)))

    def slot_as(self, placements: Sequence[Placement]) -> DBuffer:
        """This rank's slot as a buffer with ``placements``, in place."""
        offset = int(self.slot.storage_offset()) * self.dtype.itemsize
        return self.with_placements(placements, storage=self.storage, offset_bytes=offset)

    @property
    def slot_tensors(self) -> tuple[torch.Tensor, ...]:
        """This rank's part of each tensor, in its slot."""
        return self.slot_buffer.tensors

    # -- checks and geometry ---------------------------------------------------------------------

    @property
    def _is_uniform(self) -> bool:
        return len(set(self.dtypes)) <= 1

    def _make_tensor(self, index: int) -> torch.Tensor:
        dtype = self.dtypes[index]
        if not self.is_sharded:
            start = self.offset_bytes + self.layout.offsets[index] * self.cell_bytes
            return self.storage.tensor(start, self.shapes[index], dtype)
        part = self.layout.local_range(index, self.rank)
        numel = part.numel * self.cell_bytes // dtype.itemsize
        row = self.shapes[index][len(self._ragged(index).dims) :]
        rows = numel // max(1, row.numel())
        return self.storage.tensor(
            self.offset_bytes + part.shard_start * self.cell_bytes, (rows, *row), dtype
        )

    def _ragged(self, index: int) -> Any:
        itemsize = self.dtypes[index].itemsize
        return placement_from_layout(
            in_elements(self.layout, index, self.cell_bytes, itemsize), 0, self.shapes[index]
        )

    def _index_of(self, tensor: torch.Tensor, local: torch.Tensor) -> tuple[DBuffer, int] | None:
        for index, mine in enumerate(self.tensors):
            same = mine.storage_offset() == local.storage_offset() and mine.numel() == local.numel()
            if not (same or local.numel() == mine.numel() == 0):
                continue
            if isinstance(tensor, DTensor) and self.shapes[index] != tensor.shape:
                continue
            return self, index
        return None

    def _check_same_shape(self, other: DBuffer) -> None:
        expect(": other", other, DBuffer, "a DBuffer")
        if other.layout is not self.layout and other.layout.digest != self.layout.digest:
            raise ValueError("DBuffer: the buffers have different layouts.")
        if other.placements != self.placements:  # a sum and its parts are different values
            raise ValueError(f"DBuffer: placements {other.placements} do not match {self.placements}.")

    def _check_out(self, out: DBuffer, target: tuple[Placement, ...]) -> None:
        expect(".redistribute: out", out, DBuffer, "a DBuffer")
        if out.layout is not self.layout and out.layout.digest != self.layout.digest:
            raise ValueError("DBuffer: out has another layout than the buffer that is redistributed.")
        if out.placements != target:
            raise ValueError(f"DBuffer: out has placements {out.placements}, expected {target}.")

    def _check_live(self, what: str, *others: DBuffer) -> None:
        """Before ``what``: raise unless the bytes exist, and wait for a collective that still has them."""
        for buffer in (self, *others):
            if not buffer.is_materialized:
                raise RuntimeError(
                    f"DBuffer: {what} needs memory that was released; materialize() brings it back."
                )
            buffer.wait()

    def check_arithmetic(self, what: str) -> None:
        """Raise unless all tensors have one dtype, so that the flat tensor holds numbers."""
        if not self._is_uniform:
            raise TypeError(
                f"DBuffer: {what} needs tensors of one dtype, got {sorted(set(map(str, self.dtypes)))}."
            )
