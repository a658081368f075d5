"""AdamW, Adam and SGD over flat buffers: one fused call per buffer instead of one entry per parameter.

Parameters made by ``fully_shard`` are views of one buffer per group, and so are their gradients. Parameters
whose local parts follow each other in memory form a *chain*; its state is one flat tensor per kind, of which
the ``state`` of a parameter is a view, laid out like the parameter, as checkpoints expect it::

    weights     | a a a a | b b | c c c c c | . |    a chain: a, b, c       (. padding ends it)
    exp_avg     | a a a a | b b | c c c c c |        one tensor, three views
    gradients   | a a a a | b b |   none    |        this step: one span, a and b

A step updates each span of a chain whose gradients follow each other too, and whose parameters are at the
same step, as one tensor; parameters that have no neighbours are chains of their own. The kernels are torch's
fused ones, so the numbers are those of ``torch.optim.AdamW(fused=True)``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ragged_fsdp.optim.base import ExactStateOptimizer
from ragged_fsdp.optim.checks import ADAM_RANGES, as_tuple, check_options, require_optimisable, require_option
from ragged_fsdp.optim.state import (
    StateForm,
    StepCounters,
    TensorAddresses,
    form_like,
    local_part,
    state_like,
)

__all__ = ["FusedAdam", "FusedAdamW", "FusedSGD"]

_MOST_REMEMBERED = 8
"""Sets of spans whose tensors are kept; they rarely are more than one."""


@dataclass(frozen=True)
class _Member:
    """One parameter of a chain: its place in its group, and its elements' start and number in the chain."""

    name: str
    param: Tensor
    position: int
    start: int
    numel: int


@dataclass(eq=False)
class _Chain:
    """Neighbouring parameters, their weights as one tensor, and their flat state by key.

    A parameter that is alone keeps its shape, so that its gradient needs no view.
    """

    members: list[_Member]
    weights: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.itemsize = self.weights.element_size()
        self.held = [member for member in self.members if member.numel]
        self.kind = (self.weights.dtype, self.weights.device)


class _Span(NamedTuple):
    """Elements [start, stop) of a chain."""

    chain: _Chain
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        """The span's part of a tensor of the chain."""
        if self.start == 0 and self.stop == flat.numel():
            return flat
        return flat.view(-1)[self.start : self.stop]


@dataclass
class _Update:
    """Spans of one dtype and device whose parameters took ``count`` steps before, and their gradients."""

    count: float
    spans: list[_Span] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)


