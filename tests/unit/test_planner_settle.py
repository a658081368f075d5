"""Padding that is there anyway: coarser alignment and the given order, never a larger shard."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.planner import plan_group
from ragged_fsdp.planner.problem import Problem, place_in_order
from ragged_fsdp.planner.search import best_layout, settle

tensors = st.tuples(st.integers(1, 40), st.integers(1, 12)).map(lambda t: (t[0] * t[1], t[0]))
groups = st.lists(tensors, min_size=1, max_size=10)
alignments = st.sampled_from([(8, 1), (8, 2), (16, 4), (12, 3), (128, 4), (6, 6), (10, 4)])  # unit, align


def alignment_of(starts, step):
    """The largest of the alignments on offer that all ``starts`` have."""
    return max(d for d in range(1, step + 1) if step % d == 0 and all(start % d == 0 for start in starts))


def ladder(step, align):
    rungs = [step]
    while rungs[-1] != align:
        half = rungs[-1] // 2
        rungs.append(half if rungs[-1] % 2 == 0 and half % align == 0 else align)
    return rungs


def test_the_drawing():
    """The example of the module: an even cut for the head, which the search alone does not give."""
    layout = plan_group([TensorSpec("norm", 32), TensorSpec("head", 4096)], 2, unit=128, align=4)
    assert layout.shard_numel == 2176 and layout.offsets == (0, 128)
    assert layout.local_units(1) == (2048, 2048)
    assert plan_group(layout.specs, 2, unit=128, align=4, order="numel").local_units(1) == (2176, 1920)


def test_the_given_order_yields_to_a_smaller_shard():
    """A block of 96 after the small ones would be cut at 128; first it fits, and S stays at the optimum."""
    specs = [TensorSpec("a", 32), TensorSpec("b", 32, 32), TensorSpec("c", 192, 96)]
    layout = plan_group(specs, 2, unit=128)
    assert layout.shard_numel == 128 == layout.lower_bound
    GroupLayout(specs, 2, 128, 128, layout.offsets, 0)


def test_tensors_keep_their_order_where_that_is_free():
    specs = [TensorSpec(f"t{i}", numel) for i, numel in enumerate((64, 4096, 64, 8192, 128))]
    for ranks in (1, 2, 3, 7, 16):
        offsets = plan_group(specs, ranks, unit=64).offsets
        assert list(offsets) == sorted(offsets)


def test_nothing_to_spare_changes_nothing():
    """Two tensors that fill two shards exactly have one layout."""
    layout = plan_group([TensorSpec("a", 100), TensorSpec("b", 156)], 2, unit=128)
    assert layout.shard_numel == 128 and layout.padding_numel == 0
    assert layout.offsets == (0, 100)


@given(groups, st.integers(1, 12), alignments)
@settings(max_examples=300)
def test_settled_plans_are_valid_and_as_aligned_as_can_be(group, ranks, alignment):
    unit, align = alignment
    problem = Problem.build(group, ranks, unit, align)
    outcome = best_layout(problem)
    order, starts = settle(problem, outcome.shard, outcome.order)
    assert Counter(order) == Counter(problem.kinds)
    specs = [TensorSpec(str(i), numel, block) for i, (numel, block) in enumerate(order)]
    GroupLayout(specs, ranks, unit, outcome.shard, starts, 0, align)  # validates itself
    assert starts == sorted(starts)
    reached = alignment_of(starts, problem.step)
    for rung in ladder(problem.step, align):
        fits = [
            place_in_order(each, ranks, outcome.shard, rung) is not None
            for each in (problem.kinds, outcome.order)
        ]
        if any(fits):
            assert reached % rung == 0
            assert not fits[0] or order == problem.kinds  # the given order, if it is as aligned
            break


@given(groups, st.integers(1, 12), alignments)
@settings(max_examples=100)
def test_the_shard_is_the_search_s(group, ranks, alignment):
    unit, align = alignment
    problem = Problem.build(group, ranks, unit, align)
    specs = [TensorSpec(str(i), numel, block) for i, (numel, block) in enumerate(group)]
    assert plan_group(specs, ranks, unit=unit, align=align).shard_numel == best_layout(problem).shard
