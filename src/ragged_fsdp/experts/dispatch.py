"""How tokens come to their experts and the outputs back: an interface, and four ways.

=================  =============================================  ==========================================
                   dispatch                                       combine
=================  =============================================  ==========================================
``Here``           every expert is on this rank                   weighted sum
``AllToAll``       rows travel to the ranks of their experts      outputs travel back; weighted sum
``AllGather``      every rank gets all tokens of the group and    weighted sums of what each rank's experts
                   takes the rows of its experts                  add, reduce-scattered
``SharedTokens``   the ranks have the same tokens (tensor         weighted sums of what each rank's experts
                   parallelism); each takes its rows              add, all-reduced
=================  =============================================  ==========================================

``AllToAll`` moves K rows per token, of which those for other ranks leave it; ``AllGather`` moves each token
to every rank, which is less where K is larger than the group, and needs no second ordering. A dispatcher has
no parameters. DeepEP, or a library's own exchange, is a class with the two methods of :class:`Dispatcher`:
:func:`ragged_fsdp.experts.expert_parallel` takes a function that makes one.

Exact ways ask the device once per layer how many rows there are: the host must know to allocate. With a
``capacity`` :class:`AllToAll` does not: each rank sends each other one a fixed number of rows, and what does
not fit is dropped and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ragged_fsdp.agreement import compare
from ragged_fsdp.collectives import Comm
from ragged_fsdp.experts.permute import by_expert, combine, inverted, take
from ragged_fsdp.experts.split import ExpertSplit

__all__ = ["AllGather", "AllToAll", "Dispatcher", "Here", "Route", "SharedTokens", "SlicedTokens"]

_COMM = Comm()


@dataclass
class Route:
    """Where the rows of one layer came from; made by ``dispatch`` and taken by ``combine``."""

    slot_of: Tensor
    """The slot (token * K + k) of each row, -1 for padding."""
    row_of: Tensor
    """The row of each slot, -1 where it is not among the rows."""
    load: Tensor
    """Slots of this rank's tokens that were sent to each expert, dropped ones included."""
    dropped: Tensor | None = None
    """How many of those were dropped; None where none can be."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the dispatcher itself needs for the way back."""


Dispatched = tuple[Tensor, Tensor, Route]
"""Rows, how many each expert held here has, and the way back."""
Meanwhile = Callable[[], None] | None
"""Work that needs no rows of other ranks: shared experts."""


class Dispatcher(Protocol):
    """Brings tokens to the experts of this rank, and what the experts made of them back.

    One that may drop rows can have an attribute ``for_evaluation``: the dispatcher of modules that do not
    train.
    """

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Tokens (N, D) and their experts (N, K) to rows (R, D) grouped by the experts held here.

        Also how many rows each of those experts has, as a tensor, and the way back. Rows after the groups are
        padding. Every rank of the group calls it, with or without tokens. ``meanwhile`` is to be called once,
        where rows are on their way if there is such a moment.
        """
        ...

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """Outputs (R, D) of the rows, and the weights (N, K) of this rank's tokens, to tokens (N, D)."""
        ...


class Here:
    """All experts are on this rank; nothing is sent."""

    def __init__(self, experts: int) -> None:
        self._experts = experts

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows ordered by expert."""
        _call(meanwhile)
        slot_of, counts = by_expert(chosen, self._experts)
        route = Route(slot_of, inverted(slot_of, chosen.numel()), counts)
        return take(tokens, route.slot_of, route.row_of), counts, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The weighted sums."""
        return combine(outputs, weights, route.slot_of, route.row_of)


