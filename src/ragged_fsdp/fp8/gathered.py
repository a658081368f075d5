"""A transport of codes that nobody decodes: FP8 products compute with them as they were gathered.

The gathered buffer has one byte per element, in the layout of the group, so it is gathered in place like any
other; the fp32 scales, one per tile, are a second and small gather::

    main weights   a a a a|a a b b|b b . .     fp32, a shard per rank, cut between tiles
    gathered       a a a a a a b b b b . .     float8, in place; what a product reads
    scales         a a .|a b .|b . .           a part per rank, then in the order of the tiles, and kept

Codes of a parameter in the order of tiles (:class:`~ragged_fsdp.policy.Tiles`) are gathered in that order;
products read them so, or untile them in the pass of bytes that turns them.

A parameter that a module sees has shape, dtype and gradient of the compute dtype but no values: every element
is one nan. Its codes and scales are attributes of it (:class:`ProductWeight`). Both are tensors that stay
while their memory comes and goes, so that autograd may hold them from forward to backward. Scales take 1/4096
of the codes' bytes and are never freed: with ``reshard_after_forward`` an int they need no second gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ragged_fsdp import block_codes
from ragged_fsdp.block_codes import band_shape
from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.gather.codes import MessageLayout, code_kernels
from ragged_fsdp.fsdp.gather.transport import InPlace, Message
from ragged_fsdp.fsdp.parts.members import CODES_ATTRIBUTE, Members
from ragged_fsdp.policy import BlockCodes, Tiles

__all__ = ["KeptCodes", "ProductWeight"]

_SCALE_BYTES = 4


class ProductWeight(NamedTuple):
    """What an FP8 product reads of a weight."""

    codes: Tensor
    """In the shape of the parameter; flat where it lies in the order of its tiles."""
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
        self._parts.allocate(self._part_numel, torch.float32)

    def own_part(self, out: DBuffer) -> DBuffer:
        """This rank's codes, encoded into their slot; their scales are on their way afterwards."""
        members, start = self.members, 0
        own = self._parts.rows[members.mesh.shard_rank]
        encode = (code_kernels(members.device.type) or block_codes).encode
        for piece, slot, bands in zip(members.main.pieces, out.slot_buffer.tensors, self._own_bands):
            if not piece.numel():
                continue
            shard = piece.to(members.device, non_blocking=members.pin_memory)
            sizes = [math.prod(shape) for _, shape in bands]
            for (codes, shape), values, made in zip(
                bands, shard.view(-1).split(sizes), slot.view(-1).split(sizes)
            ):
                scales = own.narrow(0, start, shape[0] * shape[2]).view(-1, shape[2])
                encode(values.view(shape), codes, (made.view(shape), scales))
                start += scales.numel()
        self._parts.send(async_op=True)
        return out.slot_buffer

    def finish(self) -> None:
        """Wait for codes and scales; put the scales in the order of the tiles."""
        super().finish()
        parts = self._parts.take()
        if parts is None:  # it raised before, and the group is released now
            return
        assert self._scales is not None
        # a tensor of its own: autograd would see a write to the scales that it holds
        whole = self._scales.tensor(0, self._order.shape, torch.float32)
        torch.index_select(parts.view(-1), 0, self._order, out=whole)

    def make_unsharded(self) -> None:
        """Parameters without values, which carry their codes and scales."""
        members = self.members
        assert self.weight is not None and self._scales is not None
        start = 0
        for param, codes, kind, dtype, shape in zip(
            members.params, self.weight.tensors, self._codes, members.gathered_dtypes, members.plan.shapes
        ):
            nothing = torch.full((), float("nan"), dtype=dtype, device=members.device)
            made = param.make_unsharded(nothing.expand(shape))
            tiles = [-(-size // block) for size, block in zip(shape[-2:], kind.block_shape)]
            scales = self._scales.tensor(start * _SCALE_BYTES, (*shape[:-2], *tiles), torch.float32)
            setattr(made, CODES_ATTRIBUTE, ProductWeight(codes, scales))
            start += scales.numel()

    @cached_property
    def _own_bands(self) -> list[list[tuple[BlockCodes, tuple[int, int, int, int]]]]:
        """This rank's part of each parameter: kinds of blocks, and bands (count, rows, tiles, columns)."""
        plan, rank, found = self.members.plan, self.members.mesh.shard_rank, []
        for index, codes in enumerate(self._codes):
            if plan.tile(index) is None:
                rows, tiles, columns = band_shape(codes, plan.shapes[index][-1])
                count = plan.local_range(index, rank).numel // (rows * tiles * columns)
                found.append([(codes, (count, rows, tiles, columns))])
                continue
            parts = [(part.kind, part.tiles) for part in self._tiles.tile_parts(index, rank)]
            sized = [BlockCodes(codes.dtype, (kind.tile_rows, kind.tile_columns)) for kind, _ in parts]
            shapes = [(count, kind.tile_rows, 1, kind.tile_columns) for kind, count in parts]
            found.append(list(zip(sized, shapes)))
        return found

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
            stored = []
            for rank in ranks:
                count = self._tiles.scales_on(index, rank)
                stored.append(torch.arange(ends[rank], ends[rank] + count))
                ends[rank] += count
            places.append(self._in_rows(index, torch.cat(stored)))
        return torch.cat(places).to(self.members.device)

    def _in_rows(self, index: int, stored: Tensor) -> Tensor:
        """One value per tile, from the order in which the tiles are stored to rows of them."""
        plan = self.members.plan
        tile, shape = plan.tile(index), plan.shapes[index]
        if tile is None:
            return stored
        high, wide = tile
        rows = stored.new_empty((*shape[:-2], -(-shape[-2] // high), -(-shape[-1] // wide)))
        start = 0
        for kind in Tiles(*tile).kinds(shape):
            part = rows.narrow(-2, kind.first_row // high, -(-kind.rows // high))
            part = part.narrow(-1, kind.first_column // wide, -(-kind.columns // wide))
            panels = part.movedim(-1, 0)  # a panel has the tiles of all matrices
            panels.copy_(stored.narrow(0, start, panels.numel()).view(panels.shape))
            start += panels.numel()
        return rows.view(-1)
