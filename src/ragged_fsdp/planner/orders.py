"""Named orders of the tensors of a group, and the registry where others plug in theirs."""

from collections.abc import Callable, Iterable, Sequence

from ragged_fsdp.planner.problem import Kind, Problem

__all__ = ["ORDERS", "Order", "by_block", "by_numel", "cheap_orders", "default", "ordered", "register_order"]

Order = Callable[[Sequence[Kind]], Sequence[int]]
"""Takes the ``(numel, block_numel)`` of the tensors, returns their indices in buffer order."""


def default(kinds: Sequence[Kind]) -> list[int]:
    """The order in which the tensors came."""
    return list(range(len(kinds)))


def by_block(kinds: Sequence[Kind]) -> list[int]:
    """Largest blocks first, then larger tensors, then as they came."""
    return sorted(range(len(kinds)), key=lambda i: (-kinds[i][1], -kinds[i][0], i))


def by_numel(kinds: Sequence[Kind]) -> list[int]:
    """Largest tensors first, then larger blocks, then as they came."""
    return sorted(range(len(kinds)), key=lambda i: (-kinds[i][0], -kinds[i][1], i))


ORDERS: dict[str, Order] = {"default": default, "block": by_block, "numel": by_numel}


def register_order(name: str, order: Order) -> None:
    """Make ``order`` available by name; it must be deterministic, since every rank calls it."""
    if not isinstance(name, str) or not callable(order):
        raise TypeError(f"register_order: expected a name and a function, got {name!r} and {order!r}.")
    if name == "best" or name in ORDERS:
        raise ValueError(f"register_order: the name {name!r} is taken.")
    ORDERS[name] = order


def ordered(order: str | Order, kinds: Sequence[Kind]) -> list[int]:
    """The indices of ``kinds`` in the order asked for, checked to be a permutation."""
    if isinstance(order, str):
        if order not in ORDERS:
            known = ", ".join(["best", *ORDERS])
            raise ValueError(f"order must be one of {known} or a function, got {order!r}.")
        order = ORDERS[order]
    if not callable(order):
        raise TypeError(f"order must be a name or a function, got {order!r}.")
    answer = order(kinds)
    indices = list(answer) if isinstance(answer, Iterable) else [answer]
    if sorted(indices) != list(range(len(kinds))):
        raise ValueError(f"order must return each index below {len(kinds)} once, got {indices!r:.200}.")
    return indices


def cheap_orders(problem: Problem) -> list[list[Kind]]:
    """The orders tried before any search: the paper's three, and the kinds mixed in proportion."""
    kinds = problem.kinds
    orders = [[kinds[i] for i in order(kinds)] for order in (by_numel, by_block, default)]
    orders.append(_mixed(problem))
    return orders


def _mixed(problem: Problem) -> list[Kind]:
    """All kinds spread evenly over the buffer, those without a block to keep together at the end."""
    spread: list[tuple[int, int, Kind]] = []
    scale = len(problem.kinds)
    free: list[Kind] = []
    for rank, (kind, count) in enumerate(problem.counts.items()):
        if problem.align % kind[1] == 0:
            free += [kind] * count
        else:
            spread += [((2 * i + 1) * scale * 1000 // (2 * count), rank, kind) for i in range(count)]
    return [kind for _, _, kind in sorted(spread)] + free
