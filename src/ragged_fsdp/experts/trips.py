"""The trip of a layer's rows to their experts and back, in parts: one travels while the next is put in order.

Rows wait for each other only where something needs all of them. So the sender puts the first part of its rows
in order and sends it, and orders the second part while the first travels; and where rows are grouped on
arrival, the receiver groups the first part while the second travels::

    sender     order 0 | order 1 | order 2 |                    sum
    network            | part 0  | part 1  | part 2 |
    receiver                     | group 0 | group 1 | group 2 | experts

Backward, and the way back, are cut in the same places. What a layer waits for beside the network is the first
part that is ordered, the last one that is grouped, and the sums.

A trip is four nodes of autograd: rows leave, arrive, leave again, and are added up. The first and the third
start messages that the next one waits for; backward starts them in the fourth and the second. Between two of
them rows are on the wire: their tensor stands in the graph, and nobody may touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise, starmap
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ragged_fsdp.collectives import wait_all
from ragged_fsdp.experts.exchange import Meanwhile, call
from ragged_fsdp.experts.permute import add_up, back_into, invert, pick_into, rows_to_fill, take_into

__all__ = ["Trip", "cut"]

Arrange = Callable[[], tuple[Tensor, Tensor | None]]
"""Called once rows are on their way: the place of each row that comes among those of the experts, -1 of
padding; and numbers that add up to how many are no padding, None if all are."""
Sizes = Sequence[list[int]]
"""For each part, how many rows go to, or come from, each rank of the group."""
Edges = list[tuple[int, int]]


def cut(units: int, parts: int) -> Edges:
    """Where at most so many parts of ``units`` begin and end.

    The first one is small, since nothing travels while it is put in order, and the next not much larger,
    since it is put in order while that travels; the last is small, since nothing travels while it is grouped.
    """
    parts = max(1, min(parts, units))
    shares = [1.0, 4.0, *[8 / (parts - 3)] * (parts - 3), 3.0] if parts > 3 else [1.0] * parts
    edges = [round(units * done / sum(shares)) for done in accumulate(shares, initial=0)]
    for part in range(1, parts):  # none is empty
        edges[part] = min(max(edges[part], edges[part - 1] + 1), units - parts + part)
    return list(pairwise(edges))


class _Way(NamedTuple):
    """What a rank sends and receives in one direction."""

    sent: Sizes
    received: Sizes
    leaves: Edges
    """Where each part starts and ends among the rows that leave."""
    arrives: Edges

    @property
    def back(self) -> _Way:
        return _Way(self.received, self.sent, self.arrives, self.leaves)


class Trip:
    """One layer's rows, from the tokens of this rank to the experts of all, and back.

    Args:
        group: the ranks that exchange rows.
        row_of: the row of each slot of this rank's tokens, in the order in which rows leave.
        slot_of: the slot of each of these rows, if that is known.
    """

    def __init__(self, group: Any, row_of: Tensor, slot_of: Tensor | None = None) -> None:
        self.row_of = row_of
        self.tokens = 0
        """How many tokens this rank has."""
        self.dtype: torch.dtype | None = None
        """The dtype of the tokens."""
        self._group, self._travels = group, group.size() > 1
        self._overlaps = False
        """Whether something is done while rows are on their way."""
        self._there: _Way = None  # type: ignore[assignment]  # from ``go`` on
        self._ordered: Tensor | None = None
        """Rows that were put in order before it was known how many they are."""
        self._slot_of = slot_of
        """The slot of each row that leaves; needed where they leave in several parts."""
        self._arrival: Tensor | None = None
        """The place of each row that came among those of the experts; None if they come in their order."""
        self._filled: Tensor | None = None
        self._under_way: tuple[list[Any], Tensor, Tensor] | None = None
        """What to wait for, what is sent, and where it arrives."""

    def begin(self, tokens: Tensor) -> None:
        """Put all rows in order, before it is known how many leave: all slots have room."""
        self._ordered = tokens.new_empty(len(self.row_of), tokens.shape[1])
        take_into(self._ordered, tokens.detach(), self.row_of)

    def go(
        self,
        tokens: Tensor,
        sent: Sizes,
        received: Sizes,
        meanwhile: Meanwhile = None,
        arrange: Arrange | None = None,
    ) -> Tensor:
        """The rows of the experts held here; as they came, if they are not arranged.

        Sizes are those of each part, by rank. ``meanwhile`` is called while rows are on their way; what
        it puts into the graph lies between their start and their arrival, so backward computes it while the
        gradients are on theirs.
        """
        self.dtype, self.tokens = tokens.dtype, len(tokens)
        self._there = _Way(sent, received, _edges(sent), _edges(received))
        self._overlaps = len(sent) > 1 or meanwhile is not None
        if len(sent) > 1 and self._slot_of is None:
            self._slot_of = invert(self.row_of, self._there.leaves[-1][1])
        arriving: Tensor = _Leave.apply(tokens, self)
        call(meanwhile)
        if arrange is not None:
            self._arrival, self._filled = arrange()
        rows: Tensor = _Arrive.apply(arriving, self)
        return rows

    def come_back(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """The sums of what the experts made of each token: weighted (N, K), in the dtype of the tokens, or
        not, in that of the outputs."""
        summed: Tensor = _AddUpRows.apply(_LeaveAgain.apply(outputs, self), weights, self)
        return summed

    # -- both ways, of rows and of gradients ---------------------------------------------------------

    def send_there(self, rows: Tensor, make: Callable[[slice], None] | None) -> Tensor:
        """Send rows to the experts, each part when it has been made, if they are not there yet.

        Where they arrive, which nobody may touch before they have been waited for.
        """
        arriving = self._open(rows, self._there)
        for part, own in enumerate(starmap(slice, self._there.leaves)):
            if make is not None:
                make(own)
            self._launch(part, self._there)
        return arriving

    def take(self, rows: Tensor, tokens: Tensor, own: slice) -> None:
        """Put a part of the rows of tokens in order."""
        if self._slot_of is None:
            take_into(rows, tokens, self.row_of)
        else:
            pick_into(rows[own], tokens, self._slot_of[own], len(self.row_of) // max(1, self.tokens))

    def back(
        self, into: tuple[Tensor, Tensor], grad: Tensor, rows: Tensor, weights: Tensor, own: slice
    ) -> None:
        """Gradients of a part of the rows, and of their weights."""
        slot_of = invert(self.row_of, len(rows)) if self._slot_of is None else self._slot_of
        back_into((into[0][own], into[1]), grad, rows[own], weights, slot_of[own])

    def send_back(self, rows: Tensor) -> Tensor:
        """Send rows of the experts to whom they came from, in the order in which they came.

        Where they arrive, which nobody may touch before they have been waited for.
        """
        leaving = rows = rows.contiguous()
        if self._arrival is not None:
            leaving = rows.new_empty(len(self._arrival), rows.shape[1])
        arriving = self._open(leaving, self._there.back)
        for part, own in enumerate(starmap(slice, self._there.arrives)):
            if self._arrival is not None:
                pick_into(leaving[own], rows, self._arrival[own])
            self._launch(part, self._there.back)
        return arriving

    def wait_there(self) -> Tensor:
        """What came for the experts, in their order."""
        works, _sent, arrived = self._close()  # what was sent must live until all has been waited for
        if self._arrival is None:
            wait_all(works)
            return arrived
        grouped = rows_to_fill(arrived, len(self._arrival), self._filled)
        for number, own in enumerate(starmap(slice, self._there.arrives)):
            wait_all(works[number : number + 1])
            take_into(grouped, arrived[own], self._arrival[own])
        return grouped

    def wait_back(self) -> Tensor:
        """What came back, in the order in which rows left."""
        works, _sent, arrived = self._close()
        wait_all(works)
        return arrived

    @property
    def leaving(self) -> Tensor:
        """What is on its way, for its shape."""
        assert self._under_way is not None
        return self._under_way[1]

    def _open(self, leaving: Tensor, way: _Way) -> Tensor:
        arriving = leaving
        if self._travels:
            arriving = leaving.new_empty(way.arrives[-1][1], leaving.shape[1])
        # both are held until they have been waited for: memory that the wire uses must not go to others
        self._under_way = [], leaving, arriving
        return arriving

    def _launch(self, part: int, way: _Way) -> None:
        assert self._under_way is not None
        works, leaving, arriving = self._under_way
        if self._travels:
            into, given = arriving[slice(*way.arrives[part])], leaving[slice(*way.leaves[part])]
            sizes = way.received[part], way.sent[part]
            work = dist.all_to_all_single(into, given, *sizes, group=self._group, async_op=self._overlaps)
            works.append(work)

    def _close(self) -> tuple[list[Any], Tensor, Tensor]:
        assert self._under_way is not None
        under_way, self._under_way = self._under_way, None
        return under_way


def _edges(sizes: Sizes) -> Edges:
    """Where the rows of each part begin and end."""
    return list(pairwise(accumulate(map(sum, sizes), initial=0)))


class _Leave(torch.autograd.Function):
    """Tokens become rows on their way; backward adds up the gradients that came back to a token's rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        rows, trip._ordered = trip._ordered, None
        if rows is not None:
            return trip.send_there(rows, None)
        rows = tokens.new_empty(trip._there.leaves[-1][1], tokens.shape[1])
        return trip.send_there(rows, partial(trip.take, rows, tokens))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        trip, back = ctx.trip, ctx.trip.wait_back()
        return add_up(back, None, trip.row_of, trip.tokens, back.dtype), None


