"""The published planner (veScale-FSDP, Algorithm 1), as the reference the benchmarks compare with.

It keeps the order of the tensors, climbs one ladder of LCMs of the block sizes, and bisects over the
multiples of each rung. The segment programme of the paper and the earliest placement used here answer
the same question, whether an order fits at a shard size; the tests compare the two.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import lcm

from ragged_fsdp.planner.problem import Kind, Problem, place_in_order

__all__ = ["algorithm1"]


def algorithm1(problem: Problem, order: Sequence[Kind], *, largest_first: bool = True) -> int:
    """The shard size the published algorithm gives for tensors in ``order``.

    ``largest_first`` climbs from the longest tensor's block on, as the paper's text and its bound of
    two ask for; otherwise from the smallest block on, as its pseudo-code has it.
    """
    if largest_first:
        blocks = [block for _, block in sorted(order, key=lambda kind: (-kind[0], -kind[1]))]
    else:
        blocks = sorted({block for _, block in order})
    best = problem.largest_shard
    for rung in dict.fromkeys(accumulate(blocks, lcm, initial=problem.step)):
        if rung > best:
            break
        low, high = 1, best // rung
        if not _fits(problem, order, high * rung):
            continue
        while low < high:
            middle = (low + high) // 2
            if _fits(problem, order, middle * rung):
                high = middle
            else:
                low = middle + 1
        best = high * rung
    return best


def _fits(problem: Problem, order: Sequence[Kind], shard: int) -> bool:
    return place_in_order(order, problem.ranks, shard, problem.align) is not None
