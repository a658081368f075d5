"""What a stream gathers: the buffers of a sharded model, and parameters that lie in none.

A :class:`GroupSource` gathers the shard of a group into one flat tensor, in which the outside tensors are
views: nothing is copied. A :class:`LooseSource` holds what cannot be had that way (tensor and expert
parallelism, explicit ``Shard``, several dtypes in one group, torch's FSDP, plain tensors): its tensors are
gathered one by one and copied into one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.collectives import Comm, wait_all
from ragged_fsdp.dbuffer import DBuffer
from ragged_fsdp.fsdp.parts.members import MainShard
from ragged_fsdp.fsdp.runtime.group import ParamGroup
from ragged_fsdp.fsdp.runtime.state import state_of
from ragged_fsdp.weights.buckets import Bucket, Record
from ragged_fsdp.weights.names import Naming, Part, parts_of
from ragged_fsdp.weights.targets import Target

__all__ = ["Gathered", "GroupSource", "LooseSource", "Member", "contiguous", "sent_dtype", "sources_of"]

_ALIGN_BYTES = 16
_LOOSE_BYTES = 64 << 20
_COMM = Comm()


@dataclass(frozen=True)
class Member:
    """A tensor of the model with the parts it has outside; ``start`` is its place in a group's buffer."""

    target: Target
    parts: tuple[Part, ...]
    start: int = 0


@dataclass
class Gathered:
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


def contiguous(part: Part) -> bool:
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
    model: nn.Module, targets: Sequence[Target], naming: Naming, dtype: torch.dtype | None
) -> list[GroupSource | LooseSource]:
    """The buckets of a pass, in the order in which their first tensors stand in the model."""
    places = {id(target.tensor): index for index, target in enumerate(targets)}
    members = [Member(target, _parts(naming, target)) for target in targets]
    made: list[tuple[int, GroupSource | LooseSource]] = []
    taken: set[int] = set()
    for group in _groups(model):
        group.reset_sharded_params()  # take over what a user replaced
        inside = [places.get(id(param.sharded)) for param in group.params]
        if group.params and all(i is not None for i in inside) and _is_flat(group):
            own = [i for i in inside if i is not None]
            placed = [
                Member(targets[i], members[i].parts, start)
                for i, start in zip(own, group.main.buffer.layout.offsets)  # type: ignore[union-attr]
            ]
            made.append((min(own), GroupSource(group, placed, dtype)))
            taken.update(own)
    loose: list[Member] = []
    first = 0
    for index in [i for i in range(len(targets)) if i not in taken]:
        if loose and sum(m.target.tensor.nbytes for m in loose) + targets[index].tensor.nbytes > _LOOSE_BYTES:
            made.append((first, LooseSource(loose, dtype)))
            loose = []
        first = first if loose else index
        loose.append(members[index])
    if loose:
        made.append((first, LooseSource(loose, dtype)))
    return [source for _, source in sorted(made, key=lambda pair: pair[0])]


def _groups(model: nn.Module) -> Iterator[ParamGroup]:
    seen: set[int] = set()
    for module in model.modules():
        state = state_of(module)
        if state is not None and id(state) not in seen:
            seen.add(id(state))
            yield from state.groups


def _is_flat(group: ParamGroup) -> bool:
    """Whether the gathered buffer of a group holds its parameters as they are."""
    whole = all(param.inner_spec is None for param in group.params)
    return whole and isinstance(group.main, MainShard) and group.main.buffer is not None


def _parts(naming: Naming, target: Target) -> tuple[Part, ...]:
    parts = parts_of(naming, target.name, tuple(target.tensor.shape), target.tensor.dtype)
    for part in parts:
        if part.index != ():
            raise ValueError(
                f"{target.name}: names= puts it into a part of {part.stored!r}; that is for load"
            )
    return tuple(parts)


