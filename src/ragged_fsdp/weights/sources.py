"""What a stream gathers: the buffers of a sharded model, and parameters that lie in none.

A :class:`GroupSource` gathers the shard of a group into one flat tensor, in which the outside tensors are
views: nothing is copied. A :class:`CodedSource` does so with float8 codes, made by whoever holds a block. A
:class:`LooseSource` holds what cannot be had that way (tensor and expert parallelism, tiles, explicit
``Shard``, item sizes that the group was not planned for, quantised weights, which are decoded, torch's FSDP,
plain tensors): its tensors are gathered one by one and, unless there is only one, copied into one run.

What adapters add to a weight is added by the ranks that hold it, before the gather.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.collectives import Comm, all_reduce_, wait_all
from ragged_fsdp.fsdp.parts.members import MainShard
from ragged_fsdp.fsdp.parts.plan import ChunkPlan
from ragged_fsdp.fsdp.runtime.group import ParamGroup
from ragged_fsdp.layout import ALIGN_BYTES, align_up
from ragged_fsdp.packing import value_meta, values_of
from ragged_fsdp.torch_internals import local_of, storage_id
from ragged_fsdp.weights.adapters import Addition, added
from ragged_fsdp.weights.buckets import Bucket, Record
from ragged_fsdp.weights.names import Naming, OutsidePart, parts_of
from ragged_fsdp.weights.targets import Target, groups_of

__all__ = [
    "GroupSource",
    "LooseSource",
    "ModelTensor",
    "PendingGather",
    "contiguous",
    "member_of",
    "sent_dtype",
    "sources_of",
    "whole_of",
]

Owner = tuple[ParamGroup, int]
"""Where a parameter is: its group, and its number there."""

_LOOSE_BYTES = 64 << 20
_COMM = Comm()


@dataclass(frozen=True)
class ModelTensor:
    """A tensor of the model with the parts it has outside, and what adapters add to it."""

    target: Target
    parts: tuple[OutsidePart, ...]
    additions: tuple[Addition, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """The shape of the values: that of the weight where the tensor is the bytes of its codes."""
        return value_meta(self.target.tensor)[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values: that of the weight where the tensor is the bytes of its codes."""
        return value_meta(self.target.tensor)[1]

    @property
    def row_numel(self) -> int:
        """Elements of a row."""
        return max(1, math.prod(self.shape[1:]))


@dataclass
class PendingGather:
    """A gather under way: ``wait`` lets the current stream use what it brings."""

    flat: Tensor
    work: Any = None
    event: Any = None
    source: Any = None
    """Memory that the gather reads."""

    def wait(self) -> Tensor:
        """The gathered elements."""
        wait_all(self.work)
        if self.event is not None:
            self.event.wait()  # else memory would be read, or go back, below the collective
        self.work = self.event = self.source = None
        return self.flat


