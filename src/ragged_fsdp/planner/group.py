"""The two entry points: ``plan`` on plain integers, ``plan_group`` on named specs."""

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache

from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.planner.earliest import place_in_order
from ragged_fsdp.planner.orders import Order, ordered
from ragged_fsdp.planner.problem import Kind, Problem
from ragged_fsdp.planner.search import best_layout, order_layout

__all__ = ["plan", "plan_group"]


def plan(
    sizes: Sequence[int], blocks: Sequence[int], m: int, unit: int, *, align: int = 1
) -> tuple[int, list[int]]:
    """The shard size and the offset of each tensor, in the order given, for ``m`` ranks."""
    if len(sizes) != len(blocks):
        raise ValueError(f"plan: got {len(sizes)} sizes and {len(blocks)} blocks; expected as many of each.")
    specs = [TensorSpec(f"tensor {i}", size, block) for i, (size, block) in enumerate(zip(sizes, blocks))]
    layout = plan_group(specs, m, unit=unit, align=align)
    return layout.shard_numel, list(layout.offsets)


def plan_group(
    specs: Sequence[TensorSpec],
    ranks: int,
    *,
    unit: int = 128,
    align: int = 1,
    order: str | Order = "best",
) -> GroupLayout:
    """The smallest layout of ``specs`` over ``ranks`` found, with a bound on how far it can be off."""
    for name, value in (("ranks", ranks), ("unit", unit), ("align", align)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"plan_group: {name} must be an int, got {value!r}.")
        if value < 1:
            raise ValueError(f"plan_group: {name} must be at least 1, got {value}.")
    kinds = tuple((spec.numel, spec.block_numel) for spec in specs)
    shard, offsets, bound = _plan_kinds(kinds, ranks, unit, align, order)
    return GroupLayout(tuple(specs), ranks, unit, shard, offsets, bound, align)


@lru_cache(maxsize=4096)
def _plan_kinds(
    kinds: tuple[Kind, ...], ranks: int, unit: int, align: int, order: str | Order
) -> tuple[int, tuple[int, ...], int]:
    """Shard size, offsets and lower bound of a group that was validated; equal groups are planned once."""
    problem = Problem.build([k[0] for k in kinds], [k[1] for k in kinds], ranks, unit, align)
    problem.check_int64()
    if not problem.kinds:
        return 0, (0,) * len(kinds), 0
    if order == "best":
        outcome = best_layout(problem)
    else:
        outcome = order_layout(problem, [problem.kinds[i] for i in ordered(order, problem.kinds)])
    starts = place_in_order(outcome.order, ranks, outcome.shard, align)
    if starts is None:
        raise RuntimeError(f"planner: no layout at shard size {outcome.shard}; this is a bug.")
    free: dict[Kind, deque[int]] = defaultdict(deque)
    for kind, start in zip(outcome.order, starts):
        free[kind].append(start)
    offsets = tuple(free[kind].popleft() if kind[0] else 0 for kind in kinds)
    return outcome.shard, offsets, outcome.lower_bound
