"""Which elements of a stored tensor a rank needs, and in which runs of bytes it reads them; no torch.

A rank holds a region of a model tensor: boxes, one behind the other in its memory (``routes``). A stored
tensor, or a part of one, is a strided view of the model tensor (``names``). What both have in common is again
a strided view on either side, a :class:`Transfer`. Transfers are cut until each lies in one short run of its
file, and neighbours are read together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ragged_fsdp.routes import Region, contiguous_stride

__all__ = ["Job", "StoredPiece", "Transfer", "jobs_of", "transfers"]

Shape = tuple[int, ...]

GAP_BYTES = 4096
"""Runs with less between them are read as one: a page is read whole anyway."""


@dataclass(frozen=True)
class Transfer:
    """Elements to copy: ``sizes`` of them, from strided places of a stored tensor to those of a local one."""

    sizes: Shape
    source_offset: int
    source_strides: Shape
    target_offset: int
    target_strides: Shape

    @property
    def numel(self) -> int:
        """How many elements it copies."""
        return math.prod(self.sizes)

    @property
    def extent(self) -> int:
        """Elements from the first to the last in the stored tensor."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.source_strides))

    @property
    def is_run(self) -> bool:
        """Whether the elements follow each other on both sides."""
        return not self.sizes or (len(self.sizes) == 1 and self.source_strides == self.target_strides == (1,))

    def rows(self, start: int, stop: int) -> Transfer:
        """The part of it with these indices of its first dim."""
        return replace(
            self,
            sizes=(stop - start, *self.sizes[1:]),
            source_offset=self.source_offset + start * self.source_strides[0],
            target_offset=self.target_offset + start * self.target_strides[0],
        ).normal()

    def normal(self) -> Transfer:
        """An equal transfer with its dims in the order of the file, and as few of them as can be."""
        dims = sorted(
            ((s, a, b) for s, a, b in zip(self.sizes, self.source_strides, self.target_strides) if s > 1),
            key=lambda dim: -dim[1],
        )
        merged: list[tuple[int, int, int]] = []
        for size, source, target in dims:
            if merged and merged[-1][1] == size * source and merged[-1][2] == size * target:
                merged[-1] = (merged[-1][0] * size, source, target)
            else:
                merged.append((size, source, target))
        sizes, sources, targets = zip(*merged) if merged else ((), (), ())
        return replace(self, sizes=sizes, source_strides=sources, target_strides=targets)


@dataclass(frozen=True)
class _Axis:
    """How one dim of a view walks along one dim of the tensor."""

    dim: int
    step: int
    size: int
    source_stride: int


def transfers(
    shape: Shape, region: Region, model: tuple[int, Shape, Shape], stored: tuple[int, Shape]
) -> Iterator[Transfer]:
    """What a rank with ``region`` of a model tensor of ``shape`` takes from a stored tensor.

    Args:
        model: offset, sizes and strides of the stored elements in the flattened model tensor.
        stored: offset and strides of the same elements in the flattened stored tensor.

    Raises:
        ValueError: if a dim of the view runs across dims of the tensor at a step.
    """
    if not math.prod(model[1]):
        return
    first = _unravel(shape, model[0])
    axes = _axes(shape, first, model, stored[1])
    start = 0
    for offsets, sizes in region:
        found = _within(first, axes, offsets, sizes)
        if found is not None:
            source, target, dims = found
            yield Transfer(
                tuple(size for size, _, _ in dims),
                stored[0] + source,
                tuple(stride for _, stride, _ in dims),
                start + target,
                tuple(stride for _, _, stride in dims),
            ).normal()
        start += math.prod(sizes)


