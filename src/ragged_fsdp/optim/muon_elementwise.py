"""The element-wise passes of Muon over lists of pieces of tensors.

Before the iteration: ``m <- lerp(m, g, 1 - momentum)`` and the update ``lerp(g, m, momentum)`` (Nesterov)
or ``m``, cast into the memory it is sent from or iterated in. After it: ``p <- p (1 - lr wd) - step u``.
The arithmetic is that of ``torch.optim.Muon``. Each element is computed alike however a tensor is cut,
so results do not depend on the sharding.

The plain version uses torch's foreach operations. On CUDA one Triton kernel per pass does the same with
a single read and write of every operand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ragged_fsdp.optim.newton_schulz import has_triton

__all__ = ["Piece", "apply_updates", "kernels_take", "update_momentum"]


class Piece(NamedTuple):
    """``rows`` runs of ``run`` elements of a contiguous tensor, ``stride`` apart.

    A step makes several for each matrix, so this is the cheapest kind of record there is.
    """

    tensor: Tensor
    start: int
    rows: int
    run: int
    stride: int

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other."""
        return self.rows == 1 or self.stride == self.run

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.rows * self.run

    @property
    def address(self) -> int:
        """Where a contiguous piece begins in memory."""
        return self.tensor.data_ptr() + self.start * self.tensor.element_size()

    def view(self) -> Tensor:
        """The piece as a tensor of shape (rows, run)."""
        offset = self.tensor.storage_offset() + self.start
        return self.tensor.as_strided((self.rows, self.run), (self.stride, 1), offset)


def update_momentum(
    gradients: list[Piece], buffers: list[Piece], targets: list[Piece | None], momentum: float, nesterov: bool
) -> None:
    """Update the momentum buffers and write the updates into their targets, where there is one."""
    if not gradients:
        return
    with_target = [t for t in targets if t is not None]
    if _one_kernel(gradients + buffers + with_target):
        from ragged_fsdp.optim.muon_elementwise_triton import launch_momentum

        launch_momentum(gradients, buffers, targets, momentum, nesterov)
        return
    held = [b.view() for b in buffers]
    arrived = [g.view().to(b.dtype) for g, b in zip(gradients, held)]
    torch._foreach_lerp_(held, arrived, 1.0 - momentum)
    if not with_target:
        return
    wanted = [i for i, t in enumerate(targets) if t is not None]
    updates = [held[i] for i in wanted]
    if nesterov:
        updates = list(torch._foreach_lerp([arrived[i] for i in wanted], updates, momentum))
    torch._foreach_copy_([t.view() for t in with_target], updates)


def apply_updates(parameters: list[Piece], updates: list[Piece], steps: list[float], decay: float) -> None:
    """``p <- p * decay - step * u``, with a step per piece."""
    if not parameters:
        return
    if _one_kernel(parameters + updates):
        from ragged_fsdp.optim.muon_elementwise_triton import launch_apply

        launch_apply(parameters, updates, steps, decay)
        return
    targets = [p.view() for p in parameters]
    if decay != 1.0:
        torch._foreach_mul_(targets, decay)
    for target, update, step in zip(targets, updates, steps):
        target.add_(update.view().to(target.device), alpha=-step)


def kernels_take(tensors: Iterable[Tensor]) -> bool:
    """Whether the Triton kernels can work on these tensors; they compute in fp32."""
    return has_triton() and all(t.is_cuda and t.dtype != torch.float64 for t in tensors)


def _one_kernel(pieces: list[Piece]) -> bool:
    return kernels_take(p.tensor for p in pieces) and all(p.contiguous for p in pieces)
