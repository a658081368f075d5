"""How tokens come to their experts and the outputs back: an interface, and the ways there are.

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

``AllToAll`` is in ``all_to_all``, and in ``levels`` the one over several nodes.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ragged_fsdp.collectives import Comm
from ragged_fsdp.experts.exchange import Meanwhile, call
from ragged_fsdp.experts.permute import combine, count, order, take
from ragged_fsdp.experts.split import ExpertSplit

__all__ = [
    "AllGather",
    "Dispatched",
    "Dispatcher",
    "Here",
    "Meanwhile",
    "Route",
    "SharedTokens",
    "SlicedTokens",
    "check_group",
    "check_made",
    "takes_work",
]

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


class Dispatcher(Protocol):
    """Brings tokens to the experts of this rank, and what the experts made of them back.

    One that may drop rows can have an attribute ``for_evaluation``: the dispatcher of modules that do not
    train.
    """

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Tokens (N, D) and their experts (N, K) to rows (R, D) grouped by the experts held here.

        A slot numbered one past the last expert is of none: it has no row, and adds nothing to its token.

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
        call(meanwhile)
        row_of, counts = order(chosen, self._experts)
        route = Route(row_of, counts, extra={"dtype": tokens.dtype})
        return take(tokens, row_of, len(row_of)), counts, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The weighted sums."""
        return combine(outputs, weights, route.row_of, len(weights), dtype=route.extra["dtype"])


class AllGather:
    """Every rank gets the tokens of all, applies its experts, and the results are summed where they belong.

    For small groups: two collectives that every backend does well.

    Args:
        mesh: the ranks that experts are spread over, a 1-D mesh.
        split: how many experts each of them holds.
    """

    def __init__(self, mesh: DeviceMesh, split: ExpertSplit) -> None:
        check_group(type(self).__name__, mesh, split)
        self._group, self._split, self._rank = mesh.get_group(), split, mesh.get_local_rank()

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of all ranks' tokens for the experts of this rank."""
        call(meanwhile)
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
        check_group(type(self).__name__, mesh, split)
        self._mesh, self._split = mesh, split

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of the common tokens for the experts of this rank."""
        call(meanwhile)
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


def check_group(name: str, mesh: DeviceMesh, split: ExpertSplit) -> None:
    """Raise unless ``mesh`` has the ranks that ``split`` is for."""
    if mesh.ndim != 1 or mesh.size() != split.ranks:
        raise ValueError(
            f"{name}: mesh must have one dim, of the {split.ranks} ranks of {split}, got {tuple(mesh.shape)}."
        )


def _mine(chosen: Tensor, split: ExpertSplit, rank: int) -> tuple[Tensor, Tensor]:
    """The rows of slots of this rank's experts, ordered by expert, and how many each of them has."""
    first, held = split.first[rank], split.held[rank]
    own = chosen - first
    return order(torch.where((own >= 0) & (own < held), own, held), held)


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
