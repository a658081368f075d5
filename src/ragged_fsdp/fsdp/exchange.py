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

It is one exchange per group: one per tensor would load few ranks at a time, since a tensor lies on few
ranks. A rank whose shard lies inside one tensor (most do, where tensors are larger than shards) is sent a
view; only shards that several tensors share are packed. A large group is exchanged in a few rounds, each a
part of every shard, so that only two parts of what arrives need memory: one arrives while the other is
summed. Small shards are all packed and exchanged in one round, since a list of views costs the host more than
a pass over them costs the device; so are those of backends that cannot send a list of views (gloo).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial

from ragged_fsdp import collectives
from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.grad_layout import GradLayout
from ragged_fsdp.fsdp.plan import gathered_dtype
from ragged_fsdp.fsdp.reduction import GradReducer
from ragged_fsdp.fsdp.scaling import Scaling

__all__ = ["ExchangeReducer", "SendPlan", "packs_all", "plan_sends", "rounds_of"]


_ROUNDS = 4
_ROUND_NUMEL = 1 << 19  # a round has at least this many elements of each shard
_PACK_NUMEL = 1 << 19  # smaller shards are packed
_ALIGN_NUMEL = 16


@dataclass(frozen=True)
class SendPlan:
    """How the gradients of a group are cut for the ranks and for the rounds."""

    rounds: int
    cuts: tuple[tuple[int, ...], ...]
    """Sizes of the consecutive pieces of each parameter's flat gradient."""
    views: tuple[tuple[int, int] | None, ...]
    """Per rank: the parameter its shard lies in and the first of the pieces, one per round, it is sent."""
    packed: tuple[tuple[tuple[int, int, int], ...], ...]
    """Per packed rank: (parameter, piece, start in the shard) of what it gets."""
    row_of: tuple[int | None, ...]
    """Per rank: its row among the packed ones; None if it is sent views or nothing."""
    extents: tuple[tuple[int, int], ...]
    """Per rank: where in its shard the elements it gets start, and how many they are."""


def packs_all(device: torch.device, shard_numel: int) -> bool:
    """Whether everything is packed, instead of sending views of the gradients."""
    return device.type == "cpu" or shard_numel < _PACK_NUMEL


def rounds_of(numel: int, rounds: int) -> list[int]:
    """``numel`` elements in ``rounds`` parts that start at aligned places; the last ones may be empty."""
    part = -(-numel // (rounds * _ALIGN_NUMEL)) * _ALIGN_NUMEL
    return [max(0, min(part, numel - i * part)) for i in range(rounds)]


def plan_sends(layout: GradLayout, ranks: int, *, rounds: int = 1) -> SendPlan:
    """Cut every gradient where the shards end, and the shards into rounds."""
    parts = [
        (index, rank, part)
        for index, segments in enumerate(layout.segments)
        for segment in segments
        for rank in range(ranks)
        if (part := layout.layout.local_range(segment.index, rank)).numel
    ]
    shares = Counter(rank for _, rank, _ in parts)
    cuts: list[list[int]] = [[] for _ in layout.segments]
    views: list[tuple[int, int] | None] = [None] * ranks
    extents = [(0, layout.layout.shard_numel if shares[rank] else 0) for rank in range(ranks)]
    contents: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in range(ranks) if shares[rank] > 1}
    for index, rank, part in parts:
        position = len(cuts[index])
        if rank in contents:
            contents[rank].append((index, position, part.shard_start))
            cuts[index].append(part.numel)
        else:
            views[rank] = (index, position)
            extents[rank] = (part.shard_start, part.numel)
            cuts[index] += rounds_of(part.numel, rounds)
    row_of = {rank: row for row, rank in enumerate(contents)}
    return SendPlan(
        rounds,
        tuple(map(tuple, cuts)),
        tuple(views),
        tuple(map(tuple, contents.values())),
        tuple(row_of.get(rank) for rank in range(ranks)),
        tuple(extents),
    )


class _Memory(NamedTuple):
    """Where an exchange lies; made once for each storage it is in."""

    layout: GradLayout
    packed: DBuffer | None
    """What is sent, if it is packed as a whole."""
    received: list[torch.Tensor]
    """Rows from all ranks, for one round each; rounds take turns."""