def _within(
    first: Shape, axes: Sequence[_Axis], offsets: Shape, sizes: Shape
) -> tuple[int, int, list[tuple[int, int, int]]] | None:
    """What lies in a box of a view that begins at ``first``: source and target offset, and the dims."""
    strides = contiguous_stride(sizes)
    walked = {axis.dim: axis for axis in axes}
    source = target = 0
    dims = []
    for dim, (begin, size) in enumerate(zip(offsets, sizes)):
        axis = walked.get(dim, _Axis(dim, 1, 1, 0))
        low = max(0, -(-(begin - first[dim]) // axis.step))
        high = min(axis.size, (begin + size - 1 - first[dim]) // axis.step + 1)
        if low >= high:
            return None
        source += low * axis.source_stride
        target += (first[dim] + low * axis.step - begin) * strides[dim]
        dims.append((high - low, axis.source_stride, axis.step * strides[dim]))
    return source, target, dims


def _axes(shape: Shape, first: Shape, model: tuple[int, Shape, Shape], source_strides: Shape) -> list[_Axis]:
    strides = contiguous_stride(shape)
    left = [dim for dim, size in enumerate(shape) if size > 1]
    axes = []
    todo = [(s, m, p) for s, m, p in zip(model[1], model[2], source_strides) if s > 1]
    while todo:
        size, stride, source = todo.pop()
        dim = next((d for d in left if stride and stride % strides[d] == 0), None)
        if dim is None:
            raise ValueError(
                f"a part with strides {model[2]} of a tensor of shape {shape} is no part of rows"
            )
        step = stride // strides[dim]
        if first[dim] + (size - 1) * step < shape[dim]:
            axes.append(_Axis(dim, step, size, source))
            left.remove(dim)
        elif step == 1 and not first[dim] and size % shape[dim] == 0:  # it covers this dim and goes on
            axes.append(_Axis(dim, 1, shape[dim], source))
            left.remove(dim)
            todo.append((size // shape[dim], stride * shape[dim], source * shape[dim]))
        else:
            raise ValueError(f"a part with strides {model[2]} of a tensor of shape {shape} crosses its dims")
    return axes


def _unravel(shape: Shape, offset: int) -> Shape:
    return tuple(offset // stride % max(size, 1) for size, stride in zip(shape, contiguous_stride(shape)))


@dataclass(frozen=True)
class StoredPiece:
    """A transfer of one target tensor, from a stored tensor that begins at byte ``start`` of a file."""

    file: str
    start: int
    item_bytes: int
    target: int
    """Which of the targets it fills."""
    source: int
    """Which of the stored tensors it comes from."""
    transfer: Transfer

    @property
    def begin(self) -> int:
        """The first byte in the file."""
        return self.start + self.transfer.source_offset * self.item_bytes

    @property
    def end(self) -> int:
        """One past its last byte in the file."""
        return self.begin + self.transfer.extent * self.item_bytes


@dataclass(frozen=True)
class Job:
    """One run of a file to read, and the pieces that lie in it."""

    file: str
    begin: int
    end: int
    pieces: tuple[StoredPiece, ...]


def jobs_of(pieces: Sequence[StoredPiece], chunk_bytes: int) -> list[Job]:
    """The pieces cut and joined into reads of at most ``chunk_bytes``, in the order of the files."""
    cut = sorted(
        (part for piece in pieces for part in _cut(piece, chunk_bytes)),
        key=lambda p: (p.file, p.begin, p.target),
    )
    jobs: list[Job] = []
    together: list[StoredPiece] = []
    end = 0
    for piece in cut:
        joins = bool(together) and piece.file == together[0].file and piece.begin <= end + GAP_BYTES
        if not joins or max(end, piece.end) - together[0].begin > chunk_bytes:
            if together:
                jobs.append(Job(together[0].file, together[0].begin, end, tuple(together)))
            together, end = [], 0
        together.append(piece)
        end = max(end, piece.end)
    if together:
        jobs.append(Job(together[0].file, together[0].begin, end, tuple(together)))
    return jobs


def _cut(piece: StoredPiece, chunk_bytes: int) -> Iterator[StoredPiece]:
    """Parts that lie in one run of at most ``chunk_bytes``, with only short gaps inside."""
    transfer, item = piece.transfer, piece.item_bytes
    if not transfer.sizes:
        yield piece
        return
    extent, inner, longest_gap = 1, 0, 0
    for size, stride in zip(reversed(transfer.sizes), reversed(transfer.source_strides)):
        longest_gap = max(longest_gap, stride - extent)
        extent, inner = extent + (size - 1) * stride, extent
    deep = longest_gap * item <= GAP_BYTES and inner * item <= chunk_bytes
    at_once = max(1, chunk_bytes // (transfer.source_strides[0] * item)) if deep else 1
    if at_once >= transfer.sizes[0] and deep:
        yield piece
        return
    for start in range(0, transfer.sizes[0], at_once):
        part = replace(piece, transfer=transfer.rows(start, min(start + at_once, transfer.sizes[0])))
        if deep and len(part.transfer.sizes) == len(transfer.sizes):
            yield part
        else:
            yield from _cut(part, chunk_bytes)
