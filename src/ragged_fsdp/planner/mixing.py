"""The best order of all, for a fixed shard size: a dynamic programme over multisets of tensors.

For a fixed shard size the earliest end of a *multiset* of tensors is enough state: whatever order they
came in, an earlier end is never worse. So the states are counts, one per kind, and the cost is the
product of the counts instead of a factorial. Level ``t`` holds all ways to have placed ``t`` tensors, as
one array over the counts of all kinds but one (the last count is what is missing to ``t``)::

    level 3, kinds a (up to 2) and b (the implied one):   count of a    0     1     2
                                                          count of b    3     2     1
                                                          end          ...   ...   ...

Kinds that would make the product too large are *chained*: they are placed in one fixed relative order,
freely interleaved with the others, and take one axis together. A band keeps the first axis within some
distance of proportional mixing. Without chain and band the programme is exact over all orders.
``full_mixes`` chooses what is counted and what is chained, ``relaxed_mix`` what a proof may leave out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ragged_fsdp.layout import align_up
from ragged_fsdp.planner.problem import Kind, Problem

__all__ = ["ChainLink", "Mix", "best_mix", "full_mixes", "joined_links", "relaxed_mix"]

_Array = npt.NDArray[np.int64]
_MOST_BYTES = 1 << 27  # of choices kept
_MOST_COUNTED = 6  # kinds with an axis of their own, beside a chain
_MOST_RELAXED = 24  # kinds of an exact programme
_SMALL = 16  # a tensor this many times smaller than a shard matters little to a proof
_BANDS = (None, 64, 16)  # widest first
_CHAIN_LENGTHS = (64, 32, 16, 8, 4, 1)
_UNREACHED = np.int64(2**60)  # above every position, yet two of them add up without overflow


@dataclass(frozen=True)
class ChainLink:
    """One link of a chain: a tensor, or several that may be cut anywhere, laid end to end."""

    kind: Kind
    parts: tuple[Kind, ...]


@dataclass(frozen=True)
class Mix:
    """The kinds a programme runs over: counted ones by multiplicity, chained links in order."""

    counted: tuple[tuple[Kind, int], ...]
    chain: tuple[ChainLink, ...] = ()
    band: int | None = None

    @property
    def exact(self) -> bool:
        """Whether the programme covers all orders of its tensors."""
        return not self.chain and self.band is None

    @property
    def tensor_count(self) -> int:
        return sum(count for _, count in self.counted) + len(self.chain)

    @property
    def cells(self) -> int:
        """States of one level, after the band."""
        axes = [count + 1 for _, count in self.counted]
        if axes:
            axes.remove(max(axes))
        if axes and self.band is not None:
            largest = max(axes)
            axes.remove(largest)
            axes.append(min(largest, 2 * self.band + 1))
        return math.prod(axes) * (len(self.chain) + 1)

    @property
    def choice_bytes(self) -> int:
        """Memory of the choices kept to trace the order; the band saves time there, not memory."""
        axes = sorted(count + 1 for _, count in self.counted)[:-1]
        return self.tensor_count * math.prod(axes) * (len(self.chain) + 1)

    @property
    def level_work(self) -> int:
        """Cost of one level in array elements, with a constant per array operation."""
        return (len(self.counted) + bool(self.chain)) * (self.cells + 1500)

    @property
    def work(self) -> int:
        """Cost of a run that reaches the last level."""
        return (self.tensor_count + 1) * self.level_work


def full_mixes(problem: Problem, work: int) -> Iterator[Mix]:
    """Programmes over all tensors, best first; a single one where it is exact."""
    counts = problem.counts
    exact = Mix(tuple(counts.items()))
    if len(counts) <= _MOST_RELAXED and exact.work <= work:
        yield exact
        return
    free = [kind for kind in counts if problem.align % kind[1] == 0]
    coarse = sorted(
        (kind for kind in counts if kind not in free), key=lambda k: (-counts[k], -k[0] * counts[k], k)
    )
    for limit in (work, 2 * work):  # groups of thousands of tensors get fewer, dearer runs
        for counted in range(min(len(coarse), _MOST_COUNTED), 0, -1):
            mix = _mix(problem, coarse[:counted], coarse[counted:], free, limit)
            if mix is not None:
                yield mix
                return


def _mix(problem: Problem, counted: list[Kind], odd: list[Kind], free: list[Kind], work: int) -> Mix | None:
    """The widest affordable programme that counts ``counted`` and chains the rest, None if none is."""
    counts = problem.counts
    bars = tuple((kind, counts[kind]) for kind in counted)
    links = [
        ChainLink(kind, (kind,))
        for kind in sorted(odd, key=lambda k: (-k[1], -k[0]))
        for _ in range(counts[kind])
    ]
    for length in _CHAIN_LENGTHS:
        chain = (*links, *joined_links(problem, free, length))
        for band in _BANDS:
            mix = Mix(bars, chain, band)
            if mix.work <= work and mix.choice_bytes <= _MOST_BYTES:
                return mix
    return None


def joined_links(problem: Problem, free: list[Kind], most: int) -> list[ChainLink]:
    """Tensors that may be cut anywhere, joined to at most ``most`` links, longest first."""
    tensors = [kind for kind in free for _ in range(problem.counts[kind])]
    tensors.sort(key=lambda kind: (-kind[0], kind[1]))
    groups: list[list[Kind]] = [[kind] for kind in tensors[:most]]
    for place, kind in enumerate(tensors[most:]):
        groups[-1 - place % len(groups)].append(kind)
    links = []
    for group in groups:
        length = sum(align_up(numel, problem.align) for numel, _ in group)
        links.append(ChainLink((length, 1), tuple(group)))
    return sorted(links, key=lambda link: (-link.kind[0], link.parts))


def relaxed_mix(problem: Problem, shard: int, work: int) -> Mix | None:
    """An exact programme over the tensors that matter most: what does not fit without the rest never fits.

    Tensors far smaller than a shard change little and multiply the states, so they are left out first.
    """
    counts = problem.counts
    weight = sorted(counts, key=lambda kind: (-kind[0] * counts[kind], -kind[1], -kind[0]))
    chosen: list[tuple[Kind, int]] = []
    for kind in weight[:_MOST_RELAXED]:
        grown = Mix((*chosen, (kind, counts[kind])))
        small = kind[0] * _SMALL < shard
        if grown.work <= (work // 8 if small else work):
            chosen.append((kind, counts[kind]))
    return Mix(tuple(chosen)) if chosen else None


def best_mix(problem: Problem, mix: Mix, shard: int, divisor: int) -> tuple[list[Kind] | None, int]:
    """An order of the tensors of ``mix`` that fits at ``shard``, if the programme finds one, and its cost."""
    programme = _Programme(problem, mix, shard, divisor)
    order = programme.run()
    return order, (programme.levels_run + 1) * mix.level_work


class _Step(NamedTuple):
    """What placing a tensor takes: for one kind, or as arrays with the next chained tensor of each cell."""

    numel: Any
    length: Any
    head_unit: Any
    late: Any
    """The gap at the start of the next shard, where the tensor begins if it does not fit before."""
    bounded: Any
    """Whether it must not contain a whole shard."""


class _Programme:
    """Arrays of one run. Axis 0 is the count of the second most frequent kind, the last axis the chain."""

    def __init__(self, problem: Problem, mix: Mix, shard: int, divisor: int) -> None:
        self.align, self.shard, self.divisor = problem.align, shard, divisor
        counted = sorted(mix.counted, key=lambda item: (-item[1], item[0]))
        (self.implied, self.implied_count), axes = counted[0], counted[1:]
        self.axes = [kind for kind, _ in axes]
        self.links = mix.chain
        self.chain = [link.kind for link in mix.chain]
        self.levels_run = 0
        self.levels = mix.tensor_count
        shape = [count + 1 for _, count in axes] + [len(self.chain) + 1]
        self.rows = shape[0]
        self.row_cells = math.prod(shape[1:])
        self.band = mix.band if axes else None
        self.strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        index = np.indices(shape, dtype=np.int64).reshape(len(shape), -1)
        self.index = index
        self.placed = index.sum(axis=0)
        self._measure(problem)
        self.steps = [self._step_of(kind) for kind in (self.implied, *self.axes)]
        if self.chain:  # the next chained tensor depends on the cell's place along the chain
            columns = zip(*(self._step_of(kind) for kind in (*self.chain, self.chain[-1])))
            self.next_chained = _Step(*(np.array(column)[index[-1]] for column in columns))

    def _measure(self, problem: Problem) -> None:
        """Volume of each cell beyond ``level * implied numel``, and the padding the shard size leaves."""
        numel = [align_up(kind[0], self.align) for kind in self.axes]
        implied = align_up(self.implied[0], self.align)
        chained = np.cumsum([0] + [align_up(kind[0], self.align) for kind in self.chain], dtype=np.int64)
        self.volume: _Array = chained[self.index[-1]] - implied * self.index[-1]
        for axis, length in enumerate(numel):
            self.volume += (length - implied) * self.index[axis]
        total = implied * self.implied_count + int(chained[-1])
        total += sum(length * int(most) for length, most in zip(numel, self.index[:, -1]))
        self.slack = min(problem.ranks * self.shard - total, 2**58)
        self.implied_numel = implied

    def _window(self, level: int) -> tuple[int, int]:
        """First and last row that can be reached, and matter, at a level."""
        others = self.levels - self.implied_count - (self.rows - 1)
        low = max(0, level - self.implied_count - others)
        high = min(self.rows - 1, level)
        if self.band is not None:
            centre = level * (self.rows - 1) // self.levels
            low, high = max(low, centre - self.band), min(high, centre + self.band)
        return low, high

    def run(self) -> list[Kind] | None:
        if self.slack < 0:
            return None
        cells = len(self.volume)
        ends = np.full(cells, _UNREACHED)
        ends[0] = 0
        choices = np.zeros((self.levels, cells), dtype=np.int8)
        for level in range(1, self.levels + 1):
            self.levels_run = level
            low, high = self._window(level)
            first, last = low * self.row_cells, (high + 1) * self.row_cells
            ends = self._step(ends, first, last, choices[level - 1])
            cut = ends[first:last] > self.volume[first:last] + (self.slack + level * self.implied_numel)
            if level > self.implied_count:
                cut |= self.placed[first:last] < level - self.implied_count
            ends[first:last][cut] = _UNREACHED
            if cut.all():
                return None
        return self._trace(choices)

    def _step(self, ends: _Array, first: int, last: int, choice: npt.NDArray[np.int8]) -> _Array:
        """Ends one tensor later, for the cells in ``[first, last)``; all others are unreached."""
        grown = np.full(len(ends), _UNREACHED)
        start = max(0, first - self.strides[0])
        room = np.empty_like(ends)  # left in the shard where each end lies; one division serves all kinds
        room[start:last] = self.shard - ends[start:last] % self.shard
        grown[first:last] = self._place(ends[first:last], room[first:last], self.steps[0])
        for axis, stride in enumerate(self.strides):
            source = max(0, first - stride)
            if source + stride >= last:
                continue
            cells, target = slice(source, last - stride), slice(source + stride, last)
            if axis < len(self.axes):
                step = self.steps[axis + 1]
            elif self.chain:
                step = _Step(*(column[cells] for column in self.next_chained))
            else:
                continue
            candidate = self._place(ends[cells], room[cells], step)
            better = (candidate < grown[target]) & (self.index[axis, target] > 0)
            np.copyto(grown[target], candidate, where=better)
            choice[target][better] = axis + 1
        return grown

    def _step_of(self, kind: Kind) -> _Step:
        numel, block = kind
        head_unit = math.lcm(block, self.align)
        head_most = self.shard // head_unit * head_unit
        late = self.shard - head_most if numel - head_most <= self.shard else int(_UNREACHED)
        return _Step(numel, align_up(numel, self.align), head_unit, late, self.divisor % block != 0)

    def _place(self, ends: _Array, room: _Array, step: _Step) -> _Array:
        """Ends after one more tensor: ``earliest_start`` on arrays."""
        if step.bounded is False and step.head_unit == self.align:  # one kind, which may be cut anywhere
            return np.minimum(ends + step.length, _UNREACHED)
        gap = room % step.head_unit
        if step.bounded is not False:
            late = step.bounded & (step.numel - room + gap > self.shard)
            gap = np.where(late, room + step.late, gap)
        gap[step.numel <= room] = 0
        return np.minimum(ends + gap + step.length, _UNREACHED)

    def _trace(self, choices: npt.NDArray[np.int8]) -> list[Kind]:
        order: list[Kind] = []
        cell = choices.shape[1] - 1
        for level in range(self.levels - 1, -1, -1):
            axis = int(choices[level, cell]) - 1
            if axis < 0:
                order.append(self.implied)
            elif axis < len(self.axes):
                order.append(self.axes[axis])
                cell -= self.strides[axis]
            else:
                order.extend(reversed(self.links[int(self.index[axis, cell]) - 1].parts))
                cell -= 1
        order.reverse()
        return order
