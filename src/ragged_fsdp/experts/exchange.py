"""Rows of tokens that are sent to the ranks of a group, forward and backward.

An exchange sends each rank some rows and receives some from each. How many must be known to the host, for
which :class:`Asked` brings numbers there while the device goes on. Backward sends the gradients back the same
way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Asked", "Meanwhile", "call", "exchange"]

Meanwhile = Callable[[], None] | None
"""Work that needs no rows of other ranks: shared experts."""


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


def exchange(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Rows cut by ``sent`` to the ranks of a group, and the rows that they send here, in their order."""
    if group.size() == 1:
        return rows
    arrived: Tensor = _Exchange.apply(rows, sent, received, group)
    return arrived


class _Exchange(torch.autograd.Function):
    """An exchange that is waited for where it is made."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.back = (received, sent, group)
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchange.apply(grads[0], *ctx.back), None, None, None
