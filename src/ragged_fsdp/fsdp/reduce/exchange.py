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
view; only shards that several tensors share are packed, and gradients of which no view is sent are let
go. Small shards are all packed and exchanged in one
round, since a list of views costs the host more than a pass over them costs the device; so are those of
backends that cannot send a list of views (gloo).

**Over nodes** every rank has one slow link out of its node. Sent as above, each gradient would leave the
node as often as the node has ranks. So there are two levels: the ranks of a node first send each other what
belongs to the places they have in *all* nodes and add it, then the ranks of one place, a rail, exchange these
sums::

    rank (node 0, place 1)   receives the slots (0, 1) (1, 1) (2, 1) of its node's ranks, and adds them
                             sends its sum of (1, 1) to node 1, of (2, 1) to node 2
                             receives sums of (0, 1) from nodes 1 and 2, and adds them

What leaves a node is one sum per slot, half the bytes of an fp32 reduce-scatter where it is rounded to the
gradients' bf16, the only rounding there is. One node is the case without a rail.

How all of that is cut and in which steps it travels is planned in :mod:`ragged_fsdp.fsdp.reduce.sends`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ragged_fsdp import collectives
from ragged_fsdp.dbuffer import DBuffer, FlatStorage
from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.fsdp.reduce.layout import GradLayout, Scaling
from ragged_fsdp.fsdp.reduce.sends import GradExchangePlan, SendPlan, Step, plan_grad_exchange, rounds_of
from ragged_fsdp.fsdp.reduce.sums import sum_rows
from ragged_fsdp.fsdp.reduce.transport import GradTransport
from ragged_fsdp.tiling import tiled
from ragged_fsdp.topology import LevelGroups, Levels

__all__ = ["GradExchange"]

_RAIL_CALLS = 8  # per exchange, where there are so many nodes: each costs the host a list of all nodes


class _Memory(NamedTuple):
    """Where an exchange lies; made once for each storage it is in."""

    plan: GradExchangePlan
    packed: DBuffer | None
    """What is sent, if it is packed as a whole."""
    by_place: torch.Tensor
    """The packed slots, those of each rail side by side; empty where there is one node."""
    received: list[torch.Tensor]
    """Rows from the ranks of the node, for one step each; steps take turns."""
    sums: torch.Tensor
    """One row per node: what the ranks of this node have for it."""
    arrivals: torch.Tensor
    """One row per node: what its ranks have for this rank."""


