"""Shard sizes no layout can go under."""

from ragged_fsdp.planner.classes import class_floor, lcm_classes
from ragged_fsdp.planner.problem import Problem, align_up

__all__ = ["lower_bound"]


def lower_bound(problem: Problem, most: int) -> int:
    """The smallest shard size that passes every necessary condition; at most ``most``, a feasible one."""
    numel = sum(align_up(numel, problem.align) for numel, _ in problem.kinds)
    volume = align_up(-(-numel // problem.ranks), problem.step)
    return min(class_floor(problem, divisor, volume) for divisor in lcm_classes(problem, volume, most))
