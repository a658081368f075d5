"""How tokens come to their experts and the outputs back: an interface, and four ways; ``levels`` has a fifth.

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
to every rank, which is less where K is larger than the group. A dispatcher has no parameters. DeepEP, or a
library's own exchange, is a class with the two methods of :class:`Dispatcher`:
:func:`ragged_fsdp.experts.expert_parallel` takes a function that makes one.

Exact ways ask the device how many rows there are: the host must know to allocate. With a ``capacity``
:class:`AllToAll` does not: each rank sends each other one a fixed number of rows, and what does not fit is
dropped and counted.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ragged_fsdp.agreement import compare
from ragged_fsdp.collectives import Comm
from ragged_fsdp.experts.permute import combine, count, order, place, take
from ragged_fsdp.experts.split import ExpertSplit
from ragged_fsdp.experts.tally import keep_largest
from ragged_fsdp.torch_internals import joined_launch

__all__ = ["AllGather", "AllToAll", "Dispatcher", "Here", "Route", "SharedTokens", "SlicedTokens"]

_COMM = Comm()


@dataclass
class Route:
    """Where the rows of one layer came from; made by ``dispatch`` and taken by ``combine``."""

    row_of: Tensor
    """The row of each slot (token * K + k), -1 where it is not among the rows."""
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
        row_of, counts = order(chosen, self._experts)
        route = Route(row_of, counts, extra={"dtype": tokens.dtype})
        return take(tokens, row_of, len(row_of)), counts, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The weighted sums."""
        return combine(outputs, weights, route.row_of, len(weights), dtype=route.extra["dtype"])


