"""A transport of codes: a rank sends one byte per element of its shard and one scale per tile.

The main weights stay as they are; gradients, optimizers and checkpoints know nothing of the codes. A gather
encodes this rank's shard, moves bytes, and decodes them into the buffer that the parameters view::

    main weights   a a a a|a a b b|b b . .     fp32, a shard per rank, cut between tiles
    message        codes, scales|codes, scales|codes, scales        a part per rank, one all-gather
    gathered       a a a a a a b b b b . .     in the compute dtype

Of a parameter in the order of tiles (:class:`~ragged_fsdp.policy.Tiles`) each tile is a run of codes, and
decoding writes it to its rows and columns: it untiles in the same pass.

A parameter lies on a run of ranks: part of the first one's shard, whole shards, part of the last one's. The
whole shards are decoded together, so the number of kernels does not grow with the number of ranks. On CUDA
the kernels of ``codes_triton`` encode and decode. One rank alone does so too: the numbers do not depend on
how many there are.

Codes are decoded on the compute stream, just before the layer. Until then a prefetched layer takes one byte
per element, and the next gather does not wait. Decoding beside the computation would not be faster: both are
bound by memory.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ragged_fsdp import block_codes
from ragged_fsdp.block_codes import band_shape, code_dtype
from ragged_fsdp.fsdp.gather.transport import InPlace, Message
from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.fsdp.parts.plan import GroupPlan
from ragged_fsdp.layout import ALIGN_BYTES, align_up
from ragged_fsdp.policy import BlockCodes, TileKind, Tiles
from ragged_fsdp.tiling import kind_views

if TYPE_CHECKING:
    from ragged_fsdp.fsdp.gather.codes_triton import Decoder

__all__ = ["Codes", "MessageLayout", "code_kernels"]

logger = logging.getLogger("ragged_fsdp")
_SCALE_BYTES = 4


@dataclass(frozen=True)
class RankRun:
    """Consecutive ranks that hold alike much of a parameter, at the same place of their shards."""

    first_rank: int
    ranks: int
    shard_start: int
    scale_start: int
    numel: int
    """Elements of each of these ranks."""


@dataclass(frozen=True)
class TilePart:
    """Tiles of one size that a rank holds of a parameter: which ones, and where they begin in its part."""

    kind: TileKind
    first: int
    tiles: int
    codes_at: int
    """Codes before the first of them, and scales."""
    scales_at: int


@dataclass(frozen=True)
class MessageLayout:
    """Where codes and scales lie in a rank's part of the message: codes where the shard has the elements."""

    plan: GroupPlan
    codes: tuple[BlockCodes, ...]

    def scales_on(self, index: int, rank: int) -> int:
        """Tiles of a parameter on a rank."""
        if self.plan.tile(index) is not None:
            return sum(part.tiles for part in self.tile_parts(index, rank))
        rows, columns = self.codes[index].block_shape
        return self.plan.local_range(index, rank).numel // (rows * columns)

    def tile_parts(self, index: int, rank: int) -> list[TilePart]:
        """What a rank has of a parameter in the order of tiles, by the size of the tiles."""
        part, codes = self.plan.local_range(index, rank), self.codes[index]
        found, codes_at, scales_at = [], 0, 0
        for kind in Tiles(*codes.block_shape).kinds(self.plan.shapes[index]):
            first, tiles = kind.between(part.tensor_start, part.tensor_start + part.numel)
            if tiles:
                found.append(TilePart(kind, first, tiles, codes_at, scales_at))
                codes_at, scales_at = codes_at + tiles * kind.tile_numel, scales_at + tiles
        return found

    @cached_property
    def scale_offset(self) -> int:
        """Bytes before the first scale."""
        return align_up(self.plan.layout.shard_numel, ALIGN_BYTES)

    @cached_property
    def part_bytes(self) -> int:
        """Bytes of a rank's part."""
        members = range(len(self.codes))
        scales = [sum(self.scales_on(i, rank) for i in members) for rank in range(self.plan.layout.ranks)]
        return self.scale_offset + align_up(max(scales) * _SCALE_BYTES, ALIGN_BYTES)

    def run_on(self, index: int, rank: int) -> RankRun:
        """A parameter's part on one rank; scales are in the order of the parameters."""
        part = self.plan.local_range(index, rank)
        before = sum(self.scales_on(i, rank) for i in range(index))
        return RankRun(rank, 1, part.shard_start, before, part.numel)

    @cached_property
    def runs(self) -> tuple[tuple[RankRun, ...], ...]:
        """The runs of each parameter: at most three, however many ranks hold it."""
        return tuple(tuple(self._runs(index)) for index in range(len(self.codes)))

    def _runs(self, index: int) -> list[RankRun]:
        found: list[RankRun] = []
        for here in (self.run_on(index, rank) for rank in range(self.plan.layout.ranks)):
            if found and here.numel == found[-1].numel == self.plan.layout.shard_numel:  # whole shards
                found[-1] = replace(found[-1], ranks=found[-1].ranks + 1)
            elif here.numel:
                found.append(here)
        return found

    def tile_views(self, message: Tensor, index: int, run: RankRun, part: TilePart) -> tuple[Tensor, Tensor]:
        """Codes (tiles, rows, 1, columns) and scales (tiles, 1) of a part of the tiles on one rank."""
        row, kind = message[run.first_rank], part.kind
        codes = row.narrow(0, run.shard_start + part.codes_at, part.tiles * kind.tile_numel)
        scales = row.narrow(
            0, self.scale_start(run) + part.scales_at * _SCALE_BYTES, part.tiles * _SCALE_BYTES
        )
        codes = codes.view(code_dtype(self.codes[index]))
        return codes.view(-1, kind.tile_rows, 1, kind.tile_columns), scales.view(torch.float32).view(-1, 1)

    def views(self, message: Tensor, index: int, run: RankRun) -> tuple[Tensor, Tensor]:
        """Codes (ranks, bands, rows, tiles, columns) and scales (ranks, bands, tiles) of a run."""
        part = message.narrow(0, run.first_rank, run.ranks)
        codes = part.narrow(1, run.shard_start, run.numel).view(code_dtype(self.codes[index]))
        rows, tiles, width = band_shape(self.codes[index], self.plan.shapes[index][-1])
        count = run.numel // (rows * width)
        scales = part.narrow(1, self.scale_start(run), count * _SCALE_BYTES).view(torch.float32)
        return codes.view(run.ranks, -1, rows, tiles, width), scales.view(run.ranks, -1, tiles)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the values of the whole group to ``out``, its flat buffer: the reference."""
        for index, runs in enumerate(self.runs):
            if self.plan.tile(index) is not None:
                self._decode_tiles(message, index, out)
                continue
            for run in runs:
                codes, scales = self.views(message, index, run)
                start = run.first_rank * self.plan.layout.shard_numel + run.shard_start
                block_codes.decode(codes, scales, out.narrow(0, start, codes.numel()).view(codes.shape))

    def _decode_tiles(self, message: Tensor, index: int, out: Tensor) -> None:
        shape, start = self.plan.shapes[index], self.plan.layout.offsets[index]
        whole = out.narrow(0, start, math.prod(shape)).view(shape)
        stored = torch.empty_like(whole).view(-1)
        for rank in range(self.plan.layout.ranks):
            for part in self.tile_parts(index, rank):
                codes, scales = self.tile_views(message, index, self.run_on(index, rank), part)
                first = part.kind.start + part.first * part.kind.tile_numel
                block_codes.decode(codes, scales, stored.narrow(0, first, codes.numel()).view(codes.shape))
        for tiles, rows in kind_views(stored, whole, self.codes[index].block_shape):
            rows.copy_(tiles)

    def scale_start(self, run: RankRun) -> int:
        """Bytes before a run's scales, in the part of each of its ranks."""
        return self.scale_offset + run.scale_start * _SCALE_BYTES


