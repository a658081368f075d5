"""Rows of tokens sent to the ranks of their experts and back: :class:`AllToAll`, exact or with a capacity.

The exact way asks the device how many rows there are: the host must know to allocate. With a ``capacity`` it
does not: each rank sends each other one a fixed number of rows, and what does not fit is dropped and counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from ragged_fsdp.agreement import compare
from ragged_fsdp.collectives import wait_all
from ragged_fsdp.experts.dispatch import Dispatched, Dispatcher, Here, Route, check_group
from ragged_fsdp.experts.exchange import Asked, Meanwhile
from ragged_fsdp.experts.permute import count, find_arrival, invert, label, order
from ragged_fsdp.experts.split import ExpertSplit
from ragged_fsdp.experts.tally import keep_largest
from ragged_fsdp.experts.trips import Trip, cut

__all__ = ["AllToAll", "agree_on_tokens", "all_to_all"]

_PARTS = 4
_PARTS_FROM_BYTES = 32 << 20  # 80 us inside a node: about what four more launches cost the host


class AllToAll:
    """Rows are sent to their experts, and outputs back, in parts (:mod:`ragged_fsdp.experts.trips`).

    A part has the rows of some places in the ranks' lists of experts. The sender orders its rows by part, by
    rank within it, and then by place, so each part sends what lies together::

                 part 0              part 1
        rank 0   a0 a1 | c0 c1       b0 | d0       experts a, b are on rank 0, c, d on rank 1
        rank 1   a2    |             b1 b2 | d1

        rank 0 receives   a0 a1 | a2   and   b0 | b1 b2        rank 1   c0 c1   and   d0 | d1

    With a part for each place, as here, rows arrive grouped. Otherwise the rows of a part are grouped on
    arrival, while the next one is on its way. With a capacity a part has the first rows of every rank, the
    next part the next ones.

    Args:
        mesh: the ranks that experts are spread over, a 1-D mesh or a process group.
        split: how many experts each of them holds.
        capacity: None sends what there is. A number is the rows that each rank sends each other one, as a
            multiple of those it would send if tokens went everywhere alike: 2.0 has room for twice as many.
            It fixes every shape, so nothing waits for the device; what does not fit is dropped. All ranks
            must then have as many tokens; the first call with a number of them compares. In evaluation mode
            everything is sent.
        parts: into how many parts rows are cut at most, the same on all ranks. Each costs the host a few
            launches, forward and backward. So None is one, but on a GPU where many bytes travel: up to four
            there with a capacity, or where no rank has more than four experts.
        partial: many slots are of no expert, so room for rows is made once it is known how many are sent.
    """

    def __init__(
        self,
        mesh: DeviceMesh | dist.ProcessGroup,
        split: ExpertSplit,
        *,
        capacity: float | None = None,
        parts: int | None = None,
        partial: bool = False,
    ) -> None:
        if isinstance(mesh, DeviceMesh):
            check_group(type(self).__name__, mesh, split)
        if capacity is not None and not capacity > 0:
            raise ValueError(f"AllToAll: capacity must be None or positive, got {capacity!r}.")
        if parts is not None and parts < 1:
            raise ValueError(f"AllToAll: parts must be None or positive, got {parts!r}.")
        self._group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        self._ranks, self._split, self._held = self._group.size(), split, split.held[self._group.rank()]
        self._parts, self._partial = parts, partial
        self.capacity = capacity
        self.for_evaluation = self
        if capacity is not None:
            self.for_evaluation = AllToAll(mesh, split, parts=parts, partial=partial)
        self.needed: Tensor | None = None
        """The capacity that would have dropped nothing since :meth:`forget_needed`; None without one."""
        self._agreed: set[int] = set()
        self._orders: dict[tuple[torch.device, int], _Order] = {}
        self._edges: dict[tuple[torch.device, tuple[tuple[int, int], ...]], Tensor] = {}
        self._most_slots = 0
        """The most that any rank had in the last exact call: all ranks know it, so all cut alike."""

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of all ranks' tokens for the experts of this rank."""
        if self.capacity is not None:
            return self.dispatch_fixed(tokens, chosen, chosen.numel(), meanwhile)
        parts, places = self._parts_for(tokens, self._most_slots), max(self._split.held)
        if self._parts is None and places > parts:
            parts = (
                1  # grouping pays for itself only if the host is ahead, which it is not after it has waited
            )
        ways = self._order(tokens, parts)
        counted = count(chosen, len(ways.by_row), ways.number_of)
        numbers = chosen.new_empty(2, self._ranks, ways.places + 1, dtype=torch.int64)
        counts, received = numbers  # by rank and place in its list; and how many slots the sender has
        with_slots = pad(counted.counts, (0, 1), value=chosen.numel())
        torch.index_select(with_slots, 0, ways.by_rank, out=counts.view(-1))
        dist.all_to_all_single(received, counts, group=self._group)
        asked = Asked(numbers)
        # launched while the answer is on its way: the device must not wait for the host after it
        row_of, held = counted.rows(), received.sum(0)[: self._held]
        trip = Trip(self._group, row_of)
        if not self._partial and len(ways.parts) == 1:
            trip.begin(tokens)
        load = counted.counts[ways.number_of[:-1]]

        def arrange() -> tuple[Tensor, None]:
            rows = sum(map(sum, here))
            return find_arrival(received.view(-1), ways.by_row, ways.to_group, rows), None

        sent_to, received_from = asked.answer()  # the one wait for the device
        self._most_slots = max(each[-1] for each in received_from)
        there, here = (ways.by_part(each) for each in (sent_to, received_from))
        rows = trip.go(tokens, there, here, meanwhile, arrange if ways.mixes else None)
        return rows, held, Route(row_of, load, extra={"trip": trip})

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The weighted sums of outputs that came back."""
        trip: Trip = route.extra["trip"]
        return trip.come_back(outputs, weights)

    def forget_needed(self) -> None:
        """Count the capacity that is needed anew."""
        if self.needed is not None:
            self.needed.zero_()

    def dispatch_fixed(self, tokens: Tensor, chosen: Tensor, slots: int, meanwhile: Meanwhile) -> Dispatched:
        """Send every rank as many rows, from the capacity for ``slots``; no shape depends on the routes."""
        assert self.capacity is not None
        agree_on_tokens(len(tokens), self.capacity, self._agreed, self._group, tokens.device)
        ranks = self._ranks
        room = min(chosen.numel(), math.ceil(self.capacity * slots / ranks))
        parts = cut(room, self._parts_for(tokens, room * ranks))
        ways = self._order(tokens, 1)
        # by rank alone: ordered by expert too, the last one of a rank would lose all that does not fit
        counted = count(chosen, ranks, ways.rank_of)
        row_of, sent = counted.rows(self._edges_of(parts, tokens.device)), room * ranks
        slot_of = invert(row_of, sent)
        numbers = label(slot_of, chosen, ways.place_of)  # of padding the last
        by_rank = torch.cat([numbers[ranks * a : ranks * b].view(ranks, -1) for a, b in parts], 1)
        arriving = torch.empty_like(numbers)
        came = dist.all_to_all_single(arriving, by_rank.view(-1), group=self._group, async_op=True)
        trip = Trip(self._group, row_of, slot_of)
        found: dict[str, Tensor] = {}

        def arrange() -> tuple[Tensor, Tensor]:
            found.update(self._counted(chosen, counted.counts, room, slots))
            wait_all(came)
            # in the order of senders, so that sums have the same bits in any number of parts; padding is
            # last, and zeros: what experts make of it must not spoil gradients of what they share
            arrival, found["held"] = order(arriving, ways.places)
            by_part = [arrival.view(ranks, -1)[:, a:b].flatten() for a, b in parts]
            return torch.cat(by_part), found["held"]

        equal = [[last - first] * ranks for first, last in parts]
        rows = trip.go(tokens, equal, equal, meanwhile, arrange)
        route = Route(row_of, found["load"], found["dropped"], {"trip": trip})
        return rows, found["held"][: self._held], route

    def _counted(self, chosen: Tensor, counts: Tensor, room: int, slots: int) -> dict[str, Tensor]:
        """What is told of a call with a capacity; computed while rows travel."""
        self.needed = keep_largest(self.needed, counts.max() * (self._ranks / max(1, slots)))
        load = count(chosen, self._split.experts).counts
        return {"load": load, "dropped": (counts - room).clamp(min=0).sum()}

    def _parts_for(self, tokens: Tensor, rows: int) -> int:
        """Into how many parts so many rows are cut at most."""
        if self._parts is not None:
            return self._parts
        nbytes = rows * tokens.shape[1] * tokens.element_size()
        return _PARTS if tokens.is_cuda and nbytes >= _PARTS_FROM_BYTES else 1

    def _order(self, tokens: Tensor, parts: int) -> _Order:
        """Copied to the device once."""
        key = tokens.device, parts
        if key not in self._orders:
            self._orders[key] = _Order.of(self._split, parts, tokens.device)
        return self._orders[key]

    def _edges_of(self, parts: list[tuple[int, int]], device: torch.device) -> Tensor:
        """Where parts of the rows for a rank begin and end; copied once."""
        key = device, tuple(parts)
        if key not in self._edges:
            self._edges[key] = torch.tensor([0, *(last for _, last in parts)], device=device)
        return self._edges[key]


@dataclass(frozen=True)
class _Order:
    """How rows lie that leave, and that arrive: by part, by rank within it, and by place in its list.

    Numbers of experts have an entry for no expert too, one past the last.
    """

    places: int
    """In the longest list."""
    parts: list[tuple[int, int]]
    """The places of each part, from the first to before the last."""
    mixes: bool
    """Whether a part has several places, so that its rows do not arrive grouped."""
    number_of: Tensor
    """The kind of each expert's rows: a kind is of one rank and place, numbered as rows lie."""
    rank_of: Tensor
    place_of: Tensor
    by_rank: Tensor
    """The kinds by rank and place, and behind those of each rank the number of kinds."""
    by_row: Tensor
    """The other way round: where each kind is found by rank and place."""
    to_group: Tensor
    """Which of all kinds it is where rows are grouped: by place, and by rank within it."""

    @staticmethod
    def of(split: ExpertSplit, most_parts: int, device: torch.device) -> _Order:
        """The order of rows that are sent in at most so many parts."""
        ranks, places = split.ranks, max(split.held)
        parts = cut(places, most_parts)
        kinds = [(rank, at) for first, last in parts for rank in range(ranks) for at in range(first, last)]
        number = {kind: i for i, kind in enumerate(kinds)} | {(r, places): len(kinds) for r in range(ranks)}
        experts = [(rank, at) for rank, held in enumerate(split.held) for at in range(held)]
        lists: dict[str, list[int]] = {
            "number_of": [*map(number.__getitem__, experts), len(kinds)],
            "rank_of": [*(rank for rank, _ in experts), ranks],
            "place_of": [*(at for _, at in experts), places],
            "by_rank": [number[rank, at] for rank in range(ranks) for at in range(places + 1)],
            "by_row": [rank * (places + 1) + at for rank, at in kinds],
            "to_group": [at * ranks + rank for rank, at in kinds],
        }
        on_device = {name: torch.tensor(each, device=device) for name, each in lists.items()}
        return _Order(places, parts, len(parts) < places, **on_device)

    def by_part(self, counts: list[list[int]]) -> list[list[int]]:
        """Counts by rank and place as those of each part, by rank."""
        return [[sum(each[first:last]) for each in counts] for first, last in self.parts]


def all_to_all(mesh: DeviceMesh, split: ExpertSplit, *, capacity: float | None = None) -> Dispatcher:
    """:class:`AllToAll`, or :class:`Here` where one rank holds everything."""
    return Here(split.experts) if mesh.size() == 1 else AllToAll(mesh, split, capacity=capacity)


def agree_on_tokens(tokens: int, capacity: float, agreed: set[int], group: Any, device: torch.device) -> None:
    """Refuse numbers of tokens, or a capacity, that are not those of the other ranks, which would wait for
    ever; compared once for each number of tokens."""
    if tokens in agreed:
        return
    differs = compare(f"{tokens} tokens, capacity {capacity}", [group], device)
    if differs is not None:
        raise ValueError(
            f"AllToAll: ranks must have the same capacity, and with it as many tokens; {differs.difference}."
        )
    agreed.add(tokens)