class AllToAll:
    """Rows are sent to their experts, and outputs back::

        rank 0   a0 a1 b0 c0 c1 d0      grouped by expert; experts a, b are on rank 0, c, d on rank 1
        rank 1   a2 b1 b2 d1

        rank 0 receives  a0 a1 b0 | a2 b1 b2     and groups them   a0 a1 a2 b0 b1 b2

    Args:
        mesh: the ranks that experts are spread over, a 1-D mesh or a process group.
        split: how many experts each of them holds.
        capacity: None sends what there is. A number is the rows that each rank sends each other one, as a
            multiple of those it would send if tokens went everywhere alike: 2.0 has room for twice as many.
            It fixes every shape, so nothing waits for the device; what does not fit is dropped. All ranks
            must then have as many tokens; the first call with a number of them compares. In evaluation mode
            everything is sent.
    """

    def __init__(
        self, mesh: DeviceMesh | dist.ProcessGroup, split: ExpertSplit, *, capacity: float | None = None
    ) -> None:
        if isinstance(mesh, DeviceMesh):
            _check_group(type(self).__name__, mesh, split)
        if capacity is not None and not capacity > 0:
            raise ValueError(f"AllToAll: capacity must be None or positive, got {capacity!r}.")
        self._group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        self._ranks = self._group.size()
        self._split, self._held = split, split.held[self._group.rank()]
        self.capacity = capacity
        self.for_evaluation = self if capacity is None else AllToAll(mesh, split)
        self.needed: Tensor | None = None
        """The capacity that would have dropped nothing since it was last taken; counted if there is one."""
        self._agreed: set[int] = set()
        self._constants: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of all ranks' tokens for the experts of this rank.

        Without a capacity slots may be numbered as no expert: one past the last. They are not sent.
        """
        order, load = by_expert(chosen, self._split.experts)
        if self.capacity is not None:
            return self._dispatch_fixed(tokens, chosen, order, load, meanwhile)
        received = self._exchange_counts(load)
        numbers = torch.cat((load, received.flatten())).tolist()  # the one wait for the device
        there = _sums(numbers[: len(load)], self._split.held)
        here = _sums(numbers[len(load) :], (self._held,) * self._ranks)
        order = order[: sum(there)]
        route = Route(order, inverted(order, chosen.numel()), load)
        rows = self._send(take(tokens, route.slot_of, route.row_of), there, here, meanwhile)
        expert = torch.arange(self._held, device=tokens.device).repeat(self._ranks)
        grouping = expert.repeat_interleave(received.flatten(), output_size=len(rows)).argsort(stable=True)
        route.extra.update(grouping=grouping, arrival=inverted(grouping, len(rows)), there=there, here=here)
        return take(rows, grouping, route.extra["arrival"]), received.sum(0), route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The weighted sums of outputs that came back."""
        way = route.extra
        arrived = take(outputs, way["arrival"], way["grouping"])
        back = self._send(arrived, way["here"], way["there"])
        return combine(back, weights, route.slot_of, route.row_of)

    def rows_per_rank(self, slots: int) -> int:
        """Rows that a rank with so many slots sends each rank under the capacity."""
        assert self.capacity is not None
        return min(slots, math.ceil(self.capacity * slots / self._ranks))

    def _dispatch_fixed(
        self, tokens: Tensor, chosen: Tensor, order: Tensor, load: Tensor, meanwhile: Meanwhile
    ) -> Dispatched:
        """Send every rank as many rows; no shape depends on where tokens go."""
        slots, device = chosen.numel(), tokens.device
        if slots not in self._agreed:
            differs = compare(f"{len(tokens)} tokens", [self._group], device)
            if differs is not None:
                raise ValueError(
                    f"AllToAll: with a capacity ranks must have as many tokens; {differs.difference}."
                )
            self._agreed.add(slots)
        room = self.rows_per_rank(slots)
        first, stop, owner = self._on(device)
        ends = torch.cat((load.new_zeros(1), load.cumsum(0)))
        start = ends[first]  # where the slots of each rank's experts begin in the order
        count = ends[stop] - start
        needed = count.max() * (self._ranks / max(1, slots))
        self.needed = needed if self.needed is None else torch.maximum(self.needed, needed)
        position = torch.arange(room, device=device)
        fits = position < count.clamp(max=room).unsqueeze(1)  # (rank, position)
        at = (start.unsqueeze(1) + position).clamp(max=max(0, slots - 1))
        slot_of = torch.where(fits, order[at] if slots else at - 1, -1).flatten()
        # of each expert's slots those that come before the room of its rank ends
        before = ends[:-1] - start[owner]
        kept = torch.minimum((room - before).clamp(min=0), load)
        received = self._exchange_counts(kept)  # (rank, expert here)
        route = Route(slot_of, inverted(slot_of, slots), load, load.sum() - kept.sum())
        equal = [room] * self._ranks
        rows = self._send(take(tokens, route.slot_of, route.row_of), equal, equal, meanwhile)
        last = received.cumsum(1)
        expert = (position.view(1, -1, 1) >= last.unsqueeze(1)).sum(-1)  # (rank, position); held: padding
        grouping = expert.flatten().argsort(stable=True)
        # padding is last: it is taken as well, since the shape is fixed, but its gradient reaches nothing
        valid = torch.arange(len(grouping), device=device) < received.sum()
        grouping = torch.where(valid, grouping, -1)
        route.extra.update(
            grouping=grouping, arrival=inverted(grouping, len(grouping)), there=equal, here=equal
        )
        return take(rows, grouping, route.extra["arrival"]), received.sum(0), route

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """The first expert of each rank, one past its last, and the rank of each expert; copied once."""
        if device not in self._constants:
            split = self._split
            stop = [first + held for first, held in zip(split.first, split.held)]
            owner = [rank for rank, held in enumerate(split.held) for _ in range(held)]
            first, last, ranks = (
                torch.tensor(values, device=device) for values in (split.first, stop, owner)
            )
            self._constants[device] = (first, last, ranks)
        return self._constants[device]

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        """How many rows each rank has for each expert of this one, (rank, expert here)."""
        received = counts.new_empty(self._ranks * self._held)
        held = [self._held] * self._ranks
        dist.all_to_all_single(received, counts.contiguous(), held, list(self._split.held), group=self._group)
        return received.view(self._ranks, self._held)

    def _send(
        self, rows: Tensor, sent: list[int], received: list[int], meanwhile: Meanwhile = None
    ) -> Tensor:
        return exchange(rows, sent, received, self._group, meanwhile)


