"""How good the plans are: figures that were proven, and a wide corpus with the best sizes known."""

import pytest

from planner_corpus import all_cases, best_known, real_case
from planner_paper import algorithm1
from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.planner import plan_buffers, plan_group
from ragged_fsdp.planner.problem import Problem, default


def layout_of(case):
    specs = [TensorSpec(str(i), n, b) for i, (n, b) in enumerate(zip(case.sizes, case.blocks))]
    return plan_group(specs, case.ranks, unit=case.unit, align=case.align)


@pytest.mark.parametrize(
    ("group", "rule", "ranks", "percent", "published"),
    [
        ("deepseek-v3", "ffn-128", 512, 0.308, 2.06),
        ("deepseek-v3", "ffn-128", 1024, 2.641, 7.31),
        ("qwen3-235b", "ffn-128", 512, 5.205, 7.90),
        ("qwen3-235b", "ffn-128", 768, 9.251, 29.5),
        ("gpt-oss-120b", "ffn-128", 1024, 17.485, 17.485),
        ("gpt-oss-120b", "ffn-16", 1024, 2.799, 2.799),
    ],
)
def test_proven_figures(group, rule, ranks, percent, published):
    """Padding of one layer in one buffer, beside what the published algorithm gives in the default order."""
    case = real_case(group, rule, ranks)
    layout = layout_of(case)
    assert round(100 * layout.padding_ratio, 3) == percent
    assert layout.proven_optimal
    problem = Problem.build(zip(case.sizes, case.blocks), ranks, case.unit)
    shard = algorithm1(problem, [problem.kinds[i] for i in default(problem.kinds)])
    assert 100 * (shard * ranks / problem.tensor_numel - 1) == pytest.approx(published, abs=0.05)


def test_two_buffers_where_one_is_provably_wasteful():
    case = real_case("gpt-oss-120b", "ffn-128", 1024)
    specs = [TensorSpec(str(i), n, b) for i, (n, b) in enumerate(zip(case.sizes, case.blocks))]
    layouts = plan_buffers(specs, 1024, max_buffers=2)
    padding = sum(layout.padding_numel for layout in layouts) / sum(case.sizes)
    assert len(layouts) == 2 and round(100 * padding, 2) == 5.74


def test_the_corpus_against_the_best_sizes_known():
    """Nine in ten at the best size known, none far above it, and no bound above any size ever found."""
    known = best_known()
    cases = all_cases()
    assert {case.name for case in cases} <= known.keys()
    gaps = []
    for case in cases[::3]:
        layout = layout_of(case)
        best = known[case.name]["shard"]
        assert layout.lower_bound <= best, case.name
        gaps.append(max(0.0, layout.shard_numel / best - 1))
    assert sum(gap == 0 for gap in gaps) >= 0.9 * len(gaps)
    assert max(gaps) <= 0.005
    assert sum(gaps) / len(gaps) <= 0.0002
