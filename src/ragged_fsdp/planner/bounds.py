"""Shard sizes no layout can go under, by counting.

Three necessary conditions, each per LCM class (see ``classes``), so that a violation at one member of
a class rules out all smaller members:

* volume: all tensors, rounded to the alignment, fit in the buffer;
* length: a tensor whose block does not divide the class lies in two shards at most;
* waste: take the tensors with the largest blocks, and ``q`` the GCD of their head units and aligned
  lengths. A shard that holds only parts of them holds a multiple of ``q``, and loses ``S mod q``. Each
  other tensor can spare only the shards it reaches.
"""

import math
from collections.abc import Iterator

from ragged_fsdp.planner.classes import class_floor, lcm_classes
from ragged_fsdp.planner.problem import Kind, Problem, align_up

__all__ = ["class_floors", "dominant_quantum"]


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
