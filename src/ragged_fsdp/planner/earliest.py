"""The earliest valid start of a tensor, in closed form: the heart of every search here.

For a fixed order and shard size ``S`` it is optimal to start each tensor as early as it can: the valid
starts of a tensor do not depend on the others, so an earlier end of one never delays the next. A tensor
of ``e`` elements in blocks of ``g`` that may start at ``p`` or later, with ``B`` the first boundary
after ``p``, has three cases:

1. it ends at or before ``B``: it starts at ``p``;
2. it crosses ``B``: the head before ``B`` is a multiple of ``g`` (and of the alignment), as long as
   possible, and the rest must fit in one shard, unless ``g`` divides ``S`` and any length is fine;
3. the rest does not fit: it starts in the next shard, by the same two rules, or nowhere.

The cost does not depend on the number of ranks.
"""

import math
from collections.abc import Iterable

from ragged_fsdp.planner.problem import Kind

__all__ = ["earliest_start", "place_in_order"]


def earliest_start(position: int, numel: int, block: int, shard: int, align: int, whole: bool) -> int | None:
    """The first valid start at or after ``position`` (a multiple of ``align``, which divides ``shard``).

    ``whole`` says whether the tensor may contain a whole shard; it must imply that ``block`` divides
    ``shard``. None where no start works at this shard size.
    """
    boundary = (position // shard + 1) * shard
    if position + numel <= boundary:
        return position
    head_unit = block if align == 1 else math.lcm(block, align)
    head = (boundary - position) // head_unit * head_unit
    if whole or numel - head <= shard:
        return boundary - head
    head = shard // head_unit * head_unit
    if numel - head <= shard:
        return boundary + shard - head
    return None


def place_in_order(
    kinds: Iterable[Kind], ranks: int, shard: int, align: int, divisor: int | None = None
) -> list[int] | None:
    """Offsets of the tensors in the given order, or None if they do not fit in ``ranks`` shards.

    Whole shards are allowed to tensors whose block divides ``divisor`` (a divisor of ``shard``; the
    shard itself if not given). With a fixed divisor feasibility is monotone over its multiples.
    """
    divisor = shard if divisor is None else divisor
    limit = ranks * shard
    offsets: list[int] = []
    position = 0
    for numel, block in kinds:
        start = earliest_start(position, numel, block, shard, align, divisor % block == 0)
        if start is None or start + numel > limit:
            return None
        offsets.append(start)
        position = -(-(start + numel) // align) * align
    return offsets