class AllGather:
    """Every rank gets the tokens of all, applies its experts, and the results are summed where they belong.

    For small groups: two collectives that every backend does well, and one ordering instead of two.

    Args:
        mesh: the ranks that experts are spread over, a 1-D mesh.
        split: how many experts each of them holds.
    """

    def __init__(self, mesh: DeviceMesh, split: ExpertSplit) -> None:
        _check_group(type(self).__name__, mesh, split)
        self._group, self._split, self._rank = mesh.get_group(), split, mesh.get_local_rank()

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of all ranks' tokens for the experts of this rank."""
        _call(meanwhile)
        lengths = chosen.new_empty(self._group.size())
        _COMM.gather(lengths, chosen.new_tensor([len(chosen)]), self._group)
        longest = int(lengths.max())
        everyone = self._gather(tokens, longest)
        # a token that only fills up is sent to no expert
        experts = self._gather(chosen + 1, longest) - 1
        slot_of, counts = _mine(experts, self._split, self._rank)
        load = by_expert(chosen, self._split.experts)[1]
        route = Route(slot_of, inverted(slot_of, experts.numel()), load)
        route.extra.update(longest=longest, tokens=len(tokens))
        return take(everyone, route.slot_of, route.row_of), counts, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The sums over ranks of what their experts add to this rank's tokens."""
        every = self._gather(weights, route.extra["longest"])
        parts = combine(outputs, every, route.slot_of, route.row_of)
        summed: Tensor = _ReduceScatter.apply(parts, self._group)
        return summed[: route.extra["tokens"]]

    def _gather(self, tensor: Tensor, longest: int) -> Tensor:
        filled = torch.cat((tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])))
        gathered: Tensor = _Gather.apply(filled, self._group)
        return gathered


class SharedTokens:
    """Every rank has all tokens and some experts: it computes what those add, and the parts are summed."""

    def __init__(self, mesh: DeviceMesh, split: ExpertSplit) -> None:
        _check_group(type(self).__name__, mesh, split)
        self._mesh, self._split = mesh, split

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of the common tokens for the experts of this rank."""
        _call(meanwhile)
        slot_of, counts = _mine(chosen, self._split, self._mesh.get_local_rank())
        load = by_expert(chosen, self._split.experts)[1]
        route = Route(slot_of, inverted(slot_of, chosen.numel()), load)
        return take(self._shared(tokens), route.slot_of, route.row_of), counts, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The sum over ranks of what their experts add."""
        part = combine(outputs, self._shared(weights), route.slot_of, route.row_of)
        return DTensor.from_local(part, self._mesh, [Partial()], run_check=False).full_tensor()

    def _shared(self, tensor: Tensor) -> Tensor:
        """The tensor itself; backward sums the gradients, of which each rank computes a part."""
        common = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        return common.to_local(grad_placements=[Partial()])