class GroupSource:
    """The parameters of one group, which lie in one flat buffer when it is gathered."""

    def __init__(self, group: ParamGroup, members: list[Member], dtype: torch.dtype | None) -> None:
        self._group = group
        self.members = members
        self.label = group.label
        buffer = self.shard_buffer()
        self.layout = buffer.layout
        self.dtype = sent_dtype(buffer.dtype, dtype)
        self.device = group.device
        self.process_group: dist.ProcessGroup = group.mesh.shard_group
        item = self.dtype.itemsize
        self.records: list[Record] = []
        self.copied: list[tuple[Member, int]] = []
        """Parts that are no runs of the buffer."""
        for member in members:
            for index, part in enumerate(member.parts):
                if contiguous(part):
                    start = member.start + part.view.offset  # type: ignore[union-attr]
                    self.records.append(Record(part.stored, self.dtype, part.shape, start * item))
                else:
                    self.copied.append((member, index))

    def shard_buffer(self) -> DBuffer:
        """This rank's shard; another object after parameters were cast or moved."""
        buffer = self._group.main.buffer  # type: ignore[union-attr]
        assert buffer is not None
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of the gathered buffer."""
        return self.layout.buffer_numel * self.dtype.itemsize

    def snapshot(self) -> Tensor:
        """A copy of this rank's shard, in the dtype that is sent."""
        return self.shard_buffer().flat.detach().to(self.device, self.dtype, copy=True)

    def allocate(self) -> Tensor:
        """Memory of one gather, on the current stream."""
        return torch.empty(self.layout.buffer_numel, dtype=self.dtype, device=self.device)

    def gather(self, flat: Tensor, shard: Tensor | None, side: Any, group: dist.ProcessGroup) -> Gathered:
        """Start to gather into ``flat``; ``side`` is the stream it runs on, of devices that have streams."""
        source = self.shard_buffer().flat.detach() if shard is None else shard
        numel, work, event = self.layout.shard_numel, None, None
        slot = flat.narrow(0, group.rank() * numel, numel)
        if side is None:
            slot.copy_(source)
            if group.size() > 1:
                work = _COMM.gather(flat, slot, group, async_op=True)
        else:
            side.wait_stream(torch.get_device_module(self.device).current_stream(self.device))
            with torch.get_device_module(self.device).stream(side):
                slot.copy_(source, non_blocking=True)
                if group.size() > 1:
                    _COMM.gather(flat, slot, group)
            event = side.record_event()
        return Gathered(flat, work, event, source)

    def buckets(self, flat: Tensor, naming: Naming) -> list[Bucket]:
        """The gathered buffer as a bucket, and behind it one of parts that had to be copied, if any."""
        made = [Bucket(self.label, flat.view(torch.uint8), self.records)] if self.records else []
        if self.copied:
            values = []
            for member, index in self.copied:
                shape = tuple(member.target.tensor.shape)
                whole = flat.narrow(0, member.start, math.prod(shape)).view(shape)
                values.append((member.parts[index].stored, _outside(naming, member, whole)[index]))
            made.append(packed(self.label, values))
        return made


class LooseSource:
    """Tensors that are gathered one by one."""

    def __init__(self, members: list[Member], dtype: torch.dtype | None) -> None:
        self.members = members
        self.label = members[0].target.name
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the bucket."""
        kinds = [(member.target.tensor, self.sent(member)) for member in self.members]
        return sum(tensor.numel() * dtype.itemsize for tensor, dtype in kinds)

    def sent(self, member: Member) -> torch.dtype:
        """The dtype in which a tensor is sent."""
        return sent_dtype(member.target.tensor.dtype, self._dtype)

    def bucket(self, tensors: Sequence[Tensor], naming: Naming) -> Bucket:
        """The bucket, filled from ``tensors`` one by one: those that are sharded are gathered here."""
        values = []
        for member, tensor in zip(self.members, tensors):
            whole = tensor.detach()
            whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
            whole = whole.to(self.sent(member))
            values += [(p.stored, v) for p, v in zip(member.parts, _outside(naming, member, whole))]
        return packed(self.label, values)


def _outside(naming: Naming, member: Member, whole: Tensor) -> list[Tensor]:
    """The parts of a gathered tensor, in the order of ``member.parts``."""
    given = naming(member.target.name, whole)
    return [whole] if isinstance(given, str) else list(given.values())


def packed(label: str, values: Sequence[tuple[str, Tensor]]) -> Bucket:
    """A bucket of copies, each at a multiple of 16 bytes."""
    records, end = [], 0
    for name, value in values:
        records.append(Record(name, value.dtype, tuple(value.shape), end))
        end += -(-records[-1].nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
    device = values[0][1].device
    data = torch.empty(end, dtype=torch.uint8, device=device)
    for record, (_, value) in zip(records, values):
        record.of(data).copy_(value)
    return Bucket(label, data, tuple(records))
