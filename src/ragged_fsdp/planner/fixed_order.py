"""The exact optimum for a fixed order: one binary search per LCM class."""

from collections.abc import Sequence

from ragged_fsdp.planner.classes import class_floor, lcm_classes
from ragged_fsdp.planner.earliest import place_in_order
from ragged_fsdp.planner.problem import Kind, Problem

__all__ = ["best_for_order"]


def best_for_order(problem: Problem, kinds: Sequence[Kind], least: int, most: int) -> int | None:
    """The smallest shard size in ``[least, most]`` at which ``kinds``, in this order, fit, or None."""
    best: int | None = None
    for divisor in lcm_classes(problem, least, most):
        limit = most if best is None else best - 1
        low, high = class_floor(problem, divisor, least) // divisor, limit // divisor
        if low > high or not _fits(problem, kinds, high * divisor, divisor):
            continue
        while low < high:
            middle = (low + high) // 2
            if _fits(problem, kinds, middle * divisor, divisor):
                high = middle
            else:
                low = middle + 1
        best = high * divisor
    return best


def _fits(problem: Problem, kinds: Sequence[Kind], shard: int, divisor: int) -> bool:
    return place_in_order(kinds, problem.ranks, shard, problem.align, divisor) is not None
