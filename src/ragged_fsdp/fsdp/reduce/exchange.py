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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial

from ragged_fsdp import collectives
from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.fsdp.reduce.layout import GradLayout, Scaling
from ragged_fsdp.fsdp.reduce.transport import make_buffer, scattered
from ragged_fsdp.routes import Shared, shared_boxes

__all__ = ["Exchange", "SendPlan", "packs_all", "plan_sends", "rounds_of"]


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
    parts = list(_parts(layout, ranks))
    shares = Counter(rank for _, rank, _ in parts)
    cuts: list[list[int]] = [[] for _ in layout.runs]
    views: list[tuple[int, int] | None] = [None] * ranks
    extents = [(0, layout.layout.shard_numel if shares[rank] else 0) for rank in range(ranks)]
    contents: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in range(ranks) if shares[rank] > 1}
    for index, rank, part in parts:
        position, start, numel = len(cuts[index]), part.target.run_start or 0, part.target.numel
        if rank in contents:
            contents[rank].append((index, position, start))
            cuts[index].append(numel)
        else:
            views[rank] = (index, position)
            extents[rank] = (start, numel)
            cuts[index] += rounds_of(numel, rounds)
    row_of = {rank: row for row, rank in enumerate(contents)}
    return SendPlan(
        rounds,
        tuple(map(tuple, cuts)),
        tuple(views),
        tuple(map(tuple, contents.values())),
        tuple(row_of.get(rank) for rank in range(ranks)),
        tuple(extents),
    )