class GradExchange(GradTransport):
    """Keeps autograd's gradients as they are and exchanges them; see the module's docstring.

    Args:
        members: the group.
        levels: nodes and rails to go through; None is one node.
        between: dtype of the sums that travel between nodes; None is that of the gradients, or fp32 for fp16,
            whose range is too small for sums.
    """

    buffers = False

    def __init__(
        self, members: Members, levels: LevelGroups | None = None, between: torch.dtype | None = None
    ) -> None:
        super().__init__(members)
        group = members.mesh.shard_group
        self._over = levels or LevelGroups(Levels.flat(group.size()), group, group, None)
        self._asked_between = between
        self._grads: dict[int, torch.Tensor] = {}
        self._sends: list[list[torch.Tensor]] = []
        """Per round, what each rank is sent; nothing if everything is packed."""
        self._memory: _Memory | None = None
        """Where the exchange lies that is being launched."""
        self._plan: GradExchangePlan | None = None
        """How gradients in the layout are exchanged; made when it is first used."""
        self._memories: dict[FlatStorage, _Memory] = {}
        self._sum_kind: DBuffer | None = None
        self._running: deque[tuple[Step, Any, torch.Tensor]] = deque()
        """Steps inside the node that are on the wire, the rows that each brings, and those along the rail."""
        self._on_rail: list[Any] = []

    @cached_property
    def _by_place(self) -> torch.Tensor:
        """The slots, those of each rail side by side; made in the first step, since a capture could not."""
        order = [slot for rail in self._over.levels.rails for slot in rail]
        return torch.tensor(order, dtype=torch.int64, device=self.members.device)

    # -- collecting ------------------------------------------------------------------------------

    def begin(self, layout: GradLayout, dtype: torch.dtype) -> None:
        """Note the layout: gradients stay where autograd put them."""
        self._layout = layout

    def store(self, fresh: Mapping[int, torch.Tensor], again: Mapping[int, torch.Tensor]) -> None:
        """Keep the gradients; those that come again are added in the reduction dtype."""
        if again:
            for index, grad in again.items():
                self._grads[index] = self._grads[index].to(self.sum_dtype).add_(grad)
        self._grads.update(fresh)

    # -- planning --------------------------------------------------------------------------------

    def nbytes(self, layout: GradLayout) -> int:
        """Bytes of what is packed as a whole, of rows that arrive in the steps under way, and of sums."""
        return self._plan_for(layout).places[-1]

    def _plan_for(self, layout: GradLayout) -> GradExchangePlan:
        plan, wire = self._plan, self.members.wire_dtype
        if plan is None or plan.layout is not layout or plan.wire != wire:
            between = self._asked_between or (torch.float32 if wire == torch.float16 else wire)
            if wire.is_complex:  # a real dtype has no room for them
                between = wire
            plan = self._plan = plan_grad_exchange(layout, self._over, self.members.device, wire, between)
        return plan

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
            self._pack_all(memory.packed, missing)
            return
        pieces = [self._cut(index, sizes) for index, sizes in enumerate(sends.cuts)]
        shares = self._share(sends, pieces)
        self._grads = {}  # views hold their own; what was packed or cast would be held twice until the end
        self._sends = [list(sent) for sent in zip(*shares)]

    def _find_memory(self) -> _Memory:
        """Memory for this exchange: in the arena, where it was laid out before, or new."""
        plan = self._plan_for(self._layout)
        wire, between, starts, nbytes = plan.wire, plan.between, plan.places, plan.places[-1]
        context = self.members.context
        leased = None if self.companion else context.arena.lease(nbytes, context.max_grad_buffers)
        self._leased = leased
        memory = None if leased is None else self._memories.get(leased)
        if memory is not None and memory.plan is plan:
            return memory
        storage = leased or FlatStorage(nbytes, self.members.device)
        packed = self.make_buffer(plan.layout, wire, storage=storage) if plan.sends is None else None
        slots = self.members.mesh.shard_size if plan.sends is None and plan.sums[0] else 0
        memory = _Memory(
            plan,
            packed,
            by_place=storage.tensor(starts[1], (slots, plan.layout.layout.shard_numel), wire),
            received=list(storage.tensor(starts[2], plan.rows, wire).unbind()),
            sums=storage.tensor(starts[3], plan.sums, between),
            arrivals=storage.tensor(starts[4], plan.arrivals, between),
        )
        if leased is not None:
            self._memories[leased] = memory
        return memory

    def _pack_all(self, packed: DBuffer, missing: set[int]) -> None:
        """All shards as rows of one tensor, in one pass; the gradients are not needed after it."""
        layout = self._layout
        if missing:
            torch._foreach_zero_([packed.tensors[run.index] for i in missing for run in layout.runs[i]])
        targets, sources = layout.pairs(packed.tensors, self._grads)
        if targets:
            torch._foreach_copy_(targets, sources)
        self._grads = {}

    def _share(
        self, plan: SendPlan, pieces: Sequence[Sequence[torch.Tensor]]
    ) -> list[Sequence[torch.Tensor]]:
        """What each rank is sent, round by round: views, or a row into which is packed what its shard has of
        several tensors; padding is zero."""
        shape, ranks = (len(plan.packed), self._layout.layout.shard_numel), self.members.mesh.shard_size
        rows = torch.zeros(shape, dtype=self.members.wire_dtype, device=self.members.device)
        shares = {rank: pieces[at][first : first + plan.rounds] for rank, (at, first) in plan.views.items()}
        targets, sources = [], []
        for row, (rank, content) in zip(rows, plan.packed.items()):
            for index, piece, start in content:
                sources.append(pieces[index][piece])
                targets.append(row[start : start + sources[-1].numel()])
            shares[rank] = row.split_with_sizes(rounds_of(row.numel(), plan.rounds))
        if targets:
            torch._foreach_copy_(targets, sources)
        return [shares.get(rank) or [rows.new_empty(0)] * plan.rounds for rank in range(ranks)]

    def _cut(self, index: int, sizes: tuple[int, ...]) -> Sequence[torch.Tensor]:
        """One gradient as consecutive flat pieces; zeros if there is none."""
        if not sizes:
            return ()
        grad = self._grads.get(index)
        if grad is None:
            flat = torch.zeros(sum(sizes), dtype=self.members.wire_dtype, device=self.members.device)
        else:
            tile = self._layout.tiles[index] if self._layout.tiles else None
            flat = tiled(grad.to(self.members.wire_dtype), tile).contiguous()
        return torch.split_with_sizes(flat, sizes)

    def target(self, main: DBuffer) -> DBuffer:
        """Straight into ``main``, if dtypes agree; else a buffer in the dtype of the sum."""
        dtype, kind = self.members.gradient_dtype, self._sum_kind
        if main.dtype == dtype:
            return main
        if kind is None or kind.dtype != dtype or kind.layout is not main.layout:
            kind = self.make_buffer(self._layout, dtype, is_reduced=True, allocate=False)
            self._sum_kind = kind
        return kind.empty_like()

    def scatter(self, reduced: DBuffer, how: Scaling) -> None:
        """Send every rank its pieces and add what arrives, on the reduce stream."""
        members, memory = self.members, self._memory
        assert memory is not None
        divisor = (members.mesh.shard_size if how.average else 1) * (how.before or 1.0)
        group = members.settings.reduce_group or members.mesh.shard_group
        exchange = self._exchange_pieces if memory.packed is None else self._exchange_packed
        members.launch("all-to-all", group, exchange, memory, reduced.flat, divisor)

    @property
    def _local(self) -> Any:
        """The process group inside the node."""
        if self._over.rail is None and self.members.settings.reduce_group is not None:
            return self.members.settings.reduce_group
        return self._over.local

    def _exchange_packed(self, memory: _Memory, reduced: torch.Tensor, divisor: float) -> None:
        """Exchange and add everything at once, inside the node and then along the rail."""
        assert memory.packed is not None
        rail, sent, rows = self._over.rail, memory.packed.flat, memory.received[0]
        if rail is not None:
            slots = sent.view(memory.by_place.shape)
            sent = torch.index_select(slots, 0, self._by_place, out=memory.by_place).view(-1)
        if rows.shape[0] == 1:
            rows = sent.view(1, -1)
        else:
            collectives.all_to_all(rows.view(-1), sent, self._local)
        if rail is None:
            sum_rows(rows, reduced, divisor)
            return
        sum_rows(rows, memory.sums.view(-1))
        collectives.all_to_all(memory.arrivals, memory.sums, rail)
        sum_rows(memory.arrivals, reduced, divisor)

    def _exchange_pieces(self, memory: _Memory, reduced: torch.Tensor, divisor: float) -> None:
        """Exchange and add, step by step: while a step is added the next one is on the wire."""
        start, numel = memory.plan.extent
        if numel < reduced.numel():
            reduced[:start].zero_()
            reduced[start + numel :].zero_()
        mine, alive = reduced[start : start + numel], len(memory.received)
        running, self._on_rail = self._running, []
        rail = None if self._over.rail is None else _Rail(self._over.rail, self._on_rail)
        for index, step in enumerate(memory.plan.steps):
            if len(running) == alive:  # the oldest step's rows are received into again: first they are added
                self._add_step(memory, *running.popleft(), mine, divisor, rail)
            running.append((step, *self._send_step(step, memory.received[index % alive])))
        while running:
            self._add_step(memory, *running.popleft(), mine, divisor, rail)
        if rail is not None:
            rail.finish()
            sum_rows(memory.arrivals, mine, divisor)

    def _send_step(self, step: Step, rows: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Start one step inside the node; the rows it brings."""
        sent = [self._sends[step.round][slot] for slot in step.slots]
        if len(sent) == 1:
            return None, sent[0].view(1, -1)
        if step.numel != rows.shape[1]:
            rows = rows.view(-1)[: rows.shape[0] * step.numel].view(rows.shape[0], step.numel)
        return collectives.all_to_all_pieces(list(rows.unbind()), sent, self._local, async_op=True), rows

    @staticmethod
    def _add_step(
        memory: _Memory,
        step: Step,
        work: Any,
        rows: torch.Tensor,
        mine: torch.Tensor,
        divisor: float,
        rail: _Rail | None,
    ) -> None:
        """Add what a step brought, and send the sum along the rail."""
        collectives.wait_all(work)
        if rail is None:
            sum_rows(rows, mine[step.start : step.start + step.numel], divisor)
            return
        start, numel = step.part
        if step.position == rail.own:  # its own node's share stays here
            sum_rows(rows, memory.arrivals[step.position, start : start + numel])
            return
        total = memory.sums[step.position, step.start : step.start + step.numel]
        sum_rows(rows, total)
        rail.post(step.position, total, step.source, memory.arrivals[step.source, start : start + numel])

    def hand_over(self) -> Callable[[], None]:
        """Views of gradients, packed rows and received rows are held until the function is called."""
        held: list[Any] = [self._sends, self._memory]
        leased, arena = self._leased, self.members.context.arena
        self._sends, self._memory, self._grads, self._leased = [], None, {}, None

        def release() -> None:
            held.clear()
            if leased is not None:
                arena.give_back(leased)

        return release

    def discard(self) -> None:
        """Drop the gradients, behind what an exchange that raised has left on the wire."""
        works = [*(work for _, work, _ in self._running), *self._on_rail]
        self._running.clear()
        self._on_rail.clear()
        # joined streams did not wait for it: its memory would be used again while it is sent and received
        with suppress(RuntimeError):  # where one failed the group is broken: the rest would only time out
            collectives.wait_all(works)
        super().discard()


class _Rail:
    """The messages of one exchange along a rail, those of several nodes in one call where there are many."""

    def __init__(self, group: Any, works: list[Any]) -> None:
        self.own = group.rank()
        self._group = group
        self._together = max(1, group.size() // _RAIL_CALLS)
        self._sent: dict[int, torch.Tensor] = {}
        self._received: dict[int, torch.Tensor] = {}
        self._works = works

    def post(self, target: int, total: torch.Tensor, source: int, arrives: torch.Tensor) -> None:
        """Send ``total`` to position ``target`` and receive ``arrives`` from position ``source``.

        All ranks post in the same order, so all make the same calls.
        """
        if target in self._sent:  # another part of the same slot
            self._launch()
        self._sent[target], self._received[source] = total, arrives
        if len(self._sent) == self._together:
            self._launch()

    def _launch(self) -> None:
        self._works.append(collectives.send_and_receive(self._sent, self._received, self._group))
        self._sent, self._received = {}, {}

    def finish(self) -> None:
        """Let the current stream wait for what was posted."""
        if self._sent:
            self._launch()
        collectives.wait_all(self._works)
        self._works.clear()
