"""Which blocks of a shard have changed since the last pass, and how the ranks exchange only those.

Each rank compares its shard with a copy of what it sent last, in the dtype that is sent (on a GPU the copy
is in pinned host memory), and sends blocks that differ in any bit. A block is :data:`BLOCK` elements of the
flat buffer of a group.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ragged_fsdp.weights.buckets import Delta
from ragged_fsdp.weights.sources import GroupSource

__all__ = ["BLOCK", "Changes"]

BLOCK = 256
"""Elements of a block: the four bytes of its place are 0.8 % of its bytes in bf16."""


class Changes:
    """The copies of one stream's shards, by source."""

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}
        self.complete = False
        """Whether the last pass came to its end on this rank; else the receiver has some of it."""

    def keep(self, index: int, shard: Tensor) -> None:
        """Note what is being sent."""
        if index not in self._last:
            pinned = shard.device.type == "cuda"
            self._last[index] = torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=pinned)
        self._last[index].copy_(shard)

    def since(self, index: int, source: GroupSource, shard: Tensor, group: dist.ProcessGroup) -> Delta:
        """The changed blocks of all ranks, and note what is being sent."""
        blocks = _blocks(shard)
        before = _blocks(self._last[index].to(shard.device, non_blocking=True))
        # bits, not values: a nan is equal to itself, and -0.0 is not 0.0
        places = (_bits(blocks) != _bits(before)).any(dim=1).nonzero().view(-1)
        values = blocks[places]
        self.keep(index, shard)
        numel = source.shard_numel
        starts, all_values = _exchange(places.to(torch.int32), values, group)
        offsets = [rank * numel for rank, count in enumerate(starts) for _ in range(len(count))]
        firsts = torch.cat(starts).to(torch.int64) * BLOCK
        firsts += torch.tensor(offsets, dtype=torch.int64, device=firsts.device)
        return Delta(source.label, firsts, torch.cat(all_values), tuple(source.records), numel)


def _blocks(shard: Tensor) -> Tensor:
    """(blocks, elements); the last one filled up."""
    missing = -len(shard) % BLOCK
    return (torch.nn.functional.pad(shard, (0, missing)) if missing else shard).view(-1, BLOCK)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def _exchange(places: Tensor, values: Tensor, group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
    """Places and values of every rank: the counts first, then one broadcast from each rank that has any."""
    if group.size() == 1:
        return [places], [values]
    counts = torch.zeros(group.size(), dtype=torch.int64, device=values.device)
    counts[group.rank()] = len(places)
    dist.all_reduce(counts, group=group)
    found = counts.tolist()
    row = 4 + BLOCK * values.element_size()
    ends = list(accumulate(found))
    message = torch.empty(ends[-1] * row, dtype=torch.uint8, device=values.device)
    parts = [message[(end - count) * row : end * row] for end, count in zip(ends, found)]
    own = parts[group.rank()]
    own[: 4 * len(places)] = places.view(torch.uint8)
    own[4 * len(places) :] = values.reshape(-1).view(torch.uint8)
    for rank, part in enumerate(parts):
        if found[rank]:
            dist.broadcast(part, group=group, group_src=rank)
    all_places = [part[: 4 * count].clone().view(torch.int32) for part, count in zip(parts, found)]
    all_values = [part[4 * count :].clone().view(values.dtype) for part, count in zip(parts, found)]
    return all_places, [value.view(-1, BLOCK) for value in all_values]