class SlicedTokens:
    """Ranks that share their tokens (tensor parallelism of attention) each send a part of them.

    So a token travels once, and an expert computes its row once, however many ranks hold the token.

    Args:
        inner: the dispatcher of what each rank sends.
        mesh: the ranks that share tokens, a 1-D mesh.
    """

    def __init__(self, inner: Dispatcher, mesh: DeviceMesh) -> None:
        self.inner, self._mesh = inner, mesh
        evaluation = getattr(inner, "for_evaluation", inner)
        self.for_evaluation = self if evaluation is inner else SlicedTokens(evaluation, mesh)

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Dispatch this rank's part of the common tokens."""
        rows, counts, route = self.inner.dispatch(self._part(tokens), self._part(chosen), meanwhile)
        route.extra["common"] = len(tokens)
        return rows, counts, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The tokens of all parts, on each rank."""
        mine = self.inner.combine(outputs, self._part(weights), route)
        shape = torch.Size((route.extra["common"], *mine.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(mine, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return parts.redistribute(placements=[Replicate()]).to_local()

    def _part(self, tensor: Tensor) -> Tensor:
        """This rank's rows; backward gathers those of all."""
        common = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        return common.redistribute(placements=[Shard(0)]).to_local()


def _check_group(name: str, mesh: DeviceMesh, split: ExpertSplit) -> None:
    if mesh.ndim != 1 or mesh.size() != split.ranks:
        raise ValueError(
            f"{name}: mesh must have one dim, of the {split.ranks} ranks of {split}, got {tuple(mesh.shape)}."
        )


def _sums(numbers: list[int], lengths: Sequence[int]) -> list[int]:
    """The sums of runs of these lengths."""
    return [sum(numbers[end - length : end]) for end, length in zip(accumulate(lengths), lengths)]


def _mine(chosen: Tensor, split: ExpertSplit, rank: int) -> tuple[Tensor, Tensor]:
    """The slots of this rank's experts, ordered by expert, and how many each of them has."""
    first, held = split.first[rank], split.held[rank]
    own = chosen - first
    slots, counts = by_expert(torch.where((own >= 0) & (own < held), own, held), held)
    return slots[: int(counts.sum())], counts


def _call(meanwhile: Meanwhile) -> None:
    if meanwhile is not None:
        meanwhile()


def exchange(
    rows: Tensor, sent: list[int], received: list[int], group: Any, meanwhile: Meanwhile = None
) -> Tensor:
    """Rows cut by ``sent`` to the ranks of a group, and the rows that they send here, in their order.

    ``meanwhile`` is called while they are on their way. What it puts into the graph lies between the start
    and the end of the exchange, so backward computes it while the gradients are on theirs.
    """
    if meanwhile is None:
        together: Tensor = _Exchange.apply(rows, sent, received, group)
        return together
    trip = _Trip(sent, received, group)
    arriving: Tensor = _Leave.apply(rows, trip)
    meanwhile()
    arrived: Tensor = _Arrive.apply(arriving, trip)
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


class _Trip:
    """One exchange and the one of its gradients: sizes, and what is on its way."""

    def __init__(self, sent: list[int], received: list[int], group: Any) -> None:
        self.sent, self.received, self.group = sent, received, group
        self._under_way: tuple[Any, Tensor, Tensor] | None = None

    def start(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send; the result may not be touched before :meth:`wait`."""
        given = rows.contiguous()
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        work = dist.all_to_all_single(result, given, received, sent, group=self.group, async_op=True)
        self._under_way = (work, given, result)  # memory that is still read or written must not go back
        return result

    def wait(self) -> Tensor:
        """What has arrived, once the current stream may use it."""
        assert self._under_way is not None
        (work, _, result), self._under_way = self._under_way, None
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


class _Gather(torch.autograd.Function):
    """The tensors of all ranks, one after the other; backward adds up what each rank has for its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        result = tensor.new_empty((group.size() * len(tensor), *tensor.shape[1:]))
        _COMM.gather(result, tensor.contiguous(), group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ReduceScatter.apply(grads[0], ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    """This rank's part of the sum over ranks; backward gathers."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        result = tensor.new_empty((len(tensor) // group.size(), *tensor.shape[1:]))
        _COMM.reduce(result, tensor.contiguous(), group, op=dist.ReduceOp.SUM)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Gather.apply(grads[0], ctx.group), None
