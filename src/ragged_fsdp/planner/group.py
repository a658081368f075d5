"""The entry points: ``plan`` on plain integers, ``plan_group`` on named specs, ``plan_buffers`` for a split
by block size, ``split_trainable`` for one by what is trained.

One buffer can be wasteful: blocks of very different size force its shard up to a multiple of their LCM.
Apart, each buffer needs only its own. The price is one more collective per buffer, so a split must pay: it
is taken only if it saves more than ``threshold`` of the group's elements per extra buffer.

One buffer can also be uneven in what is trained: a tensor is one run of it, so adapters that are small beside
a frozen base lie on few ranks, and with them their gradients and optimizer state.
"""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations

from ragged_fsdp.layout import GroupLayout, TensorSpec, as_integer, check_integer
from ragged_fsdp.planner.problem import Kind, Order, Problem, ordered, place_in_order
from ragged_fsdp.planner.search import best_layout, order_layout, quick_bound, settle

__all__ = [
    "SPLIT_THRESHOLD",
    "bound_group",
    "fullest_numel",
    "plan",
    "plan_buffers",
    "plan_group",
    "split_trainable",
]

SPLIT_THRESHOLD = 0.01
_MOST_BLOCKS = 12
_EVEN_SHARE = 1.05  # of its even share the fullest rank may hold without a split
_EVEN_NUMEL = 128  # elements beyond its share that are not worth a buffer, whatever the share is


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
        size = as_integer(f"{name}: size", numel)
        specs.append(TensorSpec(name, size, as_integer(f"{name}: block", block)))
    layout = plan_group(specs, as_integer("plan: m", m), unit=as_integer("plan: unit", unit), align=align)
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


def plan_buffers(
    specs: Sequence[TensorSpec],
    ranks: int,
    *,
    max_buffers: int = 1,
    threshold: float = SPLIT_THRESHOLD,
    unit: int = 128,
    align: int = 1,
) -> tuple[GroupLayout, ...]:
    """Layouts of at most ``max_buffers`` buffers that together hold ``specs``, each in the given order.

    Tensors are split by block size: neighbours in size stay together, element-wise tensors go where they
    cost least. A buffer is added only if the padding falls by more than ``threshold`` of all elements.
    """
    if not isinstance(max_buffers, int) or isinstance(max_buffers, bool) or max_buffers < 1:
        raise ValueError(f"plan_buffers: max_buffers must be an int of at least 1, got {max_buffers!r}.")
    if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
        raise ValueError(f"plan_buffers: threshold must be in [0, 1), got {threshold!r}.")
    best: tuple[GroupLayout, ...] = (plan_group(specs, ranks, unit=unit, align=align),)
    numel = best[0].tensor_numel
    for buffers in range(2, max_buffers + 1):
        found = _best_split(specs, ranks, buffers, unit, align)
        if found is None:
            break
        extra = len(found) - len(best)
        if _padding(best) - _padding(found) > threshold * numel * extra:
            best = found
    return best


def fullest_numel(layout: GroupLayout, indices: Sequence[int]) -> int:
    """How many elements of the tensors ``indices`` lie on the rank that has most of them."""
    return max(map(sum, zip(*(layout.local_numels(i) for i in indices))), default=0)


def split_trainable(
    layout: GroupLayout, trainable: Sequence[bool], *, share: float = _EVEN_SHARE
) -> tuple[list[int], list[int]] | None:
    """The frozen and the trainable tensors of ``layout``, if they should have a buffer each.

    They should where a rank would hold more than ``share`` times its even part of the trainable elements, and
    more than a few beyond it. Apart they are planned like any group: gradients, optimizer state and reduction
    are as even as its shards. None where one buffer will do.
    """
    if len(trainable) != len(layout.specs):
        raise ValueError(
            f"split_trainable: got {len(trainable)} flags for {len(layout.specs)} tensors; expected as many."
        )
    frozen = [i for i, trains in enumerate(trainable) if not trains]
    trained = [i for i, trains in enumerate(trainable) if trains]
    even = sum(layout.specs[i].numel for i in trained) / layout.ranks
    most = fullest_numel(layout, trained)
    if not any(layout.specs[i].numel for i in frozen) or most <= max(share * even, even + _EVEN_NUMEL):
        return None
    return frozen, trained


