"""Rows of tokens sent to the ranks of their experts and back: :class:`AllToAll`, exact or with a capacity.

The exact way asks the device how many rows there are: the host must know to allocate. With a ``capacity`` it
does not: each rank sends each other one a fixed number of rows, and what does not fit is dropped and counted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged_fsdp.agreement import compare
from ragged_fsdp.experts.dispatch import Dispatched, Dispatcher, Here, Route, check_group
from ragged_fsdp.experts.exchange import Asked, Meanwhile, exchange
from ragged_fsdp.experts.permute import combine, count, order, place, take
from ragged_fsdp.experts.split import ExpertSplit
from ragged_fsdp.experts.tally import keep_largest

__all__ = ["AllToAll", "agree_on_tokens", "all_to_all"]


class AllToAll:
    """Rows are sent to their experts, and outputs back.

    An exchange for each place in a rank's list of experts lets rows arrive grouped. The sender orders its
    rows by that place, and by rank within it, so each of these exchanges sends and receives what lies
    together, and nobody moves a row a second time::

        rank 0   a0 a1 c0 c1 | b0 d0       experts a, b are on rank 0, c, d on rank 1
        rank 1   a2          | b1 b2 d1

        rank 0 receives   a0 a1 a2 | b0 b1 b2        rank 1   c0 c1 | d0 d1

    NCCL launches them as one. Where a rank holds many experts, or with a capacity, all rows come in one
    exchange, ordered by sender, and are grouped here: one more pass over them.

    Args:
        mesh: the ranks that experts are spread over, a 1-D mesh or a process group.
        split: how many experts each of them holds.
        capacity: None sends what there is. A number is the rows that each rank sends each other one, as a
            multiple of those it would send if tokens went everywhere alike: 2.0 has room for twice as many.
            It fixes every shape, so nothing waits for the device; what does not fit is dropped. All ranks
            must then have as many tokens; the first call with a number of them compares. In evaluation mode
            everything is sent.
        most_exchanges: rows come in an exchange per expert if no rank holds more experts than this.
        partial: many slots are of no expert, so room for rows is made once it is known how many are sent.
    """

    def __init__(
        self,
        mesh: DeviceMesh | dist.ProcessGroup,
        split: ExpertSplit,
        *,
        capacity: float | None = None,
        most_exchanges: int = 32,
        partial: bool = False,
    ) -> None:
        if isinstance(mesh, DeviceMesh):
            check_group(type(self).__name__, mesh, split)
        if capacity is not None and not capacity > 0:
            raise ValueError(f"AllToAll: capacity must be None or positive, got {capacity!r}.")
        self._group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        self._ranks, self._most = self._group.size(), max(split.held)
        self._split, self._held = split, split.held[self._group.rank()]
        self._partial, self._by_expert = partial, capacity is None and self._most <= most_exchanges
        self.capacity = capacity
        self.for_evaluation = self
        if capacity is not None:
            self.for_evaluation = AllToAll(mesh, split, most_exchanges=most_exchanges, partial=partial)
        self.needed: Tensor | None = None
        """The capacity that would have dropped nothing since :meth:`forget_needed`; None without one."""
        self._agreed: set[int] = set()
        self._constants: dict[torch.device, tuple[Tensor, ...]] = {}

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of all ranks' tokens for the experts of this rank."""
        if self.capacity is not None:
            return self.dispatch_fixed(tokens, chosen, chosen.numel(), meanwhile)
        by_rank, by_place, _, _ = self._on(chosen.device)
        numbers = chosen.new_zeros(2, self._ranks, self._most, dtype=torch.int64)
        counts, received = numbers
        if self._by_expert:
            counted = count(chosen, counts.numel(), by_place, into=counts)
        else:
            counted = count(chosen, counts.numel(), by_rank, into=counts.view(-1))
        dist.all_to_all_single(received, counts, group=self._group)
        asked = Asked(numbers)
        # launched while the answer is on its way: the device must not wait for the host after it
        row_of, held = counted.rows(None), received.sum(0)[: self._held]
        load = counts.view(-1) if self._split.is_even else counts.view(-1)[by_rank[:-1]]
        rows = None if self._partial else take(tokens, row_of, len(row_of))
        sent_to, received_from = asked.answer()  # the one wait for the device; both (rank, place in its list)
        if self._by_expert:
            there, here = ([list(column) for column in zip(*each)] for each in (sent_to, received_from))
        else:
            there, here = ([[sum(row) for row in each]] for each in (sent_to, received_from))
        sent = sum(map(sum, there))
        if rows is None:
            rows = take(tokens, row_of, sent)
        elif sent < len(rows):  # slots of no expert have no row
            rows = rows[:sent]
        arrived = exchange(rows, there, here, self._group, meanwhile)
        route = Route(row_of, load, extra={"dtype": tokens.dtype, "there": there, "here": here})
        if self._by_expert:
            return arrived, held, route
        places = torch.arange(self._most, device=tokens.device).repeat(self._ranks)
        places = places.repeat_interleave(received.flatten(), output_size=len(arrived))
        return self._grouped(arrived, places, route)

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The weighted sums of outputs that came back."""
        way = route.extra
        if "arrival" in way:
            arrival = way["arrival"]
            outputs = combine(outputs, None, arrival, len(arrival), filled=way["filled"])
        back = exchange(outputs, way["here"], way["there"], self._group)
        return combine(back, weights, route.row_of, len(weights), dtype=way["dtype"])

    def forget_needed(self) -> None:
        """Count the capacity that is needed anew."""
        if self.needed is not None:
            self.needed.zero_()

    def dispatch_fixed(self, tokens: Tensor, chosen: Tensor, slots: int, meanwhile: Meanwhile) -> Dispatched:
        """Send every rank as many rows, from the capacity for ``slots``; no shape depends on the routes."""
        assert self.capacity is not None
        agree_on_tokens(len(tokens), self.capacity, self._agreed, self._group, tokens.device)
        _, _, rank_of, place_of = self._on(tokens.device)
        # by rank alone: ordered by expert too, the last one of a rank would lose all that does not fit
        counted = count(chosen, self._ranks, rank_of)
        room = min(chosen.numel(), math.ceil(self.capacity * slots / self._ranks))
        self.needed = keep_largest(self.needed, counted.counts.max() * (self._ranks / max(1, slots)))
        row_of, sent = counted.rows(room), room * self._ranks
        equal = [[room] * self._ranks]
        numbers = place(place_of[chosen.flatten()], row_of, sent, self._most)  # one past the last: padding
        numbers = exchange(numbers, equal, equal, self._group)
        rows = exchange(take(tokens, row_of, sent), equal, equal, self._group, meanwhile)
        dropped = (counted.counts - room).clamp(min=0).sum()
        route = Route(row_of, count(chosen, self._split.experts).counts, dropped)
        route.extra.update(dtype=tokens.dtype, there=equal, here=equal)
        return self._grouped(rows, numbers, route)

    def _grouped(self, rows: Tensor, places: Tensor, route: Route) -> Dispatched:
        """Rows that came ordered by sender, in the order of their experts, whose places are given."""
        arrival, counts = order(places, self._most)
        # padding is last, and zeros: what experts make of it must not spoil gradients of what they share
        filled = None if self.capacity is None else counts
        route.extra.update(arrival=arrival, filled=filled)
        grouped = take(rows, arrival, len(arrival), filled=filled)
        return grouped, counts[: self._held], route

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Each expert's number, by rank and then place there, and the other way round; its rank, and its
        place. Copied once; there is an entry for no expert too, one past the last number of each.
        """
        if device not in self._constants:
            ranks, most = self._ranks, self._most
            places = [(rank, i) for rank, held in enumerate(self._split.held) for i in range(held)]
            numbers = [(rank * most + place, place * ranks + rank, rank, place) for rank, place in places]
            numbers.append((ranks * most, ranks * most, ranks, most))
            self._constants[device] = tuple(torch.tensor(each, device=device) for each in zip(*numbers))
        return self._constants[device]


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