class AllToAll:
    """Rows are sent to their experts, and outputs back.

    An exchange for each place in a rank's list of experts lets rows arrive grouped. The sender orders its
    rows by that place, and by rank within it, so each of these exchanges sends and receives what lies
    together, and nobody moves a row a second time::

        rank 0   a0 a1 c0 c1 | b0 d0       experts a, b are on rank 0, c, d on rank 1
        rank 1   a2          | b1 b2 d1

        rank 0 receives   a0 a1 a2 | b0 b1 b2        rank 1   c0 c1 | d0 d1

    NCCL launches several as one: all of them on the way back, and on the way there the first ones by
    themselves, so that they travel while the host calls the others (:func:`launches`). Where a rank holds
    many experts, or with a capacity, all rows come in one exchange, ordered by sender, and are grouped here:
    one more pass over them.

    Args:
        mesh: the ranks that experts are spread over, a 1-D mesh or a process group.
        split: how many experts each of them holds.
        capacity: None sends what there is. A number is the rows that each rank sends each other one, as a
            multiple of those it would send if tokens went everywhere alike: 2.0 has room for twice as many.
            It fixes every shape, so nothing waits for the device; what does not fit is dropped. All ranks
            must then have as many tokens; the first call with a number of them compares. In evaluation mode
            everything is sent.
        most_exchanges: rows come in an exchange per expert if no rank holds more experts than this.
        partial: slots may be of no expert, numbered one past the last; they are not sent.
    """

    def __init__(
        self,
        mesh: DeviceMesh | dist.ProcessGroup,
        split: ExpertSplit,
        *,
        capacity: float | None = None,
        most_exchanges: int = 32,
        partial: bool = False,
    ) -> None:
        if isinstance(mesh, DeviceMesh):
            _check_group(type(self).__name__, mesh, split)
        if capacity is not None and not capacity > 0:
            raise ValueError(f"AllToAll: capacity must be None or positive, got {capacity!r}.")
        self._group = mesh.get_group() if isinstance(mesh, DeviceMesh) else mesh
        self._ranks, self._most = self._group.size(), max(split.held)
        self._split, self._held = split, split.held[self._group.rank()]
        self._partial, self._by_expert = partial, capacity is None and self._most <= most_exchanges
        self.capacity = capacity
        self.for_evaluation = self
        if capacity is not None:
            self.for_evaluation = AllToAll(mesh, split, most_exchanges=most_exchanges, partial=partial)
        self.needed: Tensor | None = None
        """The capacity that would have dropped nothing since :meth:`forget_needed`; None without one."""
        self._agreed: set[int] = set()
        self._constants: dict[torch.device, tuple[Tensor, ...]] = {}

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of all ranks' tokens for the experts of this rank."""
        if self.capacity is not None:
            return self.dispatch_fixed(tokens, chosen, chosen.numel(), meanwhile)
        by_rank, by_place, _, _ = self._on(chosen.device)
        numbers = chosen.new_zeros(2, self._ranks, self._most, dtype=torch.int64)
        counts, received = numbers
        if self._by_expert:
            counted = count(chosen, counts.numel(), by_place, into=counts)
        else:
            counted = count(chosen, counts.numel(), by_rank, into=counts.view(-1))
        dist.all_to_all_single(received, counts, group=self._group)
        asked = Asked(numbers)
        # launched while the answer is on its way: the device must not wait for the host after it
        row_of, held = counted.rows(None), received.sum(0)[: self._held]
        load = counts.view(-1) if self._split.is_even else counts.view(-1)[by_rank[:-1]]
        rows = None if self._partial else take(tokens, row_of, len(row_of))
        sent_to, received_from = asked.answer()  # the one wait for the device; both (rank, place in its list)
        if self._by_expert:
            there, here = ([list(column) for column in zip(*each)] for each in (sent_to, received_from))
        else:
            there, here = ([[sum(row) for row in each]] for each in (sent_to, received_from))
        if rows is None:
            rows = take(tokens, row_of, sum(map(sum, there)))
        arrived = exchange(rows, there, here, self._group, meanwhile, launches(len(there)))
        route = Route(row_of, load, extra={"dtype": tokens.dtype, "there": there, "here": here})
        if self._by_expert:
            return arrived, held, route
        places = torch.arange(self._most, device=tokens.device).repeat(self._ranks)
        places = places.repeat_interleave(received.flatten(), output_size=len(arrived))
        return self._grouped(arrived, places, route)

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The weighted sums of outputs that came back."""
        way = route.extra
        if "arrival" in way:
            arrival = way["arrival"]
            outputs = combine(outputs, None, arrival, len(arrival), filled=way["filled"])
        back = exchange(outputs, way["here"], way["there"], self._group)
        return combine(back, weights, route.row_of, len(weights), dtype=way["dtype"])

    def forget_needed(self) -> None:
        """Count the capacity that is needed anew."""
        if self.needed is not None:
            self.needed.zero_()

    def dispatch_fixed(self, tokens: Tensor, chosen: Tensor, slots: int, meanwhile: Meanwhile) -> Dispatched:
        """Send every rank as many rows, from the capacity for ``slots``; no shape depends on the routes."""
        assert self.capacity is not None
        agree_on_tokens(len(tokens), self.capacity, self._agreed, self._group, tokens.device)
        _, _, rank_of, place_of = self._on(tokens.device)
        # by rank alone: ordered by expert too, the last one of a rank would lose all that does not fit
        counted = count(chosen, self._ranks, rank_of)
        room = min(chosen.numel(), math.ceil(self.capacity * slots / self._ranks))
        self.needed = keep_largest(self.needed, counted.counts.max() * (self._ranks / max(1, slots)))
        row_of, sent = counted.rows(room), room * self._ranks
        equal = [[room] * self._ranks]
        numbers = place(place_of[chosen.flatten()], row_of, sent, self._most)  # one past the last: padding
        numbers = exchange(numbers, equal, equal, self._group)
        rows = exchange(take(tokens, row_of, sent), equal, equal, self._group, meanwhile)
        dropped = (counted.counts - room).clamp(min=0).sum()
        route = Route(row_of, count(chosen, self._split.experts).counts, dropped)
        route.extra.update(dtype=tokens.dtype, there=equal, here=equal)
        return self._grouped(rows, numbers, route)

    def _grouped(self, rows: Tensor, places: Tensor, route: Route) -> Dispatched:
        """Rows that came ordered by sender, in the order of their experts, whose places are given."""
        arrival, counts = order(places, self._most)
        # padding is last, and zeros: what experts make of it must not spoil gradients of what they share
        filled = None if self.capacity is None else counts
        route.extra.update(arrival=arrival, filled=filled)
        grouped = take(rows, arrival, len(arrival), filled=filled)
        return grouped, counts[: self._held], route

    def _on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Each expert's number, by rank and then place there, and the other way round; its rank, and its
        place. Copied once; there is an entry for no expert too, one past the last number of each.
        """
        if device not in self._constants:
            ranks, most = self._ranks, self._most
            places = [(rank, i) for rank, held in enumerate(self._split.held) for i in range(held)]
            numbers = [(rank * most + place, place * ranks + rank, rank, place) for rank, place in places]
            numbers.append((ranks * most, ranks * most, ranks, most))
            self._constants[device] = tuple(torch.tensor(each, device=device) for each in zip(*numbers))
        return self._constants[device]


