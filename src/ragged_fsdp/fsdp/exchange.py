"""Gradients that travel in their own dtype and are summed in the reduction dtype: no pass over them before.

A reduce-scatter adds on the way, so it must carry the dtype of the sum: fp32 sums of bf16 gradients cost
twice the bytes, and a cast of every gradient into a buffer of twice its size. Here each rank sends every
other rank its piece as autograd produced it, and the receiver adds the m pieces itself::

    rank 0 gradients   a a a a|a a b b|b b b b         cut where the shards end
                       |  |   |  |  |                  rank 0 gets a view of a, rank 1 a packed row, rank 2
    rank 0 receives    row from rank 0: a a a a        a view of b
                       row from rank 1: a a a a
                       row from rank 2: a a a a
    sum over rows      a a a a                         in fp32, straight into ``main_grad``

It is one all-to-all per group: one per tensor would load few ranks at a time, since a tensor lies on few
ranks. A rank whose shard lies inside one tensor (most do, where tensors are larger than shards) is sent a
view; only shards that several tensors share are packed. Backends that cannot send a list of views (gloo)
get everything packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragged_fsdp import collectives
from ragged_fsdp.dbuffer import DBuffer
from ragged_fsdp.fsdp.grad_layout import GradLayout
from ragged_fsdp.fsdp.plan import gathered_dtype
from ragged_fsdp.fsdp.reduction import GradReducer, Scaling

__all__ = ["ExchangeReducer", "SendPlan", "plan_sends"]


@dataclass(frozen=True)
class SendPlan:
    """How the gradients of a group are cut for the ranks."""

    cuts: tuple[tuple[int, ...], ...]
    """Sizes of the consecutive pieces of each parameter's flat gradient."""
    views: tuple[tuple[int, int] | None, ...]
    """Per rank: parameter and piece that are all of its shard, or None if it is packed or empty."""
    packed: tuple[tuple[tuple[int, int, int], ...], ...]
    """Per packed rank: (parameter, piece, start in the shard) of what it gets."""
    row_of: tuple[int | None, ...]
    """Per rank: its row among the packed ones."""
    extents: tuple[tuple[int, int], ...]
    """Per rank: where in its shard the elements it gets start, and how many they are."""


def plan_sends(layout: GradLayout, ranks: int, *, pack_all: bool = False) -> SendPlan:
    """Cut every gradient where the shards end."""
    cuts: list[list[int]] = [[] for _ in layout.segments]
    pieces: list[list[tuple[int, int, int, int]]] = [[] for _ in range(ranks)]
    for index, segments in enumerate(layout.segments):
        for segment in segments:
            for rank in range(ranks):
                part = layout.layout.local_range(segment.index, rank)
                if part.numel:
                    pieces[rank].append((index, len(cuts[index]), part.shard_start, part.numel))
                    cuts[index].append(part.numel)
    shard_numel = layout.layout.shard_numel
    views: list[tuple[int, int] | None] = []
    packed: list[tuple[tuple[int, int, int], ...]] = []
    extents: list[tuple[int, int]] = []
    row_of: list[int | None] = []
    for own in pieces:
        single = len(own) == 1 and not pack_all
        views.append(own[0][:2] if single else None)
        if single:
            extents.append((own[0][2], own[0][3]))
        else:
            extents.append((0, shard_numel if own or pack_all else 0))
        row_of.append(len(packed) if not single and (own or pack_all) else None)
        if row_of[-1] is not None:
            packed.append(tuple((index, piece, start) for index, piece, start, _ in own))
    return SendPlan(tuple(map(tuple, cuts)), tuple(views), tuple(packed), tuple(row_of), tuple(extents))


