"""What Muon does with the matrices of an exchange: momentum before, the iteration, weights after.

Before the iteration: ``m <- lerp(m, g, 1 - momentum)`` and the update ``lerp(g, m, momentum)`` (Nesterov)
or ``m``, cast into the memory it is sent from or iterated in. After it: ``p <- p (1 - lr wd) - step u``.
The arithmetic is that of ``torch.optim.Muon``. Each element is computed alike however a tensor is cut,
so results do not depend on the sharding.

The plain version uses torch's foreach operations. On CUDA one Triton kernel per pass does the same with
a single read and write of every operand. It is launched for all links of a pass at once where they have no
gaps and their tensors are alike: then the addresses of a step are computed from columns. Everything else
goes link by link, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ragged_fsdp.optim.exchange.matrices import Spot
from ragged_fsdp.optim.exchange.program import BatchKind, LinkColumns, Links, MatrixId
from ragged_fsdp.optim.muon.newton_schulz import has_triton

__all__ = ["Addresses", "FamilyStep", "LocalState", "MuonWork", "Strided", "apply_updates", "update_momentum"]

Integers = npt.NDArray[np.int64]


class LocalState(NamedTuple):
    """One parameter on this rank: contiguous tensors of equal size. No gradient, no change."""

    parameter: Tensor
    gradient: Tensor | None
    buffer: Tensor


@dataclass(frozen=True)
class FamilyStep:
    """What the parameters of one family (a param group) share in this step."""

    momentum: float
    nesterov: bool
    decay: float
    lr: float
    scale_of: Callable[[int, int], float]
    """Factor on the learning rate for a matrix of so many rows and columns."""
    orthogonalize: Callable[[Tensor], Tensor]
    """Makes a batch (matrices, rows, columns), which may be overwritten, orthogonal."""

    def slab_scale(self, kind: BatchKind) -> float:
        """A slab is applied with the scale of its first matrix; :meth:`MuonWork.work` scales the others."""
        return self.scale_of(kind.matrices[0].rows, kind.matrices[0].columns)


class Strided(NamedTuple):
    """Some elements of a contiguous tensor.

    A step makes several for each matrix, so this is the cheapest kind of record there is.
    """

    tensor: Tensor
    spot: Spot

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.spot.numel

    @property
    def address(self) -> int:
        """Where the first element lies in memory."""
        return self.tensor.data_ptr() + self.spot.start * self.tensor.element_size()

    def view(self) -> Tensor:
        """The elements as a tensor of shape (rows, run)."""
        return self.spot.view(self.tensor)


class MuonWork:
    """One step of Muon as the :class:`~ragged_fsdp.optim.exchange.MatrixWork` of an exchange.

    ``states`` are those of the parameters of the exchange, ``families`` those that its members name.
    """

    def __init__(self, states: Sequence[LocalState], families: Sequence[FamilyStep]) -> None:
        self._states = states
        self._families = families
        self._addresses = addresses_of(states)

    def collect(self, links: Links, buffers: Sequence[Tensor]) -> None:
        """Update the momentum of the links and write the updates to their far ends."""
        family = self._families[links.family]
        if (found := self._at_once(links, buffers)) is not None:
            from ragged_fsdp.optim.muon.passes_kernel import launch_momentum_rows

            columns, addresses = found
            dtypes = addresses.gradient_dtype, addresses.dtype, buffers[0].dtype
            rows = momentum_rows(columns, addresses, buffers)
            launch_momentum_rows(rows, dtypes, buffers[0].device, family.momentum, family.nesterov)
            return
        gradients, held, targets = [], [], []
        for link in links:
            state = self._states[link.parameter]
            # nowhere: another replica sends these elements
            target = Strided(buffers[link.buffer], link.far) if link.buffer >= 0 else None
            if state.gradient is not None:
                gradients.append(Strided(state.gradient, link.near))
                held.append(Strided(state.buffer, link.near))
                targets.append(target)
            elif target is not None:
                target.view().zero_()  # the transfer has a fixed size; the result is not used
        update_momentum(gradients, held, targets, family.momentum, family.nesterov)

    def work(self, matrices: Tensor, kind: BatchKind, ids: Sequence[MatrixId]) -> Tensor:
        """Orthogonalize the matrices."""
        family, (_, rows, columns) = self._families[kind.family], matrices.shape
        done = family.orthogonalize(matrices)
        if (rows, columns) == (kind.matrices[0].rows, kind.matrices[0].columns):
            return done
        ratio = family.scale_of(rows, columns) / family.slab_scale(kind)
        return done if ratio == 1.0 else done * ratio

    def apply(self, links: Links, buffers: Sequence[Tensor]) -> None:
        """Apply the updates at the far ends of the links to the parameters that have a gradient."""
        family = self._families[links.family]
        if (found := self._at_once(links, buffers)) is not None:
            from ragged_fsdp.optim.muon.passes_kernel import launch_apply_rows

            columns, addresses = found
            lengths = [family.lr * family.slab_scale(kind) for kind in columns.kinds]
            rows = apply_rows(columns, addresses, buffers, lengths)
            launch_apply_rows(rows, (addresses.dtype, buffers[0].dtype), buffers[0].device, family.decay)
            return
        present = [link for link in links if self._states[link.parameter].gradient is not None]
        apply_updates(
            [Strided(self._states[link.parameter].parameter, link.near) for link in present],
            [Strided(buffers[link.buffer], link.far) for link in present],
            [family.lr * family.slab_scale(link.kind) for link in present],
            family.decay,
        )

    def _at_once(self, links: Links, buffers: Sequence[Tensor]) -> tuple[LinkColumns, Addresses] | None:
        """The columns and addresses of a pass that one launch can do."""
        if self._addresses is None or buffers[0].dtype == torch.float64 or links.columns is None:
            return None
        return links.columns, self._addresses


def update_momentum(
    gradients: list[Strided],
    buffers: list[Strided],
    targets: list[Strided | None],
    momentum: float,
    nesterov: bool,
) -> None:
    """Update the momentum buffers and write the updates into their targets, where there is one."""
    if not gradients:
        return
    with_target = [t for t in targets if t is not None]
    if _one_kernel(gradients + buffers + with_target):
        from ragged_fsdp.optim.muon.passes_kernel import launch_momentum

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


def apply_updates(
    parameters: list[Strided], updates: list[Strided], steps: list[float], decay: float
) -> None:
    """``p <- p * decay - step * u``, with a step for each entry."""
    if not parameters:
        return
    if _one_kernel(parameters + updates):
        from ragged_fsdp.optim.muon.passes_kernel import launch_apply

        launch_apply(parameters, updates, steps, decay)
        return
    targets = [p.view() for p in parameters]
    if decay != 1.0:
        torch._foreach_mul_(targets, decay)
    for target, update, step in zip(targets, updates, steps):
        target.add_(update.view().to(target.device), alpha=-step)


def _kernels_take(tensors: Iterable[Tensor]) -> bool:
    """Whether the Triton kernels can work on these tensors; they compute in fp32."""
    return has_triton() and all(t.is_cuda and t.dtype != torch.float64 for t in tensors)


def _one_kernel(entries: list[Strided]) -> bool:
    return _kernels_take(entry.tensor for entry in entries) and all(
        entry.spot.contiguous for entry in entries
    )


@dataclass(frozen=True)
class Addresses:
    """First bytes of the parameters of an exchange in this step, and their dtypes."""

    gradient: Integers
    buffer: Integers
    parameter: Integers
    gradient_dtype: torch.dtype
    dtype: torch.dtype


def addresses_of(states: Sequence[LocalState]) -> Addresses | None:
    """Where the tensors of all parameters lie; None unless one kernel can take them all."""
    parameters = [state.parameter for state in states]
    buffers = [state.buffer for state in states]
    gradients = [state.gradient for state in states if state.gradient is not None]
    if not states or len(gradients) < len(states):
        return None
    if not _kernels_take((*parameters, *gradients, *buffers)):
        return None
    gradient_dtypes = {g.dtype for g in gradients}
    dtypes = {t.dtype for t in (*parameters, *buffers)}
    if len(gradient_dtypes) > 1 or len(dtypes) > 1:
        return None
    return Addresses(
        _pointers(gradients), _pointers(buffers), _pointers(parameters), gradient_dtypes.pop(), dtypes.pop()
    )


def momentum_rows(columns: LinkColumns, addresses: Addresses, buffers: Sequence[Tensor]) -> Integers:
    """Gradient, buffer, target (0: none) and element count of each link."""
    rows = np.empty((columns.numel.size, 4), np.int64)
    gradient_bytes = columns.near_start * addresses.gradient_dtype.itemsize
    rows[:, 0] = addresses.gradient[columns.parameter] + gradient_bytes
    rows[:, 1] = addresses.buffer[columns.parameter] + columns.near_start * addresses.dtype.itemsize
    rows[:, 2] = np.where(columns.buffer < 0, 0, _far_addresses(columns, buffers))
    rows[:, 3] = columns.numel
    return rows


def apply_rows(
    columns: LinkColumns, addresses: Addresses, buffers: Sequence[Tensor], steps: Sequence[float]
) -> Integers:
    """Parameter, update, step (the bits of a double) and element count of each link; a step per kind."""
    rows = np.empty((columns.numel.size, 4), np.int64)
    rows[:, 0] = addresses.parameter[columns.parameter] + columns.near_start * addresses.dtype.itemsize
    rows[:, 1] = _far_addresses(columns, buffers)
    rows[:, 2] = np.asarray(steps, np.float64).view(np.int64)[columns.kind]
    rows[:, 3] = columns.numel
    return rows


def _pointers(tensors: Sequence[Tensor]) -> Integers:
    return np.fromiter((t.data_ptr() for t in tensors), np.int64, len(tensors))


def _far_addresses(columns: LinkColumns, buffers: Sequence[Tensor]) -> Integers:
    return _pointers(buffers)[columns.buffer] + columns.far_start * buffers[0].element_size()