class _GroupChains:
    """The parameters of one group: chains, step counts, and tensors of spans that were updated before."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], started: Container[Tensor]) -> None:
        self.chains = list(_find_chains(named, started))
        self.counters = StepCounters([param for _, param in named])
        self.addresses = TensorAddresses([member.param for chain in self.chains for member in chain.held])
        """Where the weights are; chains are right as long as that does not change."""
        self.started: dict[tuple[str, ...], set[int]] = defaultdict(set)
        """Positions of the parameters that have state under these keys."""
        self.places = {member.position: (chain, member) for chain in self.chains for member in chain.members}
        self._tensors: dict[tuple[Any, ...], list[list[Tensor]]] = {}

    def updates(self, grads: dict[int, Tensor]) -> list[_Update]:
        """What this step does: neighbours with neighbouring gradients and equal counts are one span."""
        counts = self.counters.counts()
        found: dict[Any, _Update] = {}
        for chain in self.chains:
            if len(chain.held) == 1:  # most of them, where parameters are not of one buffer
                position = chain.held[0].position
                grad = grads.get(position)
                if grad is None:
                    continue
                spans = [(counts[position], _Span(chain, 0, chain.held[0].numel), grad)]
            else:
                spans = list(self._stretches(chain, grads, counts))
            for count, span, span_grads in spans:
                key = (count, chain.kind)
                update = found.get(key)
                if update is None:
                    update = found[key] = _Update(count)
                update.spans.append(span)
                update.grads.append(span_grads)
        return list(found.values())

    def _stretches(
        self, chain: _Chain, grads: dict[int, Tensor], counts: Sequence[float]
    ) -> Iterator[tuple[float, _Span, Tensor]]:
        """The spans of a chain with several parameters."""
        first: _Member | None = None
        count, stop, expected = 0.0, 0, 0
        for member in chain.held:
            grad = grads.get(member.position)
            if grad is None:
                continue
            address = grad.data_ptr()
            extends = member.start == stop and counts[member.position] == count and address == expected
            if first is not None and not extends:
                yield from self._joined(chain, first, stop, grads, count)
            if first is None or not extends:
                first, count = member, counts[member.position]
            stop, expected = member.start + member.numel, address + member.numel * chain.itemsize
        if first is not None:
            yield from self._joined(chain, first, stop, grads, count)

    def _joined(
        self, chain: _Chain, first: _Member, stop: int, grads: dict[int, Tensor], count: float
    ) -> Iterator[tuple[float, _Span, Tensor]]:
        """Neighbours from ``first`` to ``stop`` as one span, if their gradients lie in one storage."""
        grad, numel = grads[first.position], stop - first.start
        if numel == first.numel:
            yield count, _Span(chain, first.start, stop), grad.view(-1)
        elif (grad.storage_offset() + numel) * chain.itemsize <= grad.untyped_storage().nbytes():
            yield count, _Span(chain, first.start, stop), _flat_from(grad, numel)
        else:  # allocations that touch by chance
            for member in chain.held:
                if first.start <= member.start < stop:
                    flat = grads[member.position].view(-1)
                    yield count, _Span(chain, member.start, member.start + member.numel), flat

    def tensors(self, spans: Sequence[_Span], keys: Sequence[str]) -> list[list[Tensor]]:
        """The weights of the spans, then their state by key."""
        key = (*keys, *spans)
        if key not in self._tensors:
            if len(self._tensors) >= _MOST_REMEMBERED:
                self._tensors.clear()
            weights = [span.of(span.chain.weights) for span in spans]
            states = [[span.of(span.chain.state[key]) for span in spans] for key in keys]
            self._tensors[key] = [weights, *states]
        return self._tensors[key]


def _find_chains(named: Iterable[tuple[str, Tensor]], started: Container[Tensor]) -> Iterator[_Chain]:
    """Parameters in order of their addresses, joined where one ends and the next begins.

    Those with state and those without are apart, so that state that lies flat can stay where it is. So are
    frozen ones: state that they may never need would take memory.
    """
    every = [(position, name, param) for position, (name, param) in enumerate(named)]
    members: list[_Member] = []
    stop = 0
    for position, name, param in sorted(every, key=lambda item: local_part(item[2]).data_ptr()):
        local = local_part(param)
        if not local.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous parameter, got stride {local.stride()}.")
        if not local.numel():  # a rank that holds nothing still has state to save
            yield _Chain([_Member(name, param, position, 0, 0)], local.detach())
            continue
        last = members[-1].param if members else param
        alike = (last in started, last.requires_grad) == (param in started, param.requires_grad)
        if members and not (alike and _are_neighbours(local_part(last), local)):
            yield _chain_of(members, stop)
            members, stop = [], 0
        members.append(_Member(name, param, position, stop, local.numel()))
        stop += local.numel()
    if members:
        yield _chain_of(members, stop)


def _chain_of(members: list[_Member], numel: int) -> _Chain:
    first = local_part(members[0].param).detach()
    return _Chain(members, first if len(members) == 1 else _flat_from(first, numel))


def _are_neighbours(left: Tensor, right: Tensor) -> bool:
    end = left.data_ptr() + left.numel() * left.element_size()
    same_storage = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return left.dtype == right.dtype and end == right.data_ptr() and same_storage


def _flat_from(first: Tensor, numel: int) -> Tensor:
    """``numel`` elements from the start of ``first``, beyond its end within its storage."""
    return torch.as_strided(first, (numel,), (1,), first.storage_offset())


class _FlatOptimizer(ExactStateOptimizer):
    """What the fused optimizers share: chains, their state, and the spans of a step."""

    _expected: ClassVar[dict[str, str]]
    """Options and their ranges; see :func:`~ragged_fsdp.optim.checks.check_options`."""

    _same_dtype: ClassVar[bool] = True  # torch's fused kernels want it

    _saves_step: ClassVar[bool] = True
    """Whether torch's optimizer of this kind saves step counts."""

    _members: list[_GroupChains] | None = None
    """Chains by group; found at the next step if None, as in a copy that was never initialised."""

    def _forget_plans(self) -> None:
        self._members = None  # loaded state is moved into flat tensors at the next step

    def _plan_group(self, index: int) -> None:
        check_options(self.param_groups[index], self._expected)
        for name, param in self.named_group_params(index):
            require_optimisable(name, param)
        self._members = None

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        raise NotImplementedError

    def _apply(self, group: dict[str, Any], update: _Update, tensors: list[list[Tensor]]) -> None:
        """Update spans of one dtype and device; ``tensors`` are their weights, then their state."""
        raise NotImplementedError

    def _expected_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, StateForm | None]:
        steps: dict[str, StateForm | None] = {"step": None} if self._saves_step else {}
        return {**steps, **dict.fromkeys(self._state_keys(group), form_like(param))}

    def _update_all(self, every_grad: Sequence[dict[int, Tensor]]) -> None:
        for group, members, grads in zip(self.param_groups, self._current_members(), every_grad):
            keys = self._state_keys(group)
            if fresh := grads.keys() - members.started[keys]:
                self._start(group, members, sorted(fresh))
            for update in members.updates(grads):
                self._apply(group, update, members.tensors(update.spans, keys))
            members.counters.advance(grads)

    def _current_members(self) -> list[_GroupChains]:
        """The chains of each group; found again after parameters moved, were added or state was loaded."""
        known = self._members
        if known is not None and not any(members.addresses.have_changed() for members in known):
            return known
        started = {param for param, state in self.state.items() if state}
        named = [list(self.named_group_params(i)) for i in range(len(self.param_groups))]
        found = [_GroupChains(of_group, started) for of_group in named]
        for group, members in zip(self.param_groups, found):
            loaded = [i for i, param in enumerate(group["params"]) if self.state.get(param)]
            self._start(group, members, loaded)
        self._members = found
        return found

    def _start(self, group: dict[str, Any], members: _GroupChains, positions: Sequence[int]) -> None:
        """Give parameters their views of the chains' state, keeping values they already have.

        In the order of the parameters, not of addresses: ranks must create state in the same order.
        """
        keys = self._state_keys(group)
        if not keys:  # SGD without momentum has no state
            return
        self._noted = None
        members.started[keys].update(positions)
        for position in positions:
            chain, member = members.places[position]
            state = self.state[member.param]
            if self._saves_step:
                members.counters.adopt(member.param, state)
            else:  # all that matters is whether momentum begins, which the state tells, as torch's
                state.pop("step", None)  # of a file that we wrote before
                members.counters.flat[position] = float(state.keys() >= set(keys))
            for key in keys:
                if key not in chain.state:
                    flat = self._flat_state(chain, key)
                    chain.state[key] = torch.zeros_like(chain.weights) if flat is None else flat
                view = chain.state[key].view(-1)[member.start : member.start + member.numel]
                if key in state:
                    held = local_part(state[key])
                    if held.data_ptr() == view.data_ptr() and held.dtype is view.dtype:
                        continue  # it lies there already, or is empty
                    view.copy_(held.reshape(-1))
                state[key] = state_like(member.param, view.view(local_part(member.param).shape))

    def _flat_state(self, chain: _Chain, key: str) -> Tensor | None:
        """State that the parameters of a chain have, if it lies as their weights do: one after the other.

        Only of a part of an optimizer: otherwise the tensors may be those of whoever called load_state_dict.
        """
        if not self._places:
            return None
        states = [self.state.get(member.param, {}).get(key) for member in chain.held]
        if not states or any(state is None for state in states):
            return None
        parts = [local_part(state) for state in states if state is not None]
        flat = all(part.is_contiguous() for part in parts) and all(map(_are_neighbours, parts, parts[1:]))
        if not flat or (parts[0].dtype, parts[0].device) != chain.kind:
            return None
        return parts[0] if len(parts) == 1 else _flat_from(parts[0], chain.weights.numel())