class ExchangeReducer(GradReducer):
    """Keeps autograd's gradients as they are and exchanges them; see the module's docstring."""

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._grads: dict[int, torch.Tensor] = {}
        self._sends: list[list[torch.Tensor]] = []
        """Per round, what each rank is sent; a single tensor if everything is packed."""
        self._received: list[torch.Tensor] = []
        self._plans: dict[int, SendPlan | None] = {}
        self._memories: dict[FlatStorage, _Memory] = {}

    # -- collecting ------------------------------------------------------------------------------

    def store_many(self, grads: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Keep the gradients; one that comes again is added in the reduction dtype."""
        if not self.written:
            self._begin()
        layout, params = self._layout, self.group.params
        assert layout is not None
        for index, grad in grads:
            inner = grad if params[index].grad_as_is else self._inner(index, grad)
            if index in self.written:
                kept = self._grads[index]
                inner = kept.to(self._sum_dtype()).add_(inner)
            elif not layout.same_as_weights:
                self._check_place(index)
            self._grads[index] = inner
            self.written.add(index)

    def _begin(self) -> None:
        context = self.group.context
        context.finish_of(self)
        context.make_room(self.companion)
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
        """Cut or pack the gradients into what each rank gets, and find room for what this rank gets."""
        plan = self._send_plan()
        memory = self._find_memory(plan)
        self._received = memory.received
        if plan is None:
            assert memory.packed is not None
            self._pack_all(memory.packed)
            self._sends = [[memory.packed.flat]]
            return
        pieces = [self._cut(index, sizes) for index, sizes in enumerate(plan.cuts)]
        rows = self._pack(plan, pieces)
        shares = [self._share(plan, rank, pieces, rows) for rank in range(self.group.mesh.shard_size)]
        self._sends = [list(sends) for sends in zip(*shares)]

    @property
    def leases(self) -> bool:
        return not self.companion

    def _find_memory(self, plan: SendPlan | None) -> _Memory:
        """Memory for this exchange: in the arena, where it was laid out before, or new."""
        layout, dtype = self._layout, self._wire_dtype()
        assert layout is not None
        rounds = 1 if plan is None else plan.rounds
        row_numel = rounds_of(self._extent(plan)[1], rounds)[0]
        shape = (min(2, rounds), self.group.mesh.shard_size, row_numel)
        packed_bytes = 0 if plan is not None else layout.layout.buffer_numel * dtype.itemsize
        nbytes = packed_bytes + math.prod(shape) * dtype.itemsize
        leased = self._leased = self.group.context.lease(nbytes) if self.leases else None
        memory = None if leased is None else self._memories.get(leased)
        if memory is not None and memory.layout is layout and memory.received[0].dtype == dtype:
            return memory
        storage = leased or FlatStorage(nbytes, self.group.device)
        packed = self._make_buffer(dtype, Partial(), storage=storage) if plan is None else None
        memory = _Memory(layout, packed, list(storage.tensor(packed_bytes, shape, dtype).unbind()))
        if leased is not None:
            self._memories[leased] = memory
        return memory

    def _extent(self, plan: SendPlan | None) -> tuple[int, int]:
        """Where in this rank's shard the elements it gets start, and how many they are."""
        assert self._layout is not None
        return (
            (0, self._layout.layout.shard_numel) if plan is None else plan.extents[self.group.mesh.shard_rank]
        )

    def _pack_all(self, packed: DBuffer) -> None:
        """All shards as rows of one tensor, in one pass; the gradients are not needed after it."""
        layout, grads = self._layout, self._grads
        assert layout is not None
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, grad in grads.items():
            layout.pair(packed.tensors, index, grad, targets, sources)
        if len(grads) < len(layout.segments):
            absent = [s.index for i, own in enumerate(layout.segments) if i not in grads for s in own]
            if absent:
                torch._foreach_zero_([packed.tensors[i] for i in absent])
        if targets:
            torch._foreach_copy_(targets, sources)
        self._grads = {}

    def _pack(self, plan: SendPlan, pieces: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The shards that several tensors share, one row each; padding is zero."""
        rows = torch.empty(0, dtype=self._wire_dtype(), device=self.group.device)
        if not plan.packed:
            return rows
        assert self._layout is not None
        rows = rows.new_zeros(len(plan.packed), self._layout.layout.shard_numel)
        targets, sources = [], []
        for row, content in zip(rows, plan.packed):
            for index, piece, start in content:
                sources.append(pieces[index][piece])
                targets.append(row[start : start + sources[-1].numel()])
        if targets:
            torch._foreach_copy_(targets, sources)
        return rows

    def _share(
        self, plan: SendPlan, rank: int, pieces: Sequence[Sequence[torch.Tensor]], rows: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """What ``rank`` is sent, round by round."""
        view, row = plan.views[rank], plan.row_of[rank]
        if view is not None:
            return pieces[view[0]][view[1] : view[1] + plan.rounds]
        if row is not None:
            return rows[row].split_with_sizes(rounds_of(rows.shape[1], plan.rounds))
        return [rows.view(-1)[:0]] * plan.rounds

    def buffer_bytes(self) -> int:
        """Bytes of what is packed as a whole and of the rows that arrive in the rounds under way together."""
        layout, ranks = self._choose_layout().layout, self.group.mesh.shard_size
        rounds = self._rounds(layout.shard_numel)
        numel = min(2, rounds) * ranks * rounds_of(layout.shard_numel, rounds)[0]
        if packs_all(self.group.device, layout.shard_numel):
            numel = 2 * layout.buffer_numel
        return numel * self._wire_dtype().itemsize

    def _rounds(self, shard_numel: int) -> int:
        most = 1 if self.group.device.type == "cpu" else _ROUNDS
        return max(1, min(most, shard_numel // _ROUND_NUMEL))

    def _send_plan(self) -> SendPlan | None:
        """How the gradients are cut; None if they are packed as a whole."""
        layout = self._layout
        assert layout is not None
        if id(layout) not in self._plans:  # layouts are kept by the base class, so ids stay theirs
            shard_numel, ranks = layout.layout.shard_numel, self.group.mesh.shard_size
            packed = packs_all(self.group.device, shard_numel)
            plan = None if packed else plan_sends(layout, ranks, rounds=self._rounds(shard_numel))
            self._plans[id(layout)] = plan
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
        """Exchange and add, round by round: while a round is added the next one is on the wire."""
        group = self.group
        if group.settings.custom_reduce_scatter is not None:
            raise ValueError(
                f"{group.label}: a custom reduce-scatter has no use with reduction='all_to_all'."
            )
        start, numel = self._extent(self._send_plan())
        outs: Sequence[torch.Tensor] = (reduced,)
        if numel < reduced.numel():
            reduced[:start].zero_()
            reduced[start + numel :].zero_()
        if numel < reduced.numel() or len(self._sends) > 1:
            outs = reduced[start : start + numel].split_with_sizes(rounds_of(numel, len(self._sends)))
        divisor = (group.mesh.shard_size if how.average else 1) * (how.before or 1.0)
        pg = group.mesh.reduce_group or group.mesh.shard_group
        with group.launching("all-to-all", pg):
            running: list[tuple[Any, torch.Tensor]] = []
            for index, out in enumerate(outs):
                if len(running) == len(self._received):
                    self._add_up(*running.pop(0), outs[index - len(self._received)], divisor)
                running.append(self._exchange(index, out.numel(), pg))
            for out, (work, rows) in zip(outs[len(outs) - len(running) :], running):
                self._add_up(work, rows, out, divisor)

    def _exchange(self, index: int, numel: int, pg: Any) -> tuple[Any, torch.Tensor]:
        """Start one round; the rows it brings."""
        sends, rows = self._sends[index], self._received[index % len(self._received)]
        if self.group.mesh.shard_size == 1:
            return None, sends[0].view(1, -1)
        if numel != rows.shape[1]:
            rows = rows.view(-1)[: rows.shape[0] * numel].view(rows.shape[0], numel)
        if len(sends) == 1:
            return collectives.all_to_all(rows, sends[0], pg, async_op=False), rows  # there is no other round
        return collectives.all_to_all_pieces(list(rows.unbind()), sends, pg, async_op=True), rows

    @staticmethod
    def _add_up(work: Any, rows: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
        if work is not None:
            work.wait()
        _sum_rows(rows, out, divisor)

    def _releaser(self, main: DBuffer) -> Any:
        held: list[Any] = [main, self._sends, self._received, self._grads]
        leased, context = self._leased, self.group.context
        self._sends, self._received, self._grads, self._leased = [], [], {}, None

        def release() -> None:
            held.clear()
            if leased is not None:
                context.give_back(leased)

        return release

    def discard(self) -> None:
        """Drop collected gradients and partial sums."""
        super().discard()
        self._sends, self._received, self._grads = [], [], {}


def _sum_rows(rows: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
    """``out = rows.sum(0) / divisor``; sums and the division are at least fp32 and are rounded once."""
    if not out.numel():
        return
    if out.dtype in (torch.float32, torch.float64):
        if divisor == rows.shape[0]:  # one kernel instead of two
            torch.mean(rows, 0, dtype=out.dtype, out=out)
            return
        torch.sum(rows, 0, dtype=out.dtype, out=out)
        if divisor != 1:
            out.div_(divisor)
        return
    out.copy_(rows.sum(0, dtype=torch.float32).div_(divisor))
