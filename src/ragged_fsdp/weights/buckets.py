"""What a stream yields: a flat run of bytes, and where each tensor lies in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Bucket", "Delta", "Record"]


@dataclass(frozen=True)
class Record:
    """A tensor of a bucket: ``offset`` is its first byte in the bucket's data."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, data: Tensor) -> Tensor:
        """The tensor, as a view of the bucket's data."""
        return data[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class Bucket:
    """Tensors that were gathered together: views of one run of bytes, which is freed with the last of them.

    The gather of the next bucket begins when this one is first looked into: then the loop that asked for it
    has let go of the one before, and two are in memory.
    """

    def __init__(self, label: str, data: Tensor, records: Sequence[Record]) -> None:
        self.label = label
        self.records = tuple(records)
        self._data = data
        self.on_use: Callable[[], None] = lambda: None
        """Starts the next gather; may be called again."""

    @property
    def data(self) -> Tensor:
        """The run of bytes, flat; those between the records are padding."""
        self.on_use()
        return self._data

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and views."""
        for record in self.records:
            yield record.name, record.of(self._data)
            self.on_use()  # after the first: until then the caller's variable holds the bucket before

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy every tensor into that of the same name."""
        with torch.no_grad():
            for name, value in self.tensors():
                _named(tensors, name, value.shape).copy_(value)


@dataclass(frozen=True)
class Delta:
    """Blocks that have changed since the last pass of the stream, of tensors that were gathered together.

    Block ``i`` has the elements from ``starts[i]`` on of the flat buffer in which ``records`` say where
    tensors lie; the bytes between the records do not travel with a meaning.
    """

    label: str
    starts: Tensor
    """Int64: the element at which each block begins."""
    values: Tensor
    """(blocks, elements of a block), in the stream's dtype."""
    records: tuple[Record, ...]
    shard_numel: int
    """Elements of a rank's part of the buffer; what a block has beyond its rank's part means nothing."""

    @property
    def nbytes(self) -> int:
        """Bytes that are sent for it: values, and four for the place of each block."""
        return self.values.nbytes + 4 * len(self.starts)

    @property
    def fits_int32(self) -> bool:
        """Whether places fit four bytes."""
        return not len(self.starts) or int(self.starts[-1]) < 2**31

    def changes(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, flat positions and values of the elements in changed blocks, of tensors that have any."""
        inside = torch.arange(self.values.shape[1], device=self.values.device)
        for record in self.records:
            first, numel = record.offset // record.dtype.itemsize, math.prod(record.shape)
            low, high = torch.searchsorted(
                self.starts, torch.tensor([first - len(inside) + 1, first + numel], device=self.starts.device)
            ).tolist()
            if low == high:
                continue
            starts = self.starts[low:high, None]
            places = starts + inside - first
            valid = (places >= 0) & (places < numel) & (starts % self.shard_numel + inside < self.shard_numel)
            yield record.name, places[valid], self.values[low:high][valid]

    def apply(self, tensors: Mapping[str, Tensor]) -> None:
        """Write the changes into the tensors of the same names, which hold what the last pass sent."""
        shapes = {record.name: record.shape for record in self.records}
        with torch.no_grad():
            for name, places, values in self.changes():
                target = _named(tensors, name, shapes[name])
                target.view(-1)[places.to(target.device)] = values.to(target.device, target.dtype)


def _named(tensors: Mapping[str, Tensor], name: str, shape: Sequence[int]) -> Tensor:
    if name not in tensors:
        raise KeyError(f"the receiver has no tensor {name!r}")
    if tuple(tensors[name].shape) != tuple(shape):
        raise ValueError(f"{name}: {tuple(shape)} was sent, the receiver's has {tuple(tensors[name].shape)}")
    return tensors[name]
