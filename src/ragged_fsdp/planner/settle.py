"""The last word on a plan: with the shard size fixed, padding that is there anyway is put to use.

A shard is rounded up to the collective's unit, so most groups have some elements to spare. They buy two
things, and never a larger shard:

- **alignment**: offsets that are multiples of the unit, or of the largest part of it that fits. A gathered
  parameter then starts where an allocator would have put it, and cuts fall at multiples of it too, so
  quantisation blocks and short rows stay whole unasked;
- **order**: tensors lie in the order in which they came, if that costs no alignment.

::

    norm 32, head 4096, 2 ranks, unit 128: S = 2176 leaves 224 elements to spare

    as the search left it   h h h h h h h h h|h h h h h h h h n .       head cut 2176 + 1920
    settled                 n . h h h h h h h|h h h h h h h h . .       head at 128, cut 2048 + 2048
"""

from collections.abc import Sequence

from ragged_fsdp.planner.earliest import place_in_order
from ragged_fsdp.planner.problem import Kind, Problem, align_up

__all__ = ["settle"]


def settle(problem: Problem, shard: int, found: Sequence[Kind]) -> tuple[tuple[Kind, ...], list[int]]:
    """The tensors in buffer order and their offsets, in shards of ``shard`` elements.

    ``found`` is an order that fits there with the problem's own alignment.
    """
    capacity = problem.ranks * shard
    align = problem.step
    while True:
        volume = sum(count * align_up(numel, align) for (numel, _), count in problem.counts.items())
        # the last tensor needs no room behind it
        if volume - align < capacity:
            for order in (problem.kinds, tuple(found)):
                starts = place_in_order(order, problem.ranks, shard, align)
                if starts is not None:
                    return order, starts
        if align == problem.align:
            raise RuntimeError(f"planner: no layout at shard size {shard}; this is a bug.")
        halved = align // 2
        align = halved if align % 2 == 0 and halved % problem.align == 0 else problem.align
