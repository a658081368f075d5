"""The search for the smallest shard: cheap orders first, then the programme over multisets, then a proof.

Every decision depends on integers only, the effort is counted in array elements and not in seconds:
all ranks take the same path to the same layout.

With the size known, ``settle`` puts padding that is there anyway to use. A shard is rounded up to the
collective's unit, so most groups have some elements to spare. They buy two things, and never a larger
shard:

- **alignment**: offsets that are multiples of the unit, or of the largest part of it that fits. A gathered
  parameter is then aligned as one that an allocator has placed, and cuts fall at multiples of that too, so
  that quantisation blocks and short rows stay whole without a policy;
- **order**: tensors lie in the order in which they came, if that costs no alignment.

::

    norm 32, head 4096, 2 ranks, unit 128: S = 2176 leaves 224 elements to spare

    as the search left it   h h h h h h h h h|h h h h h h h h n .       head cut 2176 + 1920
    settled                 n . h h h h h h h|h h h h h h h h . .       head at 128, cut 2048 + 2048
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ragged_fsdp.layout import align_up
from ragged_fsdp.planner.bounds import class_floor, class_floors, dominant_quantum, ladder
from ragged_fsdp.planner.mixing import Mix, best_mix, full_mixes, relaxed_mix
from ragged_fsdp.planner.problem import Kind, Problem, cheap_orders, place_in_order

__all__ = ["EFFORT", "Outcome", "best_layout", "order_layout", "quick_bound", "settle"]

EFFORT = 60_000_000
"""Array elements the programme may touch per group; about a second on a slow core."""

_PLACING = 40  # placing one tensor of a cheap order costs about as much as this many array elements


@dataclass(frozen=True)
class Outcome:
    """The best shard size found, the tensors in buffer order, and a size no layout goes under."""

    shard: int
    order: tuple[Kind, ...]
    lower_bound: int


def best_layout(problem: Problem, effort: int = EFFORT) -> Outcome:
    """The smallest shard the search finds over all orders and classes."""
    orders = cheap_orders(problem)
    return _Search.begun(problem, effort, orders[0]).run(orders)


def order_layout(problem: Problem, order: Sequence[Kind]) -> Outcome:
    """The smallest shard for one given order: exact, by one bisection per class."""
    search = _Search.begun(problem, 0, order)
    bound = search.bound
    for divisor, floor in search.floors.items():
        search._bisect_order(order, divisor, floor)
    return Outcome(search.best, search.order, bound)


def quick_bound(problem: Problem) -> int:
    """A shard size no layout goes under, without searching for one: fast enough to scan many rank counts."""
    if not problem.kinds:
        return 0
    return _Search.begun(problem, 0, cheap_orders(problem)[0]).bound


def settle(problem: Problem, shard: int, found: Sequence[Kind]) -> tuple[tuple[Kind, ...], list[int]]:
    """The tensors in buffer order and their offsets, in shards of ``shard`` elements.

    ``found`` is an order that fits there with the problem's own alignment.
    """
    capacity = problem.ranks * shard
    align = problem.step
    while True:
        volume = sum(count * align_up(numel, align) for (numel, _), count in problem.counts.items())
        # the last tensor needs no room behind it
        if volume - align < capacity:
            for order in (problem.kinds, tuple(found)):
                starts = place_in_order(order, problem.ranks, shard, align)
                if starts is not None:
                    return order, starts
        if align == problem.align:
            raise RuntimeError(f"planner: no layout at shard size {shard}; this is a bug.")
        halved = align // 2
        align = halved if align % 2 == 0 and halved % problem.align == 0 else problem.align


@dataclass
class _Search:
    problem: Problem
    effort: int
    best: int
    order: tuple[Kind, ...]
    floors: dict[int, int] = field(default_factory=dict)
    spent: int = 0
    mixes: tuple[Mix, ...] = ()
    failed: set[tuple[Mix, int, int]] = field(default_factory=set)

    @classmethod
    def begun(cls, problem: Problem, effort: int, order: Sequence[Kind]) -> "_Search":
        """A search with a first size, that of ``order``, so that the enumeration of classes has an end."""
        search = cls(problem, effort, problem.largest_shard, tuple(order))
        for divisor in ladder(problem):
            search._bisect_order(order, divisor, class_floor(problem, divisor, problem.volume_shard))
        search.floors = class_floors(problem, search.best)
        return search

    def run(self, orders: Sequence[Sequence[Kind]]) -> Outcome:
        self._try_cheap_orders(orders)
        if not self._done():
            self.mixes = tuple(full_mixes(self.problem, self.effort // 6))
        for stage in (self._try_floor, self._search_class, self._prove):
            # Large divisors first: their classes have few members, and each success narrows the others.
            for divisor in sorted(self.floors, reverse=True):
                if self._done():
                    break
                stage(divisor)
        return Outcome(self.best, self.order, self.bound)

    @property
    def bound(self) -> int:
        return min([*self.floors.values(), self.best])

    def _worth(self) -> int:
        """The effort the remaining gap deserves: half for each power of ten below a thousandth."""
        worth, scale = self.effort, 1000
        while scale < 10**7 and (self.best - self.bound) * scale < self.best:
            worth, scale = worth // 2, scale * 10
        return worth

    def _done(self) -> bool:
        return self.best <= self.bound

    def _top(self, divisor: int) -> int:
        """The largest member of a class that would be an improvement."""
        return (self.best - 1) // divisor * divisor

    def _keep(self, shard: int, order: Iterable[Kind]) -> None:
        self.best, self.order = shard, tuple(order)

    def _try_cheap_orders(self, orders: Sequence[Sequence[Kind]]) -> None:
        if self._done():
            return
        for order in orders:
            if self._fits(order, self.bound, self.bound):
                self._keep(self.bound, order)
                return
        for order in orders:
            for divisor, floor in self.floors.items():
                self._bisect_order(order, divisor, floor)
            if self._done() or self.spent > self.effort // 3:
                return

    def _fits(self, order: Sequence[Kind], shard: int, divisor: int) -> bool:
        self.spent += _PLACING * len(order)
        return place_in_order(order, self.problem.ranks, shard, self.problem.align, divisor) is not None

    def _bisect_order(self, order: Sequence[Kind], divisor: int, floor: int) -> None:
        """The smallest member at which ``order`` fits, kept if it improves; exact by monotonicity."""
        low, high = floor // divisor, self._top(divisor) // divisor
        for share in (64, 8, 1):  # the answer is mostly near the floor: start the bisection there
            near = low + low // share
            if near >= high:
                break
            if self._fits(order, near * divisor, divisor):
                high = near
                break
            low = near + 1
        if low > high or not self._fits(order, high * divisor, divisor):
            return
        while low < high:
            middle = (low + high) // 2
            if self._fits(order, middle * divisor, divisor):
                high = middle
            else:
                low = middle + 1
        self._keep(high * divisor, order)

    def _try_floor(self, divisor: int) -> None:
        """The smallest member not ruled out is often the answer."""
        if self.floors[divisor] < self.best:
            self._mix_fits(self.floors[divisor], divisor)

    def _search_class(self, divisor: int) -> None:
        """Bisection over the members of a class, with the best order the programme finds at each.

        First over the members at multiples of the quantum, then, if the largest member below the best
        fits as well, over all that are left.
        """
        quantum = dominant_quantum(self.problem)
        low = self.floors[divisor]
        if quantum > divisor:
            low = self._bisect(divisor, quantum, low, self._top(divisor))
        self._prove(divisor, self.effort // 8)
        low, high = max(low, self.floors[divisor]), self._top(divisor)
        if low <= high and self._mix_fits(high, divisor):
            self._bisect(divisor, divisor, low, high - divisor)

    def _bisect(self, divisor: int, spacing: int, least: int, most: int) -> int:
        """Try members next to multiples of ``spacing``; returns where members not known to fail begin."""
        low, high = -(-least // spacing), most // spacing
        while low <= high:
            middle = (low + high) // 2
            shard = align_up(middle * spacing, divisor)
            fits = shard <= most and self._mix_fits(shard, divisor)
            if fits is None:
                return most + divisor
            if fits:
                high = middle - 1
            else:
                low, least = middle + 1, max(least, shard + divisor)
        return least

    def _mix_fits(self, shard: int, divisor: int) -> bool | None:
        """Whether some order fits, kept if so; None where the effort is spent."""
        for mix in self.mixes:
            order = self._run(mix, shard, divisor, self._worth() * 2 // 3)
            if order:
                self._keep(shard, order)
                return True
            if order is None:
                return None
            if mix.exact:
                self.floors[divisor] = max(self.floors[divisor], shard + divisor)
        return False

    def _run(self, mix: Mix, shard: int, divisor: int, limit: int) -> list[Kind] | None:
        """The programme's order, empty if it found none; None where it would spend more than ``limit``."""
        if self.spent + mix.work > limit or not self.problem.fits_arrays:
            return None
        if (mix, shard, divisor) in self.failed:
            return []
        order, work = best_mix(self.problem, mix, shard, divisor)
        self.spent += work
        if order is None:
            self.failed.add((mix, shard, divisor))
        return order or []

    def _prove(self, divisor: int, work: int | None = None) -> None:
        """If even some of the tensors do not fit in the largest member below the best, none does."""
        top = self._top(divisor)
        mix = relaxed_mix(self.problem, top, self.effort // 3 if work is None else work)
        if (
            top >= self.floors[divisor]
            and mix is not None
            and self._run(mix, top, divisor, self._worth()) == []
        ):
            self.floors[divisor] = top + divisor
