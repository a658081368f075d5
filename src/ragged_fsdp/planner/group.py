"""The two entry points: ``plan`` on plain integers, ``plan_group`` on named specs."""

from collections.abc import Sequence
from functools import lru_cache

from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.planner.bounds import lower_bound
from ragged_fsdp.planner.earliest import place_in_order
from ragged_fsdp.planner.fixed_order import best_for_order
from ragged_fsdp.planner.orders import ORDERS, Order, ordered
from ragged_fsdp.planner.problem import Problem

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
    kinds: tuple[tuple[int, int], ...], ranks: int, unit: int, align: int, order: str | Order
) -> tuple[int, tuple[int, ...], int]:
    problem = Problem.build([k[0] for k in kinds], [k[1] for k in kinds], ranks, unit, align)
    problem.check_int64()
    offsets = [0] * len(kinds)
    if not problem.kinds:
        return 0, tuple(offsets), 0
    filled = [i for i, (numel, _) in enumerate(kinds) if numel]
    best, chosen = problem.largest_shard, list(range(len(problem.kinds)))
    bound = lower_bound(problem, best)
    for name in ORDERS if order == "best" else [order]:
        indices = ordered(name, problem.kinds)
        found = best_for_order(problem, [problem.kinds[i] for i in indices], bound, best)
        if found is not None and (found < best or order != "best"):
            best, chosen = found, indices
    starts = place_in_order([problem.kinds[i] for i in chosen], ranks, best, align)
    if starts is None:
        raise RuntimeError(f"planner: no layout at shard size {best}; this is a bug.")
    for i, start in zip(chosen, starts):
        offsets[filled[i]] = start
    return best, tuple(offsets), bound
