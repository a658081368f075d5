"""Rows of tokens that are sent to the ranks of a group, forward and backward.

An exchange sends each rank some rows and receives some from each. How many must be known to the host, for
which :class:`Asked` brings numbers there while the device goes on. Backward sends the gradients back the same
way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ragged_fsdp.torch_internals import joined_launch

__all__ = ["Asked", "Meanwhile", "PieceSizes", "call", "exchange"]

Meanwhile = Callable[[], None] | None
"""Work that needs no rows of other ranks: shared experts."""
PieceSizes = Sequence[list[int]]
"""For each exchange, how many rows go to, or come from, each rank of the group."""


class Asked:
    """Numbers on their way to the host, so that the device can be given work before they are read."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._event = numbers.to("cpu", non_blocking=numbers.is_cuda), None
        if numbers.is_cuda:  # without the event the numbers would be read before they are there
            self._event = torch.cuda.Event()
            self._event.record()

    def answer(self) -> Any:
        """The numbers as lists; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


def call(meanwhile: Meanwhile) -> None:
    """Do what was to be done while rows travel, where none do."""
    if meanwhile is not None:
        meanwhile()


def exchange(
    rows: Tensor,
    sent: PieceSizes,
    received: PieceSizes,
    group: Any,
    meanwhile: Meanwhile = None,
) -> Tensor:
    """Rows cut by ``sent`` to the ranks of a group, and the rows that they send here, in their order.

    With several pieces one exchange after the other, as one launch if the backend can. ``meanwhile`` is
    called while rows are on their way. What it puts into the graph lies between the start and the end of the
    exchange, so backward computes it while the gradients are on theirs.
    """
    if group.size() == 1:
        call(meanwhile)
        return rows
    if meanwhile is None:
        together: Tensor = _Exchange.apply(rows, sent, received, group)
        return together
    trip = _Trip(sent, received, group)
    arriving: Tensor = _Leave.apply(rows, trip)
    meanwhile()
    arrived: Tensor = _Arrive.apply(arriving, trip)
    return arrived


def _start(
    rows: Tensor, sent: PieceSizes, received: PieceSizes, group: Any, async_op: bool
) -> tuple[Tensor, list[Any]]:
    """Send; where rows will be, and what to wait for."""
    result = rows.new_empty((sum(map(sum, received)), *rows.shape[1:]))
    parts = result.split([sum(n) for n in received]), rows.split([sum(n) for n in sent])
    # one exchange is launched by itself, which costs the host less
    with joined_launch(group, rows.device, async_op) if len(sent) > 1 else nullcontext([]) as works:
        for into, given, here, there in zip(*parts, received, sent):
            works.append(dist.all_to_all_single(into, given, here, there, group=group, async_op=async_op))
    return result, works


class _Exchange(torch.autograd.Function):
    """An exchange that is waited for where it is made."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: PieceSizes, received: PieceSizes, group: Any) -> Tensor:
        ctx.back = (received, sent, group)
        return _start(rows.contiguous(), sent, received, group, False)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchange.apply(grads[0], *ctx.back), None, None, None


class _Trip:
    """One exchange and the one of its gradients: sizes, and what is on its way."""

    def __init__(self, sent: PieceSizes, received: PieceSizes, group: Any) -> None:
        self.sent, self.received, self.group = sent, received, group
        self._under_way: tuple[list[Any], Tensor, Tensor] | None = None

    def start(self, rows: Tensor, sent: PieceSizes, received: PieceSizes) -> Tensor:
        """Send; the result may not be touched before :meth:`wait`."""
        given = rows.contiguous()
        result, works = _start(given, sent, received, self.group, True)
        self._under_way = (works, given, result)  # memory that is still read or written must not go back
        return result

    def wait(self) -> Tensor:
        """What has arrived, once the current stream may use it."""
        assert self._under_way is not None
        (works, _, result), self._under_way = self._under_way, None
        for work in works:
            if work is not None:
                work.wait()
        return result


class _Leave(torch.autograd.Function):
    """Starts an exchange; backward waits for that of the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.start(rows, trip.sent, trip.received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.trip.wait(), None


class _Arrive(torch.autograd.Function):
    """Waits for an exchange; backward starts that of the gradients."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.wait()
        return arriving.view_as(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        trip = ctx.trip
        trip.start(grads[0], trip.received, trip.sent)
        return grads[0], None  # only for its shape: what is on its way is the trip's