def all_to_all(mesh: DeviceMesh, split: ExpertSplit, *, capacity: float | None = None) -> Dispatcher:
    """:class:`AllToAll`, or :class:`Here` where one rank holds everything."""
    return Here(split.experts) if mesh.size() == 1 else AllToAll(mesh, split, capacity=capacity)


class AllGather:
    """Every rank gets the tokens of all, applies its experts, and the results are summed where they belong.

    For small groups: two collectives that every backend does well.

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
        row_of, counts = _mine(experts, self._split, self._rank)
        route = Route(row_of, count(chosen, self._split.experts).counts)
        route.extra.update(longest=longest, tokens=len(tokens))
        return take(everyone, row_of, int(counts.sum())), counts, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The sums over ranks of what their experts add to this rank's tokens."""
        every = self._gather(weights, route.extra["longest"])
        parts = combine(outputs, every, route.row_of, len(every))
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
        row_of, counts = _mine(chosen, self._split, self._mesh.get_local_rank())
        route = Route(row_of, count(chosen, self._split.experts).counts)
        return take(self._shared(tokens), row_of, int(counts.sum())), counts, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The sum over ranks of what their experts add."""
        part = combine(outputs, self._shared(weights), route.row_of, len(weights))
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
        more = () if meanwhile is None else (meanwhile,)
        rows, counts, route = self.inner.dispatch(self._part(tokens), self._part(chosen), *more)
        route.extra["common"] = len(tokens)
        return rows, counts, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The tokens of all parts, on each rank."""
        part = self._part(weights)
        mine = self.inner.combine(outputs, part, route)
        check_made(self, "result of combine", mine, (len(part), outputs.shape[-1]))
        shape = torch.Size((route.extra["common"], *mine.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        parts = DTensor.from_local(mine, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return parts.redistribute(placements=[Replicate()]).to_local()

    def _part(self, tensor: Tensor) -> Tensor:
        """This rank's rows; backward gathers those of all."""
        common = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        return common.redistribute(placements=[Shard(0)]).to_local()


def takes_work(dispatcher: Dispatcher) -> bool:
    """Whether it has a moment for other work; one of the user's own need not have one."""
    return "meanwhile" in inspect.signature(_own(dispatcher).dispatch).parameters


def check_made(dispatcher: Dispatcher, what: str, made: Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless a dispatcher keeps to its protocol: else rows without a count would become zeros."""
    if made.shape != shape:
        name = type(_own(dispatcher)).__name__
        raise ValueError(f"{name}: {what} must have shape {shape}, got {tuple(made.shape)}.")


def _own(dispatcher: Dispatcher) -> Dispatcher:
    return dispatcher.inner if isinstance(dispatcher, SlicedTokens) else dispatcher


def _check_group(name: str, mesh: DeviceMesh, split: ExpertSplit) -> None:
    if mesh.ndim != 1 or mesh.size() != split.ranks:
        raise ValueError(
            f"{name}: mesh must have one dim, of the {split.ranks} ranks of {split}, got {tuple(mesh.shape)}."
        )


def _mine(chosen: Tensor, split: ExpertSplit, rank: int) -> tuple[Tensor, Tensor]:
    """The rows of slots of this rank's experts, ordered by expert, and how many each of them has."""
    first, held = split.first[rank], split.held[rank]
    own = chosen - first
    return order(torch.where((own >= 0) & (own < held), own, held), held)


def agree_on_tokens(tokens: int, capacity: float, agreed: set[int], group: Any, device: torch.device) -> None:
    """Refuse numbers of tokens, or a capacity, that are not those of the other ranks, which would wait for
    ever; compared once for each number of tokens."""
    if tokens in agreed:
        return
    differs = compare(f"{tokens} tokens, capacity {capacity}", [group], device)
    if differs is not None:
        raise ValueError(
            f"AllToAll: ranks must have the same capacity, and with it as many tokens; {differs.difference}."
        )
    agreed.add(tokens)


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


def _call(meanwhile: Meanwhile) -> None:
    if meanwhile is not None:
        meanwhile()


Pieces = Sequence[list[int]]
"""Of each exchange how many rows go to, or come from, each rank of the group."""


def launches(exchanges: int) -> list[int]:
    """How many exchanges each launch has where the device waits for the host: 2, 2, 4, 8 of 16.

    Each is on its way while the next one, at most as large as all before it, is called.
    """
    if exchanges < 4:
        return [exchanges]
    return [*launches(exchanges - exchanges // 2), exchanges // 2]


def exchange(
    rows: Tensor,
    sent: Pieces,
    received: Pieces,
    group: Any,
    meanwhile: Meanwhile = None,
    launched: Sequence[int] | None = None,
) -> Tensor:
    """Rows cut by ``sent`` to the ranks of a group, and the rows that they send here, in their order.

    With several pieces one exchange after the other, so many in each launch as ``launched`` says, or all, if
    the backend can. ``meanwhile`` is called while rows are on their way. What it puts into the graph lies
    between the start and the end of the exchange, so backward computes it while the gradients are on theirs.
    """
    if group.size() == 1:
        _call(meanwhile)
        return rows
    launched = launched or [len(sent)]
    if meanwhile is None:
        together: Tensor = _Exchange.apply(rows, sent, received, group, launched)
        return together
    trip = _Trip(sent, received, group, launched)
    arriving: Tensor = _Leave.apply(rows, trip)
    meanwhile()
    arrived: Tensor = _Arrive.apply(arriving, trip)
    return arrived


def _start(
    rows: Tensor, sent: Pieces, received: Pieces, group: Any, launched: Sequence[int], async_op: bool
) -> tuple[Tensor, list[Any]]:
    """Send; where rows will be, and what to wait for."""
    result, works = rows.new_empty((sum(map(sum, received)), *rows.shape[1:])), []
    parts = zip(result.split([sum(n) for n in received]), rows.split([sum(n) for n in sent]), received, sent)
    for exchanges in launched:
        with joined_launch(group, rows.device, async_op) if exchanges > 1 else nullcontext([]) as joined:
            for into, given, here, there in islice(parts, exchanges):
                work = dist.all_to_all_single(into, given, here, there, group=group, async_op=async_op)
                joined.append(work)
        works += joined
    return result, works


class _Exchange(torch.autograd.Function):
    """An exchange that is waited for where it is made."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Pieces, received: Pieces, group: Any, launched: Sequence[int]
    ) -> Tensor:
        ctx.back = (received, sent, group, [len(sent)])
        return _start(rows.contiguous(), sent, received, group, launched, False)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchange.apply(grads[0], *ctx.back), None, None, None, None


class _Trip:
    """One exchange and the one of its gradients: sizes, and what is on its way."""

    def __init__(self, sent: Pieces, received: Pieces, group: Any, launched: Sequence[int]) -> None:
        self.sent, self.received, self.group, self.launched = sent, received, group, launched
        self._under_way: tuple[list[Any], Tensor, Tensor] | None = None

    def start(self, rows: Tensor, sent: Pieces, received: Pieces, launched: Sequence[int]) -> Tensor:
        """Send; the result may not be touched before :meth:`wait`."""
        given = rows.contiguous()
        result, works = _start(given, sent, received, self.group, launched, True)
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
        return trip.start(rows, trip.sent, trip.received, trip.launched)

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
        trip.start(grads[0], trip.received, trip.sent, [len(trip.sent)])
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
