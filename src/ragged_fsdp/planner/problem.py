"""The planning problem on plain integers, whether an order of its tensors fits, and the orders by name.

For a fixed order and shard size ``S`` it is optimal to start each tensor as early as it can: the valid
starts of a tensor do not depend on the others, so an earlier end of one never delays the next. A tensor
of ``e`` elements in blocks of ``g`` that may start at ``p`` or later, with ``B`` the first boundary
after ``p``, has three cases:

1. it ends at or before ``B``: it starts at ``p``;
2. it crosses ``B``: the head before ``B`` is a multiple of ``g`` (and of the alignment), as long as
   possible, and the rest must fit in one shard, unless ``g`` divides ``S`` and any length is fine;
3. the rest does not fit: it starts in the next shard, by the same two rules, or nowhere.

The cost does not depend on the number of ranks. What orders there are beside those of a search, and the
registry where others plug in theirs, stand at the end.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ragged_fsdp.layout import align_up

__all__ = [
    "ORDERS",
    "Kind",
    "Order",
    "Problem",
    "by_block",
    "by_numel",
    "cheap_orders",
    "default",
    "earliest_start",
    "ordered",
    "place_in_order",
    "register_order",
]

Kind = tuple[int, int]
"""``(numel, block_numel)``: tensors of one kind can be swapped without changing a layout's quality."""
Order = Callable[[Sequence[Kind]], Sequence[int]]
"""Takes the ``(numel, block_numel)`` of the tensors, returns their indices in buffer order."""


@dataclass(frozen=True)
class Problem:
    """Place tensors of ``kinds`` in ``ranks`` equal shards, as small as possible.

    ``step`` divides every shard size (the collective unit and the alignment together); ``align``
    divides every offset. Tensors without elements are left out: they fit anywhere.
    """

    kinds: tuple[Kind, ...]
    ranks: int
    step: int
    align: int

    @classmethod
    def build(cls, kinds: Iterable[Kind], ranks: int, unit: int, align: int = 1) -> "Problem":
        """The problem of validated kinds; keeps the order of the tensors with elements."""
        return cls(tuple(kind for kind in kinds if kind[0]), ranks, math.lcm(unit, align), align)

    @cached_property
    def counts(self) -> dict[Kind, int]:
        """How many tensors of each kind, largest kinds first."""
        return dict(sorted(Counter(self.kinds).items(), key=lambda item: (-item[0][0], -item[0][1])))

    @cached_property
    def longest(self) -> dict[int, int]:
        """Elements of the longest tensor of each block size."""
        return {block: numel for numel, block in reversed(self.counts)}  # the largest kinds come last

    @cached_property
    def tensor_numel(self) -> int:
        return sum(numel for numel, _ in self.kinds)

    @cached_property
    def aligned_numel(self) -> int:
        """What the tensors take at least: each up to the next multiple of the alignment."""
        return sum(count * align_up(numel, self.align) for (numel, _), count in self.counts.items())

    @cached_property
    def volume_shard(self) -> int:
        """The smallest shard size with room for all elements."""
        return align_up(-(-self.aligned_numel // self.ranks), self.step)

    @cached_property
    def largest_shard(self) -> int:
        """A shard size that always works: all tensors one after the other on the first rank."""
        return align_up(self.aligned_numel, self.step)

    @property
    def fits_arrays(self) -> bool:
        """Whether all positions of a search stay far from the end of int64, so that arrays can hold them."""
        return self.aligned_numel < 2**56


def earliest_start(position: int, numel: int, block: int, shard: int, align: int, whole: bool) -> int | None:
    """The first valid start at or after ``position`` (a multiple of ``align``, which divides ``shard``).

    ``whole`` says whether the tensor may contain a whole shard; it must imply that ``block`` divides
    ``shard``. None where no start works at this shard size.
    """
    boundary = (position // shard + 1) * shard
    if position + numel <= boundary:
        return position
    head_unit = block if align == 1 else math.lcm(block, align)
    head = (boundary - position) // head_unit * head_unit
    if whole or numel - head <= shard:
        return boundary - head
    head = shard // head_unit * head_unit
    if numel - head <= shard:
        return boundary + shard - head
    return None


def place_in_order(
    kinds: Iterable[Kind], ranks: int, shard: int, align: int, divisor: int | None = None
) -> list[int] | None:
    """Offsets of the tensors in the given order, or None if they do not fit in ``ranks`` shards.

    Whole shards are allowed to tensors whose block divides ``divisor`` (a divisor of ``shard``; the
    shard itself if not given). With a fixed divisor feasibility is monotone over its multiples.
    """
    divisor = shard if divisor is None else divisor
    limit = ranks * shard
    offsets: list[int] = []
    position = 0
    for numel, block in kinds:
        start = earliest_start(position, numel, block, shard, align, divisor % block == 0)
        if start is None or start + numel > limit:
            return None
        offsets.append(start)
        position = -(-(start + numel) // align) * align
    return offsets


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