def sent_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Integers and one-byte floats are sent as they are."""
    return dtype if wanted is None or not dtype.is_floating_point or dtype.itemsize == 1 else wanted


def contiguous(part: OutsidePart) -> bool:
    """Whether an outside tensor is a run of the model's."""
    if part.view is None:
        return False
    step = 1
    for size, stride in zip(reversed(part.view.sizes), reversed(part.view.strides)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def sources_of(
    model: nn.Module, members: Sequence[ModelTensor], dtype: torch.dtype | None, *, one_dtype: bool = False
) -> list[GroupSource | LooseSource]:
    """The buckets of a pass, in the order in which their first tensors stand in the model.

    ``one_dtype`` lets a group be gathered as a whole only if all of it is sent in one.
    """
    places = {id(member.target.tensor): index for index, member in enumerate(members)}
    made: list[tuple[int, GroupSource | LooseSource]] = []
    taken: set[int] = set()
    owners: dict[int, Owner] = {}
    for group in groups_of(model):
        group.reset_sharded_params()  # take over what a user replaced
        if _is_flat(group):
            owners.update((id(param.sharded), (group, i)) for i, param in enumerate(group.params))
        inside = [places.get(id(param.sharded)) for param in group.params]
        own = [index for index in inside if index is not None and members[index].parts]
        if not own or None in inside or any(param.packing is not None for param in group.params):
            continue  # codes are decoded one weight at a time
        mine = [members[index] for index in inside if index is not None]
        sent = [sent_dtype(member.target.tensor.dtype, dtype) for member in mine]
        if _cell_bytes(group, sent) is None or (one_dtype and len(set(sent)) > 1):
            continue
        made.append((min(own), GroupSource(group, mine, sent, owners)))
        taken.update(own)
    loose: list[ModelTensor] = []
    first = 0
    for index in [i for i in range(len(members)) if i not in taken and members[i].parts]:
        nbytes = _value_bytes(members[index])
        if loose and sum(map(_value_bytes, loose)) + nbytes > _LOOSE_BYTES:
            made.append((first, LooseSource(loose, dtype)))
            loose = []
        first = first if loose else index
        loose.append(members[index])
    if loose:
        made.append((first, LooseSource(loose, dtype)))
    return [source for _, source in sorted(made, key=lambda pair: pair[0])]


def _value_bytes(member: ModelTensor) -> int:
    return member.shape.numel() * member.dtype.itemsize


def _is_flat(group: ParamGroup) -> bool:
    """Whether a rank's part of each parameter is a run of its elements, in row-major order."""
    whole = all(param.inner_spec is None for param in group.params)
    in_rows = not any(spec.tile for spec in group.plan.layout.specs)
    return whole and in_rows and isinstance(group.main, MainShard) and not isinstance(group.plan, ChunkPlan)


def _cell_bytes(group: ParamGroup, sent: Sequence[torch.dtype]) -> int | None:
    """Bytes of a cell of the group's layout in a buffer of what is sent; None if there is no such buffer."""
    plan, sizes = group.plan, [dtype.itemsize for dtype in sent]
    if not _is_flat(group):
        return None
    if plan.same_items:
        return sizes[0] if len(set(sizes)) == 1 else None
    return plan.cell_bytes if sizes == list(plan.item_bytes) else None


def member_of(target: Target, naming: Naming, additions: tuple[Addition, ...] = ()) -> ModelTensor:
    """A tensor of the model with its parts outside."""
    shape, dtype = value_meta(target.tensor)
    parts = parts_of(naming, target.name, tuple(shape), dtype)
    for part in parts:
        if part.index != ():
            raise ValueError(
                f"{target.name}: names= puts it into a part of {part.stored!r}; that is for load"
            )
    return ModelTensor(target, tuple(parts), additions)


class GroupSource:
    """The parameters of one group, which lie in one flat buffer when it is gathered."""

    def __init__(
        self,
        group: ParamGroup,
        members: list[ModelTensor],
        sent: Sequence[torch.dtype],
        owners: Mapping[int, Owner],
    ) -> None:
        self.group = group
        self.receiver: int | None = None
        """The rank of the group that gets what is gathered, -1 if it is in another group; None for all."""
        self.owners = owners
        """By id of any parameter of the model: adapters may lie in other groups."""
        self.members = members
        self.sent = tuple(sent)
        """The dtype in which each tensor is sent."""
        self.label = group.label
        self.layout = group.plan.layout
        self.device = group.device
        self.process_group: dist.ProcessGroup = group.mesh.shard_group
        cell_bytes = _cell_bytes(group, sent)
        assert cell_bytes is not None
        self.dtype = self.sent[0] if len(set(self.sent)) == 1 else torch.uint8
        """The dtype of the buffer: bytes where tensors are sent in several dtypes."""
        self._per_cell = cell_bytes // self.dtype.itemsize
        self.shard_numel = self.layout.shard_numel * self._per_cell
        self._starts = [offset * cell_bytes for offset in self.layout.offsets]
        self.records: list[Record] = []
        self.copied: list[tuple[int, int]] = []
        """Parts that are no runs of the buffer: member and part."""
        for place, (member, kind, start) in enumerate(zip(members, self.sent, self._starts)):
            for index, part in enumerate(member.parts):
                if contiguous(part):
                    first = start + part.view.offset * kind.itemsize  # type: ignore[union-attr]
                    self.records.append(Record(part.stored, kind, part.shape, first))
                else:
                    self.copied.append((place, index))

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.layout.ranks * self.shard_bytes

    @property
    def shard_bytes(self) -> int:
        """Bytes of a rank's part of the gathered buffer."""
        return self.shard_numel * self.dtype.itemsize

    def empty_shard(self) -> Tensor:
        """Memory of one rank's part of the buffer."""
        return torch.empty(self.shard_numel, dtype=self.dtype, device=self.device)

    def fill(self, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        """This rank's parameters as they are sent, written to ``shard``; ``group`` is asked for adapters."""
        main: Any = self.group.main
        if main.buffer is not None:
            shard.copy_(main.buffer.flat.detach(), non_blocking=True)
        else:
            shard.zero_()  # of padding all ranks have the same bits
            for index in range(len(self.members)):
                self._slot(shard, index).copy_(main.pieces[index].detach(), non_blocking=True)
        if any(member.additions for member in self.members):
            self._add(shard, group)
        return shard

    def _slot(self, shard: Tensor, index: int) -> Tensor:
        """Where this rank's part of a tensor lies in its shard."""
        cells = self.group.plan.layout.local_range(index, self.group.mesh.shard_rank)
        count = self.group.main.pieces[index].numel()
        first = cells.shard_start * self._per_cell * self.dtype.itemsize
        kind = self.sent[index]
        return shard.view(torch.uint8).narrow(0, first, count * kind.itemsize).view(kind)

    def _add(self, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Add what adapters add to this rank's part."""
        whole = self._factors(group)
        for index, member in enumerate(self.members):
            piece = self.group.main.pieces[index].detach().to(self.device)
            if member.additions and piece.numel():
                start = self.group.plan.local_range(index, self.group.mesh.shard_rank).tensor_start
                given = [(a, [whole[id(f)] for f in a.factors]) for a in member.additions]
                self._slot(shard, index).copy_(added(piece, given, start, member.row_numel))

    def _factors(self, group: dist.ProcessGroup) -> dict[int, Tensor]:
        """The adapters' matrices, whole: by one sum of zeros and what each rank of the group holds."""
        wanted = {id(f): f for m in self.members for a in m.additions for f in a.factors}
        shared = [key for key in wanted if self._shares_ranks(key)]
        sizes = [align_up(wanted[key].nbytes, ALIGN_BYTES) for key in shared]
        flat = torch.zeros(sum(sizes), dtype=torch.uint8, device=self.device)
        found: dict[int, Tensor] = {}
        for key, space in zip(shared, flat.split(sizes) if sizes else ()):
            owner, index = self.owners[key]
            whole = space[: wanted[key].nbytes].view(wanted[key].dtype)
            piece = owner.main.pieces[index].detach()
            first = owner.plan.local_range(index, owner.mesh.shard_rank).tensor_start
            whole[first : first + piece.numel()] = piece.to(self.device)
            found[key] = whole.view(wanted[key].shape)
        if len(flat) and group.size() > 1:
            all_reduce_(flat.view(torch.int32), group, op=dist.ReduceOp.SUM)  # as integers: exact to the bit
        return {key: found[key] if key in found else whole_of(tensor) for key, tensor in wanted.items()}

    def _shares_ranks(self, key: int) -> bool:
        """Whether a parameter is cut over the ranks of this group."""
        owner = self.owners.get(key)
        return owner is not None and owner[0].mesh.shard_group == self.process_group

    @property
    def receives(self) -> bool:
        """Whether this rank gets what is gathered."""
        return self.receiver is None or self.process_group.rank() == self.receiver

    def allocate(self) -> Tensor:
        """Memory of one gather, on the current stream."""
        if not self.receives:
            return self.empty_shard()
        numel = self.layout.ranks * self.shard_numel
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def gather(
        self, flat: Tensor, shard: Tensor | None, side: Any, group: dist.ProcessGroup
    ) -> PendingGather:
        """Start to gather into ``flat``; ``side`` is the stream it runs on, of devices that have streams."""
        if side is None:
            return PendingGather(flat, self._gather(flat, shard, group, async_op=True), None, shard)
        module = torch.get_device_module(self.device)
        side.wait_stream(module.current_stream(self.device))
        with module.stream(side):
            self._gather(flat, shard, group, async_op=False)
        return PendingGather(flat, None, side.record_event(), shard)

    def _gather(self, flat: Tensor, shard: Tensor | None, group: dist.ProcessGroup, *, async_op: bool) -> Any:
        slot = flat.narrow(0, group.rank() * self.shard_numel, self.shard_numel) if self.receives else flat
        if shard is None:
            self.fill(slot, group)
        else:
            slot.copy_(shard, non_blocking=True)
        return self.bring(flat, slot, group, async_op=async_op)

    def bring(self, flat: Tensor, slot: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> Any:
        """Gather the slots of all ranks into ``flat``: on every rank, or on the one that receives."""
        if group.size() == 1 or self.receiver == -1:
            return None
        if self.receiver is None:
            return _COMM.gather(flat, slot, group, async_op=async_op)
        parts = list(flat.view(torch.uint8).chunk(group.size())) if self.receives else None
        sent = slot.view(torch.uint8)
        return dist.gather(sent, parts, group=group, group_dst=self.receiver, async_op=async_op)

    def buckets(self, flat: Tensor, naming: Naming) -> list[Bucket]:
        """The gathered buffer as a bucket, and behind it one of parts that had to be copied, if any."""
        if not self.receives:
            return [Bucket(self.label, flat[:0].view(torch.uint8), ())]
        made = [Bucket(self.label, flat.view(torch.uint8), self.records)] if self.records else []
        if self.copied:
            values = []
            for place, index in self.copied:
                member, kind = self.members[place], self.sent[place]
                shape = tuple(member.target.tensor.shape)
                whole = Record("", kind, shape, self._starts[place]).of(flat.view(torch.uint8))
                values.append((member.parts[index].stored, _outside(naming, member, whole)[index]))
            made.append(packed(self.label, values))
        return made


class LooseSource:
    """Tensors that are gathered one by one."""

    def __init__(self, members: list[ModelTensor], dtype: torch.dtype | None) -> None:
        self.members = members
        self.tensors = [member.target.tensor for member in members]
        """What is gathered: what the model held when it was last looked at, or copies of that."""
        self.label = members[0].target.name
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket."""
        return sum(member.shape.numel() * self.sent(member).itemsize for member in self.members)

    def sent(self, member: ModelTensor) -> torch.dtype:
        """The dtype in which a tensor is sent."""
        return sent_dtype(member.dtype, self._dtype)

    def found(self, held: Mapping[str, Tensor]) -> list[Tensor]:
        """What is held now under the names of the members; ``ValueError`` if it has another shape."""
        found = []
        for member in self.members:
            tensor = held.get(member.target.name)
            expected = tuple(member.target.tensor.shape)
            shape = None if tensor is None else tuple(tensor.shape)
            if tensor is None or shape != expected:
                raise ValueError(
                    f"stream: {member.target.name} had the shape {expected} when the stream was made, now it "
                    f"has {shape}; make the stream again"
                )
            found.append(tensor)
        return found

    def bucket(self, naming: Naming) -> Bucket:
        """The bucket, filled one by one: tensors that are sharded are gathered here."""
        values = []
        for member, tensor in zip(self.members, self.tensors):
            whole = values_of(member.target.tensor, whole_of(tensor))
            if member.additions:
                given = [(a, [whole_of(f) for f in a.factors]) for a in member.additions]
                whole = added(whole.reshape(-1), given, 0, member.row_numel).view(whole.shape)
            whole = whole.to(self.sent(member))
            if len(self.members) == 1 and whole.is_contiguous() and all(map(contiguous, member.parts)):
                return self._as_it_is(member, whole.clone() if _shares_memory(whole, tensor) else whole)
            values += [(p.stored, v) for p, v in zip(member.parts, _outside(naming, member, whole))]
        return packed(self.label, values)

    def _as_it_is(self, member: ModelTensor, whole: Tensor) -> Bucket:
        """The bucket of one tensor whose parts are runs of it: no second copy."""
        item, records = whole.dtype.itemsize, []
        for part in member.parts:
            assert part.view is not None
            records.append(Record(part.stored, whole.dtype, part.shape, part.view.offset * item))
        return Bucket(self.label, whole.view(-1).view(torch.uint8), records)


def _shares_memory(whole: Tensor, tensor: Tensor) -> bool:
    """Whether what was gathered is the model's own memory, as of a tensor that one rank holds."""
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    return storage_id(whole.untyped_storage()) == storage_id(local.untyped_storage())


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered if it is sharded."""
    whole = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def _outside(naming: Naming, member: ModelTensor, whole: Tensor) -> list[Tensor]:
    """The parts of a gathered tensor, in the order of ``member.parts``."""
    given = naming(member.target.name, whole)
    return [whole] if isinstance(given, str) else list(given.values())


def packed(label: str, values: Sequence[tuple[str, Tensor]]) -> Bucket:
    """A bucket of copies, each at a multiple of 16 bytes."""
    records, end = [], 0
    for name, value in values:
        records.append(Record(name, value.dtype, tuple(value.shape), end))
        end += align_up(records[-1].nbytes, ALIGN_BYTES)
    device = values[0][1].device
    data = torch.empty(end, dtype=torch.uint8, device=device)
    for record, (_, value) in zip(records, values):
        record.of(data).copy_(value)
    return Bucket(label, data, tuple(records))
