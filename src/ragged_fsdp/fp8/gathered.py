"""A transport of codes that nobody decodes: FP8 products compute with them as they were gathered.

The gathered buffer has one byte per element, in the layout of the group, so it is gathered in place like any
other; the fp32 scales, one per tile, are a second and small gather::

    main weights   a a a a|a a b b|b b . .     fp32, a shard per rank, cut between tiles
    gathered       a a a a a a b b b b . .     float8, in place; what a product reads
    scales         a a .|a b .|b . .           a part per rank, then in the order of the tiles, and kept

A parameter that a module sees has shape, dtype and gradient of the compute dtype but no values: every element
is one nan. Its codes and scales are attributes of it (:class:`CodedWeight`). Both are tensors that stay while
their memory comes and goes, so that autograd may hold them from forward to backward. Scales take 1/4096 of
the codes' bytes and are never freed: with ``reshard_after_forward`` an int they need no second gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.gather import block_codes
from ragged_fsdp.fsdp.gather.block_codes import band_shape
from ragged_fsdp.fsdp.gather.codes import MessageLayout, code_kernels
from ragged_fsdp.fsdp.gather.transport import InPlace, Message
from ragged_fsdp.fsdp.parts.members import CODES_ATTRIBUTE, Members
from ragged_fsdp.policy import BlockCodes

__all__ = ["CodedWeight", "KeptCodes"]

_SCALE_BYTES = 4


class CodedWeight(NamedTuple):
    """What an FP8 product reads of a weight."""

    codes: Tensor
    """In the shape of the parameter."""
    scales: Tensor
    """One per tile: (..., tiles along the rows, tiles along the columns)."""


class KeptCodes(InPlace):
    """Gathers codes in place and lets the parameters carry them; see the module's docstring."""

    fills_slot = True

    def __init__(self, members: Members, codes: Sequence[BlockCodes]) -> None:
        super().__init__(members)
        self._codes = tuple(codes)
        self._tiles = MessageLayout(members.plan, self._codes)
        self._parts = Message(members)
        """Scales as they are gathered."""
        self._scales: FlatStorage | None = None
        """All scales, in the order of the parameters."""

    def prepare(self) -> None:
        """Make the buffer of codes, without memory."""
        if self.weight is not None:
            return
        self.weight = self.make_buffer(self.layout, dtype=torch.float8_e4m3fn)
        self._scales = FlatStorage(len(self._order) * _SCALE_BYTES, self.members.device)
        for param in self.members.params:
            param.unsharded = None

    def allocate(self) -> None:
        """Bring the memory of the codes back and take that of the scales under way."""
        super().allocate()
        if not self.is_parked:
            self._parts.allocate(self._part_numel, torch.float32)

    def own_part(self, out: DBuffer) -> DBuffer:
        """This rank's codes, encoded into their slot; their scales are on their way afterwards."""
        members, parts, start = self.members, self._parts.rows, 0
        assert parts is not None
        own = parts[members.mesh.shard_rank]
        encode = (code_kernels(members.device.type) or block_codes).encode
        for piece, slot, codes, shape in zip(
            members.main.pieces, out.slot_tensors, self._codes, members.plan.shapes
        ):
            if piece.numel():
                rows, tiles, columns = band_shape(codes, shape[-1])
                shard = piece.to(members.device, non_blocking=members.pin_memory)
                bands = shard.view(-1, rows, tiles, columns)
                scales = own.narrow(0, start, len(bands) * tiles).view(-1, tiles)
                encode(bands, codes, (slot.view(bands.shape), scales))
                start += scales.numel()
        self._parts.send(async_op=True)
        return out.slot_buffer

    def finish(self) -> None:
        """Wait for codes and scales; put the scales in the order of the tiles."""
        super().finish()
        parts = self._parts.take()
        if parts is not None:
            assert self._scales is not None
            # a tensor of its own: autograd would see a write to the scales that it holds
            whole = self._scales.tensor(0, self._order.shape, torch.float32)
            torch.index_select(parts.view(-1), 0, self._order, out=whole)

    def make_unsharded(self) -> None:
        """Parameters without values, which carry their codes and scales."""
        members = self.members
        assert self.weight is not None and self._scales is not None
        start = 0
        for param, codes, kind, dtype in zip(
            members.params, self.weight.tensors, self._codes, members.gathered_dtypes
        ):
            nothing = torch.full((), float("nan"), dtype=dtype, device=members.device)
            made = param.make_unsharded(nothing.expand(codes.shape))
            rows, columns = kind.block_shape
            shape = (*codes.shape[:-2], codes.shape[-2] // rows, codes.shape[-1] // columns)
            count = codes.numel() // (rows * columns)
            scales = self._scales.tensor(start * _SCALE_BYTES, shape, torch.float32)
            setattr(made, CODES_ATTRIBUTE, CodedWeight(codes, scales))
            start += count

    @cached_property
    def _part_numel(self) -> int:
        """Scales in a rank's part, filled up to those of the rank that has most."""
        ranks, count = range(self.members.mesh.shard_size), range(len(self._codes))
        return max(1, *(sum(self._tiles.scales_on(index, rank) for index in count) for rank in ranks))

    @cached_property
    def _order(self) -> Tensor:
        """Where the scale of each tile lies in the gathered parts."""
        ranks = range(self.members.mesh.shard_size)
        ends, places = [rank * self._part_numel for rank in ranks], []
        for index in range(len(self._codes)):
            for rank in ranks:
                count = self._tiles.scales_on(index, rank)
                places.append(torch.arange(ends[rank], ends[rank] + count))
                ends[rank] += count
        return torch.cat(places).to(self.members.device)