def bound_group(specs: Sequence[TensorSpec], ranks: int, *, unit: int = 128, align: int = 1) -> int:
    """A shard size no layout of ``specs`` can go under, in a fraction of the time of a plan."""
    kinds = _checked("bound_group", specs, ranks, unit, align)
    return quick_bound(Problem.build(kinds, ranks, unit, align))


def _checked(
    function: str, specs: Sequence[TensorSpec], ranks: int, unit: int, align: int
) -> tuple[Kind, ...]:
    """The kinds of ``specs``; raise on any argument that is not what it should be."""
    for name, value in (("ranks", ranks), ("unit", unit), ("align", align)):
        check_integer(function, name, value, 1)
    if not isinstance(specs, Sequence):
        raise TypeError(f"{function}: specs must be a sequence of TensorSpecs, got {specs!r}.")
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{function}: specs must hold TensorSpecs, got {spec!r} in it.")
    return tuple((spec.numel, spec.block_numel) for spec in specs)


@lru_cache(maxsize=4096)
def _plan_kinds(
    kinds: tuple[Kind, ...], ranks: int, unit: int, align: int, order: str | Order
) -> tuple[int, tuple[int, ...], int]:
    """Shard size, offsets and lower bound of validated kinds; the cache makes equal layers free."""
    problem = Problem.build(kinds, ranks, unit, align)
    if not problem.kinds:
        return 0, (0,) * len(kinds), 0
    if order == "best":
        outcome = best_layout(problem)
        placed, starts = settle(problem, outcome.shard, outcome.order)
        waiting: dict[Kind, deque[int]] = defaultdict(deque)
        for index, kind in enumerate(problem.kinds):
            waiting[kind].append(index)
        indices = [waiting[kind].popleft() for kind in placed]
    else:
        indices = ordered(order, problem.kinds)
        outcome = order_layout(problem, [problem.kinds[i] for i in indices])
        found = place_in_order(outcome.order, ranks, outcome.shard, align)
        if found is None:
            raise RuntimeError(f"planner: no layout at shard size {outcome.shard}; this is a bug.")
        starts = found
    as_given = iter([start for _, start in sorted(zip(indices, starts))])
    offsets = tuple(next(as_given) if numel else 0 for numel, _ in kinds)
    return outcome.shard, offsets, outcome.lower_bound


def _padding(layouts: Sequence[GroupLayout]) -> int:
    return sum(layout.padding_numel for layout in layouts)


def _best_split(
    specs: Sequence[TensorSpec], ranks: int, buffers: int, unit: int, align: int
) -> tuple[GroupLayout, ...] | None:
    """The split into exactly ``buffers`` with the least padding; None if there are too few block sizes."""
    blocks = sorted({spec.block_numel for spec in specs if spec.block_numel > 1 and spec.numel})
    if not 2 <= buffers <= len(blocks):
        return None
    blocks = _merged(specs, blocks)
    best: tuple[GroupLayout, ...] | None = None
    for cuts in combinations(range(1, len(blocks)), buffers - 1):
        edges = [0, *(blocks[cut] for cut in cuts), max(spec.block_numel for spec in specs) + 1]
        for home in range(buffers):
            parts: list[list[TensorSpec]] = [[] for _ in range(buffers)]
            for spec in specs:
                place = sum(edge <= spec.block_numel for edge in edges[1:-1])
                parts[home if spec.block_numel == 1 or not spec.numel else place].append(spec)
            found = tuple(plan_group(part, ranks, unit=unit, align=align) for part in parts)
            if best is None or _padding(found) < _padding(best):
                best = found
    return best


def _merged(specs: Sequence[TensorSpec], blocks: list[int]) -> list[int]:
    """The block sizes at which a cut is worth trying: those with the most elements, if there are many."""
    volume = {block: sum(s.numel for s in specs if s.block_numel == block) for block in blocks}
    return sorted(sorted(blocks, key=lambda block: (-volume[block], block))[:_MOST_BLOCKS])
