"""A group whose matrices are gathered as float8 codes, made before the gather by the ranks that hold them.

A block's scale depends on its own elements alone. So where no shard boundary cuts a block of 128 x 128, which
means that boundaries fall between bands of 128 rows or between matrices, each rank codes what it holds, and
the bits are those of coding the whole weight. One byte per element travels instead of two or four::

    data    | codes, each where its element is in the group's layout | scales, and tensors without codes |
              gathered                                                 summed: a rank has its part, and zeros
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ragged_fsdp.collectives import all_reduce_
from ragged_fsdp.layout import ALIGN_BYTES, align_up
from ragged_fsdp.weights.buckets import Bucket, Record
from ragged_fsdp.weights.codes import BLOCK, IsCoded, block_fp8, encoded_records, is_coded_record
from ragged_fsdp.weights.names import Naming
from ragged_fsdp.weights.sources import GroupSource, LooseSource

__all__ = ["CodedSource", "coded_where_held"]

_MOST_OTHERS = 8


def coded_where_held(source: GroupSource | LooseSource, is_coded: IsCoded) -> GroupSource | LooseSource:
    """The source, coded by the ranks before it is gathered if no boundary between them cuts a block.

    Tensors that are not coded travel twice, in a sum: they may have an eighth of the bytes of the codes.
    """
    if not isinstance(source, GroupSource) or source.copied or source.dtype == torch.uint8:
        return source
    coded = [record for record in source.records if is_coded_record(record, is_coded)]
    codes = sum(record.nbytes // source.dtype.itemsize for record in coded)
    others = sum(record.nbytes for record in source.records) - codes * source.dtype.itemsize
    if not coded or others * _MOST_OTHERS > codes or any(_is_cut(source, record) for record in coded):
        return source
    return CodedSource(source, is_coded)


def _is_cut(source: GroupSource, record: Record) -> bool:
    """Whether a boundary between two ranks cuts one of the tensor's blocks."""
    start, band = record.offset // source.dtype.itemsize, BLOCK * record.shape[1]
    numel, shard = record.nbytes // source.dtype.itemsize, source.shard_numel
    first = (start // shard + 1) * shard
    return any((boundary - start) % band for boundary in range(first, start + numel, shard))


@dataclass(frozen=True)
class _Held:
    """Elements of the group's layout that this rank holds of one tensor: from ``low`` to ``high``."""

    record: Record
    low: int
    high: int
    start: int
    """Where the tensor begins in the layout."""


class CodedSource(GroupSource):
    """The parameters of one group as codes; see the drawing above."""

    def __init__(self, plain: GroupSource, is_coded: IsCoded) -> None:
        super().__init__(plain.group, plain.members, plain.sent, plain.owners)
        self._codes_bytes = align_up(self.layout.ranks * self.shard_numel, ALIGN_BYTES)
        self._held = [held for record in self.records for held in self._part(record)]
        self._runs = _joined([held for held in self._held if is_coded_record(held.record, is_coded)])
        self._others = [held for held in self._held if not is_coded_record(held.record, is_coded)]
        self._behind: dict[str, Record] = {}
        end, records = self._codes_bytes, []
        for record in self.records:
            made = encoded_records(record, is_coded)
            if len(made) == 2:
                records.append(Record(record.name, made[0].dtype, made[0].shape, self._start(record)))
            behind = made[-1]
            records.append(Record(behind.name, behind.dtype, behind.shape, end))
            self._behind[record.name] = records[-1]
            end += align_up(behind.nbytes, ALIGN_BYTES)
        self.records = records
        self._data_bytes = end

    def _start(self, record: Record) -> int:
        return record.offset // self.dtype.itemsize

    def _part(self, record: Record) -> list[_Held]:
        start, rank = self._start(record), self.process_group.rank()
        low = max(start, rank * self.shard_numel)
        high = min(start + record.nbytes // self.dtype.itemsize, (rank + 1) * self.shard_numel)
        return [_Held(record, low, high, start)] if low < high else []

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, the scales, and what is not coded."""
        return self._data_bytes

    def allocate(self) -> Tensor:
        """Memory of one gather, on the current stream."""
        return torch.empty(self._data_bytes, dtype=torch.uint8, device=self.device)

    def _gather(self, flat: Tensor, shard: Tensor | None, group: dist.ProcessGroup, *, async_op: bool) -> Any:
        if shard is None:
            shard = self.fill(self.empty_shard(), group)
        behind = flat.narrow(0, self._codes_bytes, self._data_bytes - self._codes_bytes)
        behind.zero_()
        mine = group.rank() * self.shard_numel
        slot = flat.narrow(0, mine, self.shard_numel)
        slot.zero_()  # of padding all ranks have the same bits
        for run in self._runs:
            self._encode(run, shard, flat, mine)
        for held in self._others:
            place = self._behind[held.record.name].of(flat).view(-1)
            place[held.low - held.start : held.high - held.start] = shard[held.low - mine : held.high - mine]
        if group.size() == 1:
            return None
        all_reduce_(behind.view(torch.int32), group, op=dist.ReduceOp.SUM)  # as integers: exact to the bit
        codes = flat.narrow(0, 0, group.size() * self.shard_numel)
        return self.bring(codes, slot, group, async_op=async_op)

    def _encode(self, run: list[_Held], shard: Tensor, flat: Tensor, mine: int) -> None:
        """Codes and scales of tensors that lie behind each other, as wide as each other."""
        low, high, width = run[0].low, run[-1].high, run[0].record.shape[1]
        codes, scales = block_fp8(shard[low - mine : high - mine].view(-1, width))
        flat.narrow(0, low, high - low).view(codes.dtype).view(codes.shape).copy_(codes)
        band = 0
        for held in run:
            first = (held.low - held.start) // (width * BLOCK)
            bands = -(-(held.high - held.low) // (width * BLOCK))
            place = self._behind[held.record.name].of(flat)
            place[first : first + bands] = scales[band : band + bands]
            band += bands

    def buckets(self, flat: Tensor, naming: Naming) -> list[Bucket]:
        """The codes and what lies behind them, as one bucket."""
        return [Bucket(self.label, flat, self.records) if self.receives else Bucket(self.label, flat[:0], ())]


def _joined(parts: list[_Held]) -> list[list[_Held]]:
    """Parts in runs that can be coded in one go: no gap, one width, whole bands up to the last."""
    runs: list[list[_Held]] = []
    for part in sorted(parts, key=lambda held: held.low):
        last = runs[-1][-1] if runs else None
        joins = (
            last is not None
            and last.high == part.low
            and last.record.shape[1] == part.record.shape[1]
            and (last.high - last.low) % (BLOCK * last.record.shape[1]) == 0
        )
        runs[-1].append(part) if joins else runs.append([part])
    return runs
