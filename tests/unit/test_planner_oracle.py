"""The planner against exact answers: all orders by brute force, CP-SAT, and the published programme."""

import itertools
import random

import pytest
from ortools.sat.python import cp_model

from planner_paper import algorithm1
from ragged_fsdp.planner.mixing import ChainLink, Mix, best_mix
from ragged_fsdp.planner.problem import Problem, place_in_order
from ragged_fsdp.planner.search import best_layout


def small_problem(rng: random.Random, most_tensors: int) -> Problem:
    blocks = [rng.choice([1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14]) for _ in range(rng.randint(1, 3))]
    tensors = [
        (block * rng.randint(1, 12), block) for block in rng.choices(blocks, k=rng.randint(1, most_tensors))
    ]
    unit, align = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2, 4])
    return Problem.build(tensors, rng.randint(1, 7), unit, align)


def brute_force(problem: Problem) -> int:
    """The smallest shard over all orders, size by size."""
    orders = set(itertools.permutations(problem.kinds))
    shard = problem.volume_shard
    while not any(place_in_order(order, problem.ranks, shard, problem.align) for order in orders):
        shard += problem.step
    return shard


@pytest.mark.parametrize("seed", range(4))
def test_optimal_and_proven_on_small_groups(seed):
    rng = random.Random(seed)
    for _ in range(150):
        problem = small_problem(rng, 6)
        outcome = best_layout(problem)
        assert outcome.shard == brute_force(problem) == outcome.lower_bound, problem


@pytest.mark.parametrize("seed", range(2))
def test_bounds_hold_without_any_effort(seed):
    """With no effort the search falls back on cheap orders and counting: still valid, still bounded."""
    rng = random.Random(100 + seed)
    for _ in range(150):
        problem = small_problem(rng, 5)
        outcome = best_layout(problem, effort=0)
        assert outcome.lower_bound <= brute_force(problem) <= outcome.shard, problem
        assert place_in_order(outcome.order, problem.ranks, outcome.shard, problem.align) is not None


def fits_by_constraints(problem: Problem, shard: int) -> bool:
    """The optimisation problem of the paper, handed to CP-SAT as it is written."""
    model = cp_model.CpModel()
    intervals = []
    for place, (numel, block) in enumerate(problem.kinds):
        step = model.new_int_var(0, problem.ranks * shard // problem.align, f"start{place}")
        start = step * problem.align
        end = model.new_int_var(0, problem.ranks * shard, f"end{place}")
        intervals.append(model.new_interval_var(start, numel, end, f"tensor{place}"))
        for boundary in range(shard, problem.ranks * shard, shard):
            before, after, between = (model.new_bool_var(f"{c}{place}.{boundary}") for c in "bam")
            model.add(end <= boundary).only_enforce_if(before)
            model.add(start >= boundary).only_enforce_if(after)
            blocks = model.new_int_var(-problem.ranks * shard, problem.ranks * shard, f"k{place}.{boundary}")
            model.add(boundary - start == blocks * block).only_enforce_if(between)
            model.add_bool_or(before, after, between)
    model.add_no_overlap(intervals)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.INFEASIBLE)
    return status != cp_model.INFEASIBLE


def test_optimal_against_constraint_programming():
    """Independent of all our own code: CP-SAT knows nothing of orders, classes or closed forms."""
    rng = random.Random(11)
    for _ in range(12):
        problem = small_problem(rng, 7)
        outcome = best_layout(problem)
        sizes = range(problem.volume_shard, outcome.shard, problem.step)
        assert not any(fits_by_constraints(problem, shard) for shard in sizes), problem
        assert fits_by_constraints(problem, outcome.shard), problem


@pytest.mark.parametrize("chained", [False, True])
def test_the_programme_finds_an_order_where_one_exists(chained):
    """Exact without a chain; with one it may miss orders but never invents one."""
    rng = random.Random(5)
    for _ in range(150):
        problem = small_problem(rng, 6)
        shard = problem.volume_shard + problem.step * rng.randint(0, 6)
        orders = set(itertools.permutations(problem.kinds))
        exists = any(place_in_order(order, problem.ranks, shard, problem.align) for order in orders)
        counted = tuple(problem.counts.items())
        mix = Mix(counted[:1], chain_of(counted[1:])) if chained else Mix(counted)
        order, _ = best_mix(problem, mix, shard, shard)
        if order is None:
            assert chained or not exists, problem
        else:
            assert sorted(order) == sorted(problem.kinds)
            assert place_in_order(order, problem.ranks, shard, problem.align) is not None


def chain_of(counted):
    return tuple(ChainLink(kind, (kind,)) for kind, count in counted for _ in range(count))


def published_shards(kinds, shard: int) -> int:
    """Shards an order needs by the paper's recurrence: dp(t, i) over all blocks of all tensors.

    The state is how many elements of the last shard are used; a tensor is cut after ``i`` blocks only if its
    next block starts a shard, and runs on from there.
    """
    full, used = 0, 0  # closed shards, elements of the open one
    for numel, block in kinds:
        best = None
        if used + numel <= shard:
            best = (full, used + numel)
        else:
            for head in range(0, numel, block):
                if head > shard - used and not (used == 0 and head == 0):
                    break
                tail, closed = numel - head, full + (1 if used or head else 0)
                while tail > shard and shard % block == 0:
                    tail, closed = tail - shard, closed + 1
                if tail <= shard:
                    best = min(best or (closed, tail), (closed, tail))
            later = full + (1 if used else 0)
            for head in range(0, min(numel, shard) + 1, block):
                tail = numel - head
                if 0 < tail <= shard and head:
                    best = min(best or (later + 1, tail), (later + 1, tail))
        if best is None:
            return 10**9
        full, used = best
    return full + (1 if used else 0)


def test_the_closed_form_equals_the_published_recurrence():
    rng = random.Random(9)
    for _ in range(400):
        problem = small_problem(rng, 6)
        shard = rng.randint(1, 60)
        needed = published_shards(problem.kinds, shard)
        for ranks in (needed - 1, needed):
            if 0 < ranks < 10**6:
                assert (place_in_order(problem.kinds, ranks, shard, 1) is not None) == (ranks >= needed)
        if needed >= 10**9:
            assert place_in_order(problem.kinds, 10**6, shard, 1) is None


def test_the_published_algorithm_is_valid_and_never_better():
    rng = random.Random(21)
    for _ in range(200):
        problem = small_problem(rng, 8)
        for largest_first in (True, False):
            shard = algorithm1(problem, problem.kinds, largest_first=largest_first)
            assert place_in_order(problem.kinds, problem.ranks, shard, problem.align) is not None
            assert shard >= best_layout(problem).shard
