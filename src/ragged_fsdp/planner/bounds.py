"""Which shard sizes can work at all: LCM classes, and sizes that no layout can go under, by counting.

A tensor may contain a whole shard of ``S`` elements only if its block divides ``S``. Call ``L`` the LCM
of the step and of some of the distinct blocks. If whole shards are allowed only to tensors whose block
divides ``L``, a layout for ``S = k*L`` becomes one for ``(k+1)*L``: keep every head's length, and each
shard end moves further away than each tensor's end does. So feasibility is monotone over the multiples of
``L``, its *class*. Every ``S`` belongs to the class of the blocks that divide it, so the smallest feasible
member over all classes is the smallest feasible ``S``.

Three necessary conditions, each per class, so that a violation at one member rules out all smaller ones:

* volume: all tensors, rounded to the alignment, fit in the buffer;
* length: a tensor whose block does not divide the class lies in two shards at most;
* waste: take the tensors with the largest blocks, and ``q`` the GCD of their head units and aligned
  lengths. A shard that holds only parts of them holds a multiple of ``q``, and loses ``S mod q``. Each
  other tensor can spare only the shards it reaches.
"""

import math
from collections.abc import Iterator

from ragged_fsdp.layout import align_up
from ragged_fsdp.planner.problem import Kind, Problem

__all__ = ["class_floor", "class_floors", "dominant_quantum", "ladder", "lcm_classes", "two_shard_size"]


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
    longest = {block: numel for block, numel in problem.longest.items() if numel > least}
    classes = {problem.step}
    for block in sorted(longest, key=lambda b: (-longest[b], b)):
        grown = {math.lcm(divisor, block) for divisor in classes}
        classes |= {divisor for divisor in grown if align_up(least, divisor) <= most}
    return sorted(classes)


def ladder(problem: Problem) -> list[int]:
    """A few classes that always hold a feasible size: LCMs of the blocks, longest tensors first.

    These are the prefixes the paper proposes; the best of them is within a factor of two of the optimum.
    """
    rungs = [problem.step]
    for block in sorted(problem.longest, key=lambda b: (-problem.longest[b], -b)):
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


def class_floors(problem: Problem, most: int) -> dict[int, int]:
    """For each LCM class with a member below ``most``, a member no layout of the class goes under."""
    floors: dict[int, int] = {}
    cuts = list(_coarse_cuts(problem))
    for divisor in lcm_classes(problem, problem.volume_shard, most):
        floor = class_floor(problem, divisor, problem.volume_shard)
        for quantum, fine in cuts:
            if floor >= most:
                break
            floor = _waste_floor(problem, divisor, floor, most, quantum, fine)
        if floor < most:
            floors[divisor] = floor
    return floors


def dominant_quantum(problem: Problem) -> int:
    """What shards filled by most of the volume hold multiples of; 1 if nothing dominates.

    Between two multiples only shards with finer content gain room, so the best size is mostly at one.
    """
    for quantum, fine in _coarse_cuts(problem):
        if sum(numel * count for (numel, _), count in fine.items()) * 5 <= problem.tensor_numel:
            return quantum
    return 1


def _coarse_cuts(problem: Problem) -> Iterator[tuple[int, dict[Kind, int]]]:
    """Ways to call the largest blocks coarse: their quantum, and the kinds left as fine.

    One per distinct quantum: the more kinds share it, the fewer are fine, the sharper the bound.
    """
    by_block: dict[int, list[Kind]] = {}
    for kind in problem.counts:
        by_block.setdefault(kind[1], []).append(kind)
    fine = dict(problem.counts)
    quantum = 0
    for block in sorted(by_block, reverse=True):
        head_unit = math.lcm(block, problem.align)
        grown = math.gcd(
            quantum, head_unit, *(align_up(numel, problem.align) for numel, _ in by_block[block])
        )
        if quantum and grown != quantum:
            yield quantum, dict(fine)
        if grown <= problem.align:
            return
        quantum = grown
        for kind in by_block[block]:
            del fine[kind]
    if quantum:
        yield quantum, fine


def _waste_floor(
    problem: Problem, divisor: int, floor: int, most: int, quantum: int, fine: dict[Kind, int]
) -> int:
    """Raise ``floor`` past the largest member found to waste too much.

    The waste is worst just below a multiple of ``quantum``, so those members are tried, by bisection;
    any violation found is a proof, whether or not it is the largest one.
    """
    low, high = floor // quantum + 1, most // quantum
    while low <= high:
        middle = (low + high) // 2
        member = (middle * quantum - 1) // divisor * divisor
        if member >= floor and _wastes(problem, member, quantum, fine):
            floor, low = member + divisor, middle + 1
        else:
            high = middle - 1
    while floor < most and _wastes(problem, floor, quantum, fine):
        floor = align_up(max(floor + 1, _next_admissible(problem, floor, quantum, fine)), divisor)
    return floor


def _spared(shard: int, fine: dict[Kind, int]) -> int:
    """Shards that fine tensors can reach, at most."""
    return sum(count * (max(0, numel - 2) // shard + 2) for (numel, _), count in fine.items())


def _wastes(problem: Problem, shard: int, quantum: int, fine: dict[Kind, int]) -> bool:
    lost = max(0, problem.ranks - _spared(shard, fine)) * (shard % quantum)
    return problem.aligned_numel + lost > problem.ranks * shard


def _next_admissible(problem: Problem, shard: int, quantum: int, fine: dict[Kind, int]) -> int:
    """Past ``k * quantum`` only the spared shards gain room; the next multiple is the last resort."""
    base = shard // quantum * quantum
    missing = problem.aligned_numel - problem.ranks * base
    spared = _spared(shard, fine)
    rest = -(-missing // spared) if spared else quantum
    return base + min(rest, quantum)
