"""Properties of every plan, and of the claims the search rests on."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_fsdp.layout import TensorSpec, align_up
from ragged_fsdp.planner import ORDERS, bound_group, plan, plan_group
from ragged_fsdp.planner.bounds import class_floor, lcm_classes, two_shard_size
from ragged_fsdp.planner.group import _plan_kinds
from ragged_fsdp.planner.problem import Problem, earliest_start, place_in_order

tensors = st.tuples(st.integers(1, 40), st.integers(0, 12)).map(lambda t: (t[0] * t[1], t[0]))
groups = st.lists(tensors, max_size=12)
ranks = st.integers(1, 12)
units = st.sampled_from([1, 2, 3, 8, 16])
aligns = st.sampled_from([1, 1, 2, 4, 6])


def cuts(start: int, numel: int, block: int, shard: int) -> list[int]:
    """Shard boundaries inside a block, straight from the definition."""
    inside = range(shard * (start // shard + 1), start + numel, shard)
    return [boundary for boundary in inside if (boundary - start) % block]


@given(groups, ranks, units, aligns)
@settings(max_examples=300)
def test_the_three_constraints_hold(group, m, unit, align):
    sizes, blocks = [numel for numel, _ in group], [block for _, block in group]
    shard, offsets = plan(sizes, blocks, m, unit, align=align)
    assert shard % unit == 0 and shard % align == 0 and len(offsets) == len(group)
    covered = [False] * (m * shard)
    for (numel, block), start in zip(group, offsets):
        assert start % align == 0 and start >= 0 and start + numel <= m * shard
        assert not numel or not cuts(start, numel, block, shard)
        assert not any(covered[start : start + numel])
        covered[start : start + numel] = [True] * numel


@given(groups, ranks, units, aligns, st.sampled_from(["best", *ORDERS]))
@settings(max_examples=200)
def test_bounds_hold_and_parts_add_up(group, m, unit, align, order):
    specs = [TensorSpec(f"t{i}", numel, block) for i, (numel, block) in enumerate(group)]
    layout = plan_group(specs, m, unit=unit, align=align, order=order)
    best = plan_group(specs, m, unit=unit, align=align)
    assert layout.lower_bound <= best.shard_numel <= layout.shard_numel
    assert bound_group(specs, m, unit=unit, align=align) <= best.shard_numel
    for index, spec in enumerate(specs):
        parts = [layout.local_range(index, rank) for rank in range(m)]
        assert sum(part.numel for part in parts) == spec.numel
        assert layout.local_units(index) == tuple(part.numel // spec.block_numel for part in parts)
        assert all(part.numel % spec.block_numel == 0 for part in parts)


@given(groups, ranks, units, aligns)
@settings(max_examples=100)
def test_plans_are_deterministic(group, m, unit, align):
    specs = [TensorSpec(f"t{i}", numel, block) for i, (numel, block) in enumerate(group)]
    first = plan_group(specs, m, unit=unit, align=align)
    _plan_kinds.cache_clear()
    random.seed(m)  # a planner that draws numbers would now differ
    again = plan_group(specs, m, unit=unit, align=align)
    assert first == again and first.digest == again.digest


@given(st.integers(0, 400), tensors, st.integers(1, 60), st.sampled_from([1, 2, 4]), st.booleans())
@settings(max_examples=500)
def test_the_earliest_start_is_the_first_valid_one(position, tensor, shard_steps, align, allowed):
    numel, block = tensor
    shard, position = shard_steps * align, align_up(position, align)
    whole = allowed and shard % block == 0
    start = earliest_start(position, numel, block, shard, align, whole)

    def valid(candidate: int) -> bool:
        spans = (candidate + max(numel, 1) - 1) // shard - candidate // shard
        return not cuts(candidate, numel, block, shard) and (whole or spans <= 1)

    period = range(position, position + 2 * shard + math.lcm(block, align) + 1, align)
    assert start == next((candidate for candidate in period if valid(candidate)), None)


@given(st.lists(tensors.filter(lambda t: t[0]), min_size=1, max_size=7), ranks, units, aligns, st.randoms())
@settings(max_examples=200)
def test_feasibility_is_monotone_within_a_class(group, m, unit, align, rng):
    problem = Problem.build(group, m, unit, align)
    order = list(problem.kinds)
    rng.shuffle(order)
    for divisor in lcm_classes(problem, problem.volume_shard, problem.largest_shard):
        fits = [
            place_in_order(order, m, size, align, divisor) is not None
            for size in range(divisor, align_up(problem.largest_shard, divisor) + 2 * divisor, divisor)[:200]
        ]
        assert fits == sorted(fits)


@given(st.integers(1, 300), st.integers(1, 40))
def test_two_shard_size_is_the_threshold(numel, head_unit):
    threshold = two_shard_size(numel, head_unit)
    fits = [numel <= shard + shard // head_unit * head_unit for shard in range(2 * numel + 2)]
    assert fits == [shard >= threshold for shard in range(2 * numel + 2)]


@given(st.lists(tensors.filter(lambda t: t[0]), min_size=1, max_size=6), ranks, units, aligns)
@settings(max_examples=100)
def test_every_feasible_size_is_in_some_class(group, m, unit, align):
    """The enumeration of classes misses nothing: a size that fits, fits under one of the divisors too."""
    problem = Problem.build(group, m, unit, align)
    most = problem.largest_shard
    classes = lcm_classes(problem, problem.volume_shard, most)
    for shard in range(problem.volume_shard, most + 1, problem.step)[:300]:
        if place_in_order(problem.kinds, m, shard, align) is not None:
            members = [d for d in classes if shard % d == 0 and shard >= class_floor(problem, d, 0)]
            assert any(place_in_order(problem.kinds, m, shard, align, d) is not None for d in members)