class Codes(InPlace):
    """Gathers codes and decodes them into the buffer that the parameters view; see the module's docstring."""

    gathers_weight = False

    def __init__(self, members: Members, codes: Sequence[BlockCodes]) -> None:
        super().__init__(members)
        self.message_layout = MessageLayout(members.plan, tuple(codes))
        if any(spec.tile for spec in members.plan.layout.specs):
            self.layout = members.plan.layout.recut(members.plan.layout.ranks)
        self._message = Message(members)
        self._decoder: Decoder | None = None
        """The kernel's view of the layout, from the first decoding on; None where the reference decodes."""

    def prepare(self) -> None:
        """Make the gathered buffer; raise if the parameters were cast to something that has no codes."""
        members = self.members
        kinds = {param.dtype for param in members.params}
        if len(kinds) > 1 or not all(kind.is_floating_point and kind.itemsize > 1 for kind in kinds):
            raise RuntimeError(
                f"{members.label}: parameters with a gather_policy must keep one floating-point dtype, got "
                f"{sorted(map(str, kinds))} after a cast."
            )
        super().prepare()

    def allocate(self) -> None:
        """Take the memory of the message of codes; that of the gathered buffer when they are decoded."""
        self._message.allocate(self.message_layout.part_bytes)

    def begin(self, async_op: bool) -> None:
        """Encode the shard and gather the codes."""
        self._encode(self._message.rows)
        self._message.send(async_op)

    @cached_property
    def _own_runs(self) -> tuple[RankRun, ...]:
        layout, rank = self.message_layout, self.members.mesh.shard_rank
        return tuple(layout.run_on(index, rank) for index in range(len(layout.codes)))

    def _encode(self, message: Tensor) -> None:
        layout, members = self.message_layout, self.members
        encode = (code_kernels(members.device.type) or block_codes).encode
        for index, (piece, run) in enumerate(zip(members.main.pieces, self._own_runs)):
            if piece.numel():
                shard = piece.to(members.device, non_blocking=members.pin_memory)
                if members.plan.tile(index) is not None:
                    for part in layout.tile_parts(index, run.first_rank):
                        kind, out = part.kind, layout.tile_views(message, index, run, part)
                        tiles = shard.narrow(0, part.codes_at, out[0].numel()).view(out[0].shape)
                        sized = replace(layout.codes[index], block_shape=(kind.tile_rows, kind.tile_columns))
                        encode(tiles, sized, out)
                    continue
                out = layout.views(message, index, run)
                encode(shard.view(out[0].shape), layout.codes[index], out)

    def _decode(self, message: Tensor) -> None:
        if self._decoder is None and (kernels := code_kernels(self.members.device.type)):
            self._decoder = kernels.Decoder(self.message_layout, self.members.device)
        # through the whole buffer: autograd would see a write to a parameter's own view
        if self._decoder is not None:
            self._decoder(message, self.weight.flat)
        else:
            self.message_layout.decode(message, self.weight.flat)

    def finish(self) -> None:
        """Wait for the codes and decode them into the gathered buffer, on the compute stream."""
        message = self._message.take()
        if message is not None:  # else it raised before, and the group is released now
            super().allocate()
            self._decode(message)


@cache
def code_kernels(device_type: str) -> ModuleType | None:
    """The fused kernels, for devices that have them."""
    if device_type != "cuda":
        return None
    if find_spec("triton") is None:
        logger.warning(
            "gather_policy: Triton is not installed; codes are made and read by torch, several times slower"
        )
        return None
    from ragged_fsdp.fsdp.gather import codes_triton

    return codes_triton
