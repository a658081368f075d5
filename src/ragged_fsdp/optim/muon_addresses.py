"""Where the segments of a bucket lie in memory, as columns of integers: the fast way to launch the passes.

A model of many small matrices has many segments. Making a record of each, every step, can take longer than
the kernels run; here the places of the segments are columns made once, and the addresses of a step are
computed from them all at once. Only for what one launch can take (see :func:`addresses_of` and
:func:`columns_of`); everything else goes segment by segment, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ragged_fsdp.optim.muon_elementwise import kernels_take
from ragged_fsdp.optim.muon_program import BatchKind, Segment

__all__ = ["Addresses", "SegmentColumns", "addresses_of", "apply_rows", "columns_of", "momentum_rows"]

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SegmentColumns:
    """Segments by column: parameter, first element there and at the far end, elements, and the far tensor.

    ``place`` counts the far tensors: 0 is the packed buffer, 1 the first batch; -1 is nowhere.
    ``kinds[kind]`` is the kind of a segment.
    """

    parameter: Integers
    near_start: Integers
    far_start: Integers
    numel: Integers
    place: Integers
    kind: Integers
    kinds: tuple[BatchKind, ...]


@dataclass(frozen=True)
class Addresses:
    """First bytes of the parameters of an exchange in this step, and their dtypes."""

    gradient: Integers
    buffer: Integers
    parameter: Integers
    gradient_dtype: torch.dtype
    dtype: torch.dtype


def columns_of(segments: Sequence[Segment]) -> SegmentColumns | None:
    """The columns of some segments; None if one of them has gaps at either end."""
    copies = [segment.copy for segment in segments]
    if any(c.rows > 1 and not c.local_stride == c.slab_stride == c.run for c in copies):
        return None
    kinds = tuple(dict.fromkeys(segment.kind for segment in segments))
    index = {kind: i for i, kind in enumerate(kinds)}

    def column(values: Any) -> Integers:
        return np.fromiter(values, np.int64, len(segments))

    return SegmentColumns(
        column(s.parameter for s in segments),
        column(c.local_start for c in copies),
        column(c.slab_start for c in copies),
        column(c.numel for c in copies),
        column(s.batch + 1 if s.batch >= 0 or s.sent else -1 for s in segments),
        column(index[s.kind] for s in segments),
        kinds,
    )


def addresses_of(states: Sequence[Any]) -> Addresses | None:
    """Addresses of (parameter, gradient, buffer) triples; None unless one kernel can take them all."""
    if not states or any(gradient is None for _, gradient, _ in states):
        return None
    if not kernels_take(tensor for state in states for tensor in state):
        return None
    parameters, gradients, buffers = zip(*states)
    gradient_dtypes = {g.dtype for g in gradients}
    dtypes = {t.dtype for t in (*parameters, *buffers)}
    if len(gradient_dtypes) > 1 or len(dtypes) > 1:
        return None
    return Addresses(
        _pointers(gradients), _pointers(buffers), _pointers(parameters), gradient_dtypes.pop(), dtypes.pop()
    )


def momentum_rows(columns: SegmentColumns, addresses: Addresses, far: Sequence[Tensor]) -> Integers:
    """Gradient, buffer, target (0: none) and element count of each segment."""
    rows = np.empty((columns.numel.size, 4), np.int64)
    gradient_bytes = columns.near_start * addresses.gradient_dtype.itemsize
    rows[:, 0] = addresses.gradient[columns.parameter] + gradient_bytes
    rows[:, 1] = addresses.buffer[columns.parameter] + columns.near_start * addresses.dtype.itemsize
    rows[:, 2] = np.where(columns.place < 0, 0, _far_addresses(columns, far))
    rows[:, 3] = columns.numel
    return rows


def apply_rows(
    columns: SegmentColumns, addresses: Addresses, far: Sequence[Tensor], steps: Sequence[float]
) -> Integers:
    """Parameter, update, step (the bits of a double) and element count of each segment; a step per kind."""
    rows = np.empty((columns.numel.size, 4), np.int64)
    rows[:, 0] = addresses.parameter[columns.parameter] + columns.near_start * addresses.dtype.itemsize
    rows[:, 1] = _far_addresses(columns, far)
    rows[:, 2] = np.asarray(steps, np.float64).view(np.int64)[columns.kind]
    rows[:, 3] = columns.numel
    return rows


def _pointers(tensors: Sequence[Tensor]) -> Integers:
    return np.fromiter((t.data_ptr() for t in tensors), np.int64, len(tensors))


def _far_addresses(columns: SegmentColumns, far: Sequence[Tensor]) -> Integers:
    return _pointers(far)[columns.place] + columns.far_start * far[0].element_size()