class FusedAdam(_FlatOptimizer):
    """``torch.optim.Adam(fused=True)`` over flat buffers; weight decay is an L2 term.

    Args:
        params: parameters, named parameters or groups.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch, also per group.
    """

    _kernel = staticmethod(torch._fused_adam_)
    _expected: ClassVar = {**ADAM_RANGES, "eps": "non-negative"}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": as_tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())

    def _apply(self, group: dict[str, Any], update: _Update, tensors: list[list[Tensor]]) -> None:
        beta1, beta2 = group["betas"]
        weights, means, squares, *largest = tensors
        step = torch.full((), update.count + 1, dtype=torch.float32, device=weights[0].device)
        kernel: Callable[..., Any] = self._kernel
        kernel(
            weights,
            update.grads,
            means,
            squares,
            largest[0] if largest else [],
            [step] * len(weights),
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
        )


class FusedAdamW(FusedAdam):
    """``torch.optim.AdamW(fused=True)`` over flat buffers; weight decay is decoupled, 0.01 by default."""

    _kernel = staticmethod(torch._fused_adamw_)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)


class FusedSGD(_FlatOptimizer):
    """``torch.optim.SGD(fused=True)`` over flat buffers.

    Args:
        params: parameters, named parameters or groups.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch, also per group.
    """

    _saves_step: ClassVar = False
    _expected: ClassVar = {
        **dict.fromkeys(("lr", "momentum", "weight_decay"), "non-negative"),
        "dampening": "a number",
    }

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _plan_group(self, index: int) -> None:
        super()._plan_group(index)
        group = self.param_groups[index]
        plain = group["momentum"] > 0 and group["dampening"] == 0
        ok = not group["nesterov"] or plain
        require_option(group, "nesterov", ok, "with momentum and without dampening")

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _apply(self, group: dict[str, Any], update: _Update, tensors: list[list[Tensor]]) -> None:
        weights, *buffers = tensors
        grads = update.grads
        narrow = weights[0].element_size() < 4 and weights[0].device.type == "cpu"
        if narrow:  # torch's kernel for the host leaves such weights as they are (pytorch/pytorch#191763)
            weights, grads, *buffers = ([t.float() for t in those] for those in (weights, grads, *buffers))
        torch._fused_sgd_(
            weights,
            grads,
            buffers[0] if buffers else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=bool(buffers) and update.count == 0,  # torch warns where there is none
        )
        if narrow:
            for rounded, exact in zip(tensors, (weights, *buffers)):
                torch._foreach_copy_(rounded, exact)