def _parts(layout: GradLayout, ranks: int) -> Iterator[tuple[int, int, Shared]]:
    """What each parameter's gradient and each rank's shard have in common, in the order of the gradients."""
    shard = layout.layout.shard_numel
    for index, runs in enumerate(layout.runs):
        for run in runs:
            start = layout.layout.offsets[run.index]
            gradient = (((start,), (run.numel,)),)
            for rank in range(start // shard, min(ranks, -(-(start + run.numel) // shard))):
                for part in shared_boxes(gradient, (((rank * shard,), (shard,)),)):
                    yield index, rank, part


@dataclass(frozen=True)
class _Plan:
    """All of an exchange that follows from the layout of its gradients."""

    layout: GradLayout
    sends: SendPlan | None
    """How the gradients are cut; None if they are packed as a whole."""
    extent: tuple[int, int]
    """Where in this rank's shard the elements it gets start, and how many they are."""
    packed_numel: int
    """Of what is sent, if it is packed as a whole."""
    rows_shape: tuple[int, int, int]
    """Rounds under way together, ranks, elements from each rank in one round."""
    rows_numel: int


class _Memory(NamedTuple):
    """Where an exchange lies; made once for each storage it is in."""

    plan: _Plan
    packed: DBuffer | None
    """What is sent, if it is packed as a whole."""
    received: list[torch.Tensor]
    """Rows from all ranks, for one round each; rounds take turns."""


class Exchange:
    """Keeps autograd's gradients as they are and exchanges them; see the module's docstring."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.companion = False
        self._layout: GradLayout | None = None
        self._grads: dict[int, torch.Tensor] = {}
        self._sends: list[list[torch.Tensor]] = []
        """Per round, what each rank is sent; nothing if everything is packed."""
        self._memory: _Memory | None = None
        """Where the exchange lies that is being launched."""
        self._leased: FlatStorage | None = None
        self._plan: _Plan | None = None
        """How gradients in the layout are exchanged; made when it is first used."""
        self._memories: dict[FlatStorage, _Memory] = {}
        self._sum_kind: DBuffer | None = None
        self._partial = (Partial(),) * members.mesh.mesh.ndim

    @property
    def leases(self) -> bool:
        """Whether its memory has a place in the arena: it is taken for the reduction alone."""
        return not self.companion

    # -- collecting ------------------------------------------------------------------------------

    def begin(self, layout: GradLayout, dtype: torch.dtype) -> None:
        """Nothing but the plan: gradients stay where autograd put them."""
        if self._layout is not layout:
            self._layout, self._plan = layout, self._make_plan(layout)

    def store(self, fresh: Mapping[int, torch.Tensor], again: Mapping[int, torch.Tensor]) -> None:
        """Keep the gradients; those that come again are added in the reduction dtype."""
        for index, grad in again.items():
            self._grads[index] = self._grads[index].to(self.sum_dtype).add_(grad)
        self._grads.update(fresh)

    # -- planning --------------------------------------------------------------------------------

    def nbytes(self, layout: GradLayout) -> int:
        """Bytes of what is packed as a whole and of the rows that arrive in the rounds under way together."""
        buffer, ranks = layout.layout, self.members.mesh.shard_size
        rounds = self._rounds(buffer.shard_numel)
        numel = min(2, rounds) * ranks * rounds_of(buffer.shard_numel, rounds)[0]
        if packs_all(self.members.device, buffer.shard_numel):
            numel = 2 * buffer.buffer_numel
        return numel * self.members.wire_dtype.itemsize

    def _make_plan(self, layout: GradLayout) -> _Plan:
        mesh, device, shard_numel = self.members.mesh, self.members.device, layout.layout.shard_numel
        if packs_all(device, shard_numel):
            shape = (1, mesh.shard_size, rounds_of(shard_numel, 1)[0])
            return _Plan(layout, None, (0, shard_numel), layout.layout.buffer_numel, shape, math.prod(shape))
        sends = plan_sends(layout, mesh.shard_size, rounds=self._rounds(shard_numel))
        extent = sends.extents[mesh.shard_rank]
        shape = (min(2, sends.rounds), mesh.shard_size, rounds_of(extent[1], sends.rounds)[0])
        return _Plan(layout, sends, extent, 0, shape, math.prod(shape))

    def _rounds(self, shard_numel: int) -> int:
        most = 1 if self.members.device.type == "cpu" else _ROUNDS
        return max(1, min(most, shard_numel // _ROUND_NUMEL))

    # -- reducing --------------------------------------------------------------------------------

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype that received rows are added in."""
        return self.members.gradient_dtype

    def ready(self, missing: set[int]) -> None:
        """Cut or pack the gradients into what each rank gets, and find room for what this rank gets.

        A gradient that is not there is sent as zeros.
        """
        memory = self._memory = self._find_memory()
        sends = memory.plan.sends
        if sends is None:
            assert memory.packed is not None
            self._pack_all(memory.packed)
            return
        pieces = [self._cut(index, sizes) for index, sizes in enumerate(sends.cuts)]
        rows = self._pack(sends, pieces)
        shares = [self._share(sends, rank, pieces, rows) for rank in range(self.members.mesh.shard_size)]
        self._sends = [list(sent) for sent in zip(*shares)]

    def _find_memory(self) -> _Memory:
        """Memory for this exchange: in the arena, where it was laid out before, or new."""
        plan, dtype = self._plan, self.members.wire_dtype
        assert plan is not None
        packed_bytes = plan.packed_numel * dtype.itemsize
        nbytes = packed_bytes + plan.rows_numel * dtype.itemsize
        leased = self._leased = None if self.companion else self.members.context.lease(nbytes)
        memory = None if leased is None else self._memories.get(leased)
        if memory is not None and memory.plan is plan and memory.received[0].dtype == dtype:
            return memory
        storage = leased or FlatStorage(nbytes, self.members.device)
        packed = (
            make_buffer(self.members, plan.layout, dtype, self._partial, storage=storage)
            if plan.sends is None
            else None
        )
        received = storage.tensor(packed_bytes, plan.rows_shape, dtype)
        memory = _Memory(plan, packed, list(received.unbind()))
        if leased is not None:
            self._memories[leased] = memory
        return memory

    def _pack_all(self, packed: DBuffer) -> None:
        """All shards as rows of one tensor, in one pass; the gradients are not needed after it."""
        layout, grads = self._layout, self._grads
        assert layout is not None
        if len(grads) < len(layout.runs):
            absent = [s.index for i, own in enumerate(layout.runs) if i not in grads for s in own]
            if absent:
                torch._foreach_zero_([packed.tensors[i] for i in absent])
        targets, sources = layout.pairs(packed.tensors, grads)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._grads = {}

    def _pack(self, plan: SendPlan, pieces: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """The shards that several tensors share, one row each; padding is zero."""
        rows = torch.empty(0, dtype=self.members.wire_dtype, device=self.members.device)
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

    def _cut(self, index: int, sizes: tuple[int, ...]) -> Sequence[torch.Tensor]:
        """One gradient as consecutive flat pieces; zeros if there is none."""
        if not sizes:
            return ()
        grad = self._grads.get(index)
        if grad is None:
            flat = torch.zeros(sum(sizes), dtype=self.members.wire_dtype, device=self.members.device)
        else:
            flat = grad.to(self.members.wire_dtype).contiguous().view(-1)
        return torch.split_with_sizes(flat, sizes)

    def target(self, main: DBuffer) -> DBuffer:
        """Straight into ``main``, if dtypes agree; else a buffer in the dtype of the sum."""
        dtype, kind = self.members.gradient_dtype, self._sum_kind
        if main.dtype == dtype:
            return main
        if kind is None or kind.dtype != dtype or kind.layout is not main.layout:
            assert self._layout is not None
            kind = make_buffer(self.members, self._layout, dtype, scattered(self.members), allocate=False)
            self._sum_kind = kind
        return kind.empty_like()

    def scatter(self, reduced: DBuffer, how: Scaling) -> None:
        """Send every rank its pieces and add what arrives, on the reduce stream."""
        members, memory = self.members, self._memory
        assert memory is not None
        if isinstance(members.settings.reduce_comm, collectives.UserComm):
            raise ValueError(
                f"{members.label}: a custom reduce-scatter has no use with reduction='all_to_all'."
            )
        divisor = (members.mesh.shard_size if how.average else 1) * (how.before or 1.0)
        pg = members.settings.reduce_group or members.mesh.shard_group
        exchange = self._exchange_rounds if memory.packed is None else self._exchange_packed
        members.launch("all-to-all", pg, exchange, memory, reduced.flat, divisor, pg)

    @staticmethod
    def _exchange_packed(memory: _Memory, reduced: torch.Tensor, divisor: float, pg: Any) -> None:
        """Exchange and add in one round."""
        assert memory.packed is not None
        sent, rows = memory.packed.flat, memory.received[0]
        if rows.shape[0] == 1:
            rows = sent.view(1, -1)
        else:
            collectives.all_to_all(rows.view(-1), sent, pg)
        _sum_rows(rows, reduced, divisor)

    def _exchange_rounds(self, memory: _Memory, reduced: torch.Tensor, divisor: float, pg: Any) -> None:
        """Exchange and add, round by round: while a round is added the next one is on the wire."""
        start, numel = memory.plan.extent
        rounds, alive = len(self._sends), len(memory.received)
        if numel < reduced.numel():
            reduced[:start].zero_()
            reduced[start + numel :].zero_()
        outs = reduced[start : start + numel].split_with_sizes(rounds_of(numel, rounds))
        running: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        for index, out in enumerate(outs):
            if len(running) == alive:
                self._add_up(*running.popleft(), divisor)
            rows = memory.received[index % alive]
            running.append((*self._exchange(self._sends[index], rows, out.numel(), pg), out))
        for work, rows, out in running:
            self._add_up(work, rows, out, divisor)

    @staticmethod
    def _exchange(
        sent: list[torch.Tensor], rows: torch.Tensor, numel: int, pg: Any
    ) -> tuple[Any, torch.Tensor]:
        """Start one round; the rows it brings."""
        if len(sent) == 1:
            return None, sent[0].view(1, -1)
        if numel != rows.shape[1]:
            rows = rows.view(-1)[: rows.shape[0] * numel].view(rows.shape[0], numel)
        return collectives.all_to_all_pieces(list(rows.unbind()), sent, pg, async_op=True), rows

    @staticmethod
    def _add_up(work: Any, rows: torch.Tensor, out: torch.Tensor, divisor: float) -> None:
        if work is not None:
            work.wait()
        _sum_rows(rows, out, divisor)

    def hand_over(self) -> Callable[[], None]:
        """Gradients, packed rows and received rows are held until the function is called."""
        held: list[Any] = [self._sends, self._memory, self._grads]
        leased, arena = self._leased, self.members.context.arena
        self._sends, self._memory, self._grads, self._leased = [], None, {}, None

        def release() -> None:
            held.clear()
            if leased is not None:
                arena.give_back(leased)

        return release

    def discard(self) -> None:
        """Drop the gradients."""
        self.hand_over()()


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
