"""The entry points: ``plan`` on plain integers, ``plan_group`` on named specs, one buffer each."""

import operator
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.planner.earliest import place_in_order
from ragged_fsdp.planner.orders import Order, ordered
from ragged_fsdp.planner.problem import Kind, Problem
from ragged_fsdp.planner.search import best_layout, order_layout, quick_bound
from ragged_fsdp.planner.settle import settle

__all__ = ["bound_group", "plan", "plan_group"]


def plan(
    sizes: Sequence[int], blocks: Sequence[int], m: int, unit: int, *, align: int = 1
) -> tuple[int, list[int]]:
    """The smallest shard size found for ``m`` ranks, and the offsets in the order the tensors came.

    ``sizes`` are numels, ``blocks`` the elements of one block of each tensor, ``unit`` divides the shard
    size and ``align`` every offset. Raises ``ValueError`` or ``TypeError`` naming the tensor by position.
    """
    for name, given in (("sizes", sizes), ("blocks", blocks)):
        if not hasattr(given, "__getitem__") or isinstance(given, str | Mapping):
            raise TypeError(f"plan: {name} must be a sequence of integers, got {given!r}.")
    if len(sizes) != len(blocks):
        raise ValueError(f"plan: got {len(sizes)} sizes and {len(blocks)} blocks; expected as many of each.")
    specs = []
    for position, (numel, block) in enumerate(zip(sizes, blocks)):
        name = f"tensor {position}"
        specs.append(TensorSpec(name, _index(name, "size", numel), _index(name, "block", block)))
    layout = plan_group(specs, _index("plan", "m", m), unit=_index("plan", "unit", unit), align=align)
    return layout.shard_numel, list(layout.offsets)


def plan_group(
    specs: Sequence[TensorSpec],
    ranks: int,
    *,
    unit: int = 128,
    align: int = 1,
    order: str | Order = "best",
) -> GroupLayout:
    """The smallest layout of ``specs`` over ``ranks`` found, with a bound on how far it can be off.

    ``order`` fixes the order of the tensors in the buffer (a name of ``ORDERS`` or a function); with
    ``"best"`` the planner chooses it. The result depends on the arguments alone, so all ranks agree.
    Groups that are equal but for the names are planned once.
    """
    kinds = _checked("plan_group", specs, ranks, unit, align)
    shard, offsets, bound = _plan_kinds(kinds, ranks, unit, align, order)
    return GroupLayout(tuple(specs), ranks, unit, shard, offsets, bound, align)


def bound_group(specs: Sequence[TensorSpec], ranks: int, *, unit: int = 128, align: int = 1) -> int:
    """A shard size no layout of ``specs`` can go under, in a fraction of the time of a plan."""
    kinds = _checked("bound_group", specs, ranks, unit, align)
    return quick_bound(Problem.build([k[0] for k in kinds], [k[1] for k in kinds], ranks, unit, align))


def _checked(
    function: str, specs: Sequence[TensorSpec], ranks: int, unit: int, align: int
) -> tuple[Kind, ...]:
    """The kinds of ``specs``; raise on any argument that is not what it should be."""
    for name, value in (("ranks", ranks), ("unit", unit), ("align", align)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{function}: {name} must be an int, got {value!r}.")
        if value < 1:
            raise ValueError(f"{function}: {name} must be at least 1, got {value}.")
    if not isinstance(specs, Sequence):
        raise TypeError(f"{function}: specs must be a sequence of TensorSpecs, got {specs!r}.")
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{function}: specs must hold TensorSpecs, got {spec!r} in it.")
    return tuple((spec.numel, spec.block_numel) for spec in specs)


def _index(owner: str, what: str, value: object) -> int:
    """``value`` as a plain int; numpy integers are welcome, floats and booleans are not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{owner}: {what} must be an integer, got {value!r}.") from None


class _Planned(NamedTuple):
    shard: int
    offsets: tuple[int, ...]
    lower_bound: int


@lru_cache(maxsize=4096)
def _plan_kinds(kinds: tuple[Kind, ...], ranks: int, unit: int, align: int, order: str | Order) -> _Planned:
    """The plan of a group whose members were validated; the cache makes equal layers free."""
    problem = Problem.build([k[0] for k in kinds], [k[1] for k in kinds], ranks, unit, align)
    if not problem.kinds:
        return _Planned(0, (0,) * len(kinds), 0)
    if order != "best":
        indices = ordered(order, problem.kinds)
        outcome = order_layout(problem, [problem.kinds[i] for i in indices])
        starts = place_in_order(outcome.order, ranks, outcome.shard, align)
        if starts is None:
            raise RuntimeError(f"planner: no layout at shard size {outcome.shard}; this is a bug.")
        return _Planned(outcome.shard, _scatter(kinds, indices, starts), outcome.lower_bound)
    outcome = best_layout(problem)
    placed, starts = settle(problem, outcome.shard, outcome.order)
    waiting: dict[Kind, deque[int]] = defaultdict(deque)
    for kind, start in zip(placed, starts):
        waiting[kind].append(start)
    offsets = tuple(waiting[kind].popleft() if kind[0] else 0 for kind in kinds)
    return _Planned(outcome.shard, offsets, outcome.lower_bound)


def _scatter(kinds: tuple[Kind, ...], indices: Sequence[int], starts: Sequence[int]) -> tuple[int, ...]:
    """Offsets in the order of ``kinds``; ``indices`` count the tensors with elements only."""
    filled = [position for position, (numel, _) in enumerate(kinds) if numel]
    offsets = [0] * len(kinds)
    for index, start in zip(indices, starts):
        offsets[filled[index]] = start
    return tuple(offsets)
