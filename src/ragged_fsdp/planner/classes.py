"""LCM classes: the families of shard sizes over which feasibility is monotone.

A tensor may contain a whole shard of ``S`` elements only if its block divides ``S``. Call ``L`` the LCM
of the step and of some of the distinct blocks. If whole shards are allowed only to tensors whose block
divides ``L``, a layout for ``S = k*L`` becomes one for ``(k+1)*L``: keep every head's length, and each
shard end moves further away than each tensor's end does. Every ``S`` belongs to the class of the blocks
that divide it, so the smallest feasible member over all classes is the smallest feasible ``S``.
"""

import math

from ragged_fsdp.planner.problem import Problem, align_up

__all__ = ["class_floor", "ladder", "lcm_classes", "two_shard_size"]


def two_shard_size(numel: int, head_unit: int) -> int:
    """The smallest shard in which a tensor fits without containing a whole shard.

    That needs ``numel <= S + floor(S / head_unit) * head_unit``, which is monotone in ``S``.
    """
    heads = max(0, -(-(numel - head_unit + 1) // (2 * head_unit)))
    return max(heads * head_unit, numel - heads * head_unit)


def lcm_classes(problem: Problem, least: int, most: int) -> list[int]:
    """The LCM classes with a member in ``[least, most]`` that a layout can need, smallest first.

    Only blocks of tensors longer than ``least`` count: no other can contain a whole shard. There are
    few: a class counts only if its LCM has a multiple below ``most``, the best size known so far.
    """
    longest: dict[int, int] = {}
    for numel, block in problem.counts:
        if numel > least:
            longest[block] = max(numel, longest.get(block, 0))
    classes = {problem.step}
    for block in sorted(longest, key=lambda b: (-longest[b], b)):
        grown = {math.lcm(divisor, block) for divisor in classes}
        classes |= {divisor for divisor in grown if align_up(least, divisor) <= most}
    return sorted(classes)


def ladder(problem: Problem) -> list[int]:
    """A few classes that always hold a feasible size: LCMs of the blocks, longest tensors first.

    These are the prefixes the paper proposes; the best of them is within a factor of two of the optimum.
    """
    longest: dict[int, int] = {}
    for numel, block in problem.counts:
        longest[block] = max(numel, longest.get(block, 0))
    rungs = [problem.step]
    for block in sorted(longest, key=lambda b: (-longest[b], -b)):
        rungs.append(math.lcm(rungs[-1], block))
        if rungs[-1] > problem.largest_shard:
            break
    return list(dict.fromkeys(rungs))


def class_floor(problem: Problem, divisor: int, least: int) -> int:
    """The smallest multiple of ``divisor``, at least ``least``, that every tensor alone can live with."""
    for numel, block in problem.counts:
        if divisor % block:
            least = max(least, two_shard_size(numel, math.lcm(block, problem.align)))
    return align_up(least, divisor)