class _Arrive(torch.autograd.Function):
    """Rows that arrived, as the experts take them; backward lets their gradients leave."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        rows = trip.wait_there()
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.trip.send_back(grads[0])
        return ctx.trip.leaving, None  # only for its shape: what is on its way is the trip's


class _LeaveAgain(torch.autograd.Function):
    """Outputs of the experts on their way back; backward takes in the gradients that come to them."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.send_back(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.trip.wait_there(), None


class _AddUpRows(torch.autograd.Function):
    """Tokens from the rows that come back; backward sends each row its gradient, part by part."""

    @staticmethod
    def forward(ctx: Any, returning: Tensor, weights: Tensor | None, trip: Trip) -> Tensor:
        ctx.trip, rows = trip, trip.wait_back()
        ctx.save_for_backward(rows, weights)
        dtype = rows.dtype if weights is None else trip.dtype
        assert dtype is not None
        return add_up(rows, weights, trip.row_of, trip.tokens, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        trip, (rows, weights) = ctx.trip, ctx.saved_tensors
        of_rows = rows_to_fill(rows, len(rows), None)
        if weights is None:
            trip.send_there(of_rows, partial(trip.take, of_rows, grads[0]))
            return of_rows, None, None
        into = of_rows, torch.zeros_like(weights)
        back = partial(trip.back, into, grads[0], rows, weights)
        if not ctx.needs_input_grad[0]:  # nobody waits for what would be sent
            back(slice(None))
            return None, into[1], None
        trip.send_there(of_rows, back)
        return *into, None