class ExchangeReducer(GradReducer):
    """Keeps autograd's gradients as they are and exchanges them; see the module's docstring."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._grads: dict[int, torch.Tensor] = {}
        self._sends: list[torch.Tensor] = []
        self._received: torch.Tensor | None = None
        self._plans: dict[int, SendPlan] = {}

    # -- collecting ------------------------------------------------------------------------------

    @torch.no_grad()
    def store_many(self, grads: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Keep the gradients; one that comes again is added in the reduction dtype."""
        if not self.written:
            self._begin()
        for index, grad in grads:
            inner = self._inner(index, grad)
            if index in self.written:
                kept = self._grads[index]
                inner = kept.to(self._sum_dtype()).add_(inner)
            self._grads[index] = inner
            self.written.add(index)

    def _begin(self) -> None:
        context = self.group.context
        context.finish_of(self)
        context.make_room()
        self._choose_layout()

    def _touch_unused(self) -> None:
        if not self.written:
            self._begin()
        params = enumerate(self.group.params)
        self.written |= {i for i, p in params if p.unsharded is not None and p.sharded.requires_grad}

    # -- reducing --------------------------------------------------------------------------------

    def _wire_dtype(self) -> torch.dtype:
        return gathered_dtype(self.group.trainable_dtype, self.group.mp_policy.param_dtype)

    def _sum_dtype(self) -> torch.dtype:
        return self.group.reduce_dtype or self._wire_dtype()

    def _make_ready(self) -> None:
        """Cut the gradients into what each rank gets, and allocate what this rank gets."""
        plan, mesh = self._send_plan(), self.group.mesh
        pieces = [self._cut(index, sizes) for index, sizes in enumerate(plan.cuts)]
        assert self._layout is not None
        rows = torch.empty(0, dtype=self._wire_dtype(), device=self.group.device)
        if plan.packed:
            rows = rows.new_zeros(len(plan.packed), self._layout.layout.shard_numel)
            targets, sources = [], []
            for row, content in zip(rows, plan.packed):
                for index, piece, start in content:
                    sources.append(pieces[index][piece])
                    targets.append(row[start : start + sources[-1].numel()])
            torch._foreach_copy_(targets, sources)
        if len(plan.packed) == mesh.shard_size:
            self._sends = [rows]
        else:
            self._sends = [
                pieces[view[0]][view[1]] if view is not None else (rows[row] if row is not None else rows[:0])
                for view, row in zip(plan.views, plan.row_of)
            ]
        extent = plan.extents[mesh.shard_rank][1]
        self._received = rows.new_empty(mesh.shard_size, extent)

    def _send_plan(self) -> SendPlan:
        layout = self._layout
        assert layout is not None
        if id(layout) not in self._plans:  # layouts are kept by the base class, so ids stay theirs
            pack_all = self.group.device.type == "cpu"
            self._plans[id(layout)] = plan_sends(layout, self.group.mesh.shard_size, pack_all=pack_all)
        return self._plans[id(layout)]

    def _cut(self, index: int, sizes: tuple[int, ...]) -> Sequence[torch.Tensor]:
        """One gradient as consecutive flat pieces; zeros if there is none."""
        if not sizes:
            return ()
        grad = self._grads.get(index)
        if grad is None:
            flat = torch.zeros(sum(sizes), dtype=self._wire_dtype(), device=self.group.device)
        else:
            flat = grad.to(self._wire_dtype()).contiguous().view(-1)
        return torch.split_with_sizes(flat, sizes)

    def _target(self, main: DBuffer, direct: bool) -> torch.Tensor:
        return main.flat if direct else torch.empty_like(main.flat, dtype=self._sum_dtype())

    def _scatter(self, reduced: torch.Tensor, how: Scaling) -> None:
        """Exchange, and add what arrived."""
        group, received = self.group, self._received
        assert received is not None
        mesh, pg = group.mesh, group.mesh.reduce_group or group.mesh.shard_group
        if group.settings.custom_reduce_scatter is not None:
            raise ValueError(
                f"{group.label}: a custom reduce-scatter has no use with reduction='all_to_all'."
            )
        if mesh.shard_size > 1:
            group.context.note_collective("all_to_all", group)
            with collectives.explain_failure("all-to-all", group.label, pg), group.profile("all_to_all"):
                if len(self._sends) == 1:
                    collectives.all_to_all(received, self._sends[0], pg)
                else:
                    collectives.all_to_all_pieces(list(received.unbind()), self._sends, pg)
        else:
            received = self._sends[0].view(1, -1)
        start, numel = self._send_plan().extents[mesh.shard_rank]
        reduced[:start].zero_()
        reduced[start + numel :].zero_()
        divisor = (mesh.shard_size if how.average else 1) * (how.before or 1.0)
        _sum_rows(received, reduced[start : start + numel], divisor)

    def _releaser(self, main: DBuffer) -> Any:
        held: list[Any] = [main, self._sends, self._received, self._grads]
        self._sends, self._received, self._grads = [], None, {}
        return held.clear

    def discard(self) -> None:
        """Drop collected gradients and partial sums."""
        super().discard()
        self._sends, self._received, self._grads = [], None, {}


def _sum_rows(rows: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
    """``out = rows.sum(0) / divisor``; sums and the division are at least fp32 and are rounded once."""
    if not out.numel():
        return
    if out.dtype in (torch.float32, torch.float64):
        torch.sum(rows, 0, dtype=out.dtype, out=out)
        if divisor != 1:
            out.div_(divisor)
        return
    out.copy_(rows.sum(0, dtype=torch.float32).div_(divisor))
