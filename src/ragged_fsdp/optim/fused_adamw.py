"""AdamW, Adam and SGD over flat buffers: one fused call per buffer instead of one entry per parameter.

Parameters made by ``fully_shard`` are views of one buffer per group, and so are their gradients. Parameters
whose local parts are neighbours in memory form a *run*; its state is one flat tensor per kind, of which the
``state`` of a parameter is a view, laid out like the parameter, as checkpoints expect it::

    weights     | a a a a | b b | c c c c c | . |    a run: a, b, c         (. padding ends it)
    exp_avg     | a a a a | b b | c c c c c |        one tensor, three views
    gradients   | a a a a | b b |   none    |        this step: one stretch, a and b

A step updates each stretch of a run whose gradients are neighbours too, and whose parameters are at the same
step, as one tensor. The kernels are torch's fused ones, so the numbers are those of
``torch.optim.AdamW(fused=True)``; parameters that are not neighbours of others are runs of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ragged_fsdp.optim.state import (
    ExactStateOptimizer,
    StepCounters,
    local_of,
    require_matching_grad,
    require_plain_shards,
    state_like,
)

__all__ = ["FusedAdam", "FusedAdamW", "FusedSGD"]


@dataclass(frozen=True)
class _Member:
    """One parameter of a run: its place in its group, and its elements' start and number in the run."""

    name: str
    param: Tensor
    position: int
    start: int
    numel: int


@dataclass
class _Run:
    """Neighbouring parameters, their weights as one tensor, and their flat state by key."""

    members: list[_Member]
    weights: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.itemsize = self.weights.element_size()
        self.held = [member for member in self.members if member.numel]


@dataclass(frozen=True)
class _Stretch:
    """Elements [start, stop) of a run that are updated as one tensor, and their gradients."""

    run: _Run
    start: int
    stop: int
    grads: Tensor

    def of(self, flat: Tensor) -> Tensor:
        """The stretch's part of a flat tensor of the run."""
        whole = self.start == 0 and self.stop == flat.numel()
        return flat if whole else flat[self.start : self.stop]


class _FlatOptimizer(ExactStateOptimizer):
    """What the fused optimizers share: runs, their state, and the stretches of a step."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._runs: list[list[_Run]] | None = None
        self._counters: list[StepCounters] = []
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; nothing is changed if one of its options or parameters is refused."""
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            for name, param in self.named_group_params(len(self.param_groups) - 1):
                require_plain_shards(name, param)
                if not param.is_floating_point():
                    raise TypeError(f"{name}: expected a floating-point parameter, got {param.dtype}.")
        except Exception:
            self.param_groups.pop()
            raise
        self._runs = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._runs = None  # loaded state is moved into flat tensors at the next step

    def _check_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        raise NotImplementedError

    def _update(self, group: dict[str, Any], count: int, stretches: Sequence[_Stretch]) -> None:
        """Update stretches of one dtype and device whose parameters took ``count`` steps before."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; no communication."""
        loss = self._loss_of(closure)
        runs = self._current_runs()
        for group, counters, of_group in zip(self.param_groups, self._counters, runs):
            before, ready = counters.counts(), defaultdict(list)
            for run in of_group:
                for count, stretch in _stretches(run, before):
                    ready[count, run.weights.dtype, run.weights.device].append(stretch)
            stepped = [i for i, param in enumerate(group["params"]) if param.grad is not None]
            if fresh := [i for i in stepped if before[i] == 0]:
                self._start(group, counters, of_group, fresh)
            for (count, _, _), stretches in ready.items():
                self._update(group, count, stretches)
            counters.advance(stepped)
        return loss

    # -- runs ------------------------------------------------------------------------------------

    def _current_runs(self) -> list[list[_Run]]:
        """The runs of each group; found again after parameters moved, were added or state was loaded."""
        if self._runs is not None and not any(_has_moved(run) for runs in self._runs for run in runs):
            return self._runs
        self._runs, self._counters = [], []
        for index, group in enumerate(self.param_groups):
            runs, counters = list(_find_runs(self.named_group_params(index))), StepCounters(group["params"])
            loaded = [i for i, param in enumerate(group["params"]) if self.state.get(param)]
            self._runs.append(runs)
            self._counters.append(counters)
            self._start(group, counters, runs, loaded)
        return self._runs

    def _start(
        self, group: dict[str, Any], counters: StepCounters, runs: Sequence[_Run], positions: Sequence[int]
    ) -> None:
        """Give parameters their views of the runs' state, keeping values they already have.

        In the order of the parameters, not of addresses: ranks must create state in the same order.
        """
        places = {member.position: (run, member) for run in runs for member in run.members}
        for position in positions:
            run, member = places[position]
            state = self.state[member.param]
            counters.adopt(member.param, state, missing=1.0 if state else 0.0)  # torch's SGD saves none
            for key in self._state_keys(group):
                if key not in run.state:
                    run.state[key] = torch.zeros_like(run.weights)
                view = run.state[key][member.start : member.start + member.numel]
                if key in state:
                    view.copy_(local_of(state[key]).reshape(-1))
                state[key] = state_like(member.param, view.view(local_of(member.param).shape))


def _stretches(run: _Run, counts: Sequence[int]) -> Iterator[tuple[int, _Stretch]]:
    """The stretches of this step, each with the steps its parameters took before."""
    first: _Member | None = None
    grads, count, stop, expected = run.weights, 0, 0, 0
    for member in run.held:
        if member.param.grad is None:
            continue
        grad = _local_grad(run, member)
        address = grad.data_ptr()
        extends = member.start == stop and counts[member.position] == count and address == expected
        if first is not None and not extends:
            yield from _joined(run, first, stop, grads, count)
        if first is None or not extends:
            first, grads, count = member, grad, counts[member.position]
        stop, expected = member.start + member.numel, address + member.numel * run.itemsize
    if first is not None:
        yield from _joined(run, first, stop, grads, count)


def _joined(
    run: _Run, first: _Member, stop: int, grads: Tensor, count: int
) -> Iterator[tuple[int, _Stretch]]:
    """Neighbours from ``first`` to ``stop`` as one stretch: their gradients lie in one storage."""
    numel = stop - first.start
    if numel == first.numel:
        yield count, _Stretch(run, first.start, stop, grads.view(-1))
        return
    end = (grads.storage_offset() + numel) * run.itemsize
    if end <= grads.untyped_storage().nbytes():
        yield count, _Stretch(run, first.start, stop, _flat_from(grads, numel))
        return
    for member in run.held:  # allocations that touch by chance
        if first.start <= member.start < stop:
            flat = _local_grad(run, member).reshape(-1)
            yield count, _Stretch(run, member.start, member.start + member.numel, flat)


def _local_grad(run: _Run, member: _Member) -> Tensor:
    require_matching_grad(member.name, member.param)
    assert member.param.grad is not None
    grad = local_of(member.param.grad)
    if grad.dtype != run.weights.dtype:
        raise TypeError(f"{member.name}: expected a gradient of {run.weights.dtype}, got {grad.dtype}.")
    return grad if grad.is_contiguous() else grad.contiguous()


def _find_runs(named: Iterable[tuple[str, Tensor]]) -> Iterator[_Run]:
    """Parameters in order of their addresses, joined where one ends and the next begins."""
    every = [(position, name, param) for position, (name, param) in enumerate(named)]
    members: list[_Member] = []
    stop = 0
    for position, name, param in sorted(every, key=lambda item: local_of(item[2]).data_ptr()):
        local = local_of(param)
        if not local.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous parameter, got stride {local.stride()}.")
        if not local.numel():  # a rank that holds nothing still has state to save
            yield _Run([_Member(name, param, position, 0, 0)], local.reshape(-1))
            continue
        if members and not _are_neighbours(local_of(members[-1].param), local):
            yield _Run(members, _flat_from(local_of(members[0].param), stop))
            members, stop = [], 0
        members.append(_Member(name, param, position, stop, local.numel()))
        stop += local.numel()
    if members:
        yield _Run(members, _flat_from(local_of(members[0].param), stop))


def _are_neighbours(left: Tensor, right: Tensor) -> bool:
    end = left.data_ptr() + left.numel() * left.element_size()
    same_storage = left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    return left.dtype == right.dtype and end == right.data_ptr() and same_storage


def _has_moved(run: _Run) -> bool:
    """Whether the ends of the run are no longer where its weights are."""
    if not run.held:
        return False
    first, last, address = run.held[0], run.held[-1], run.weights.data_ptr()
    if local_of(first.param).data_ptr() != address:
        return True
    return local_of(last.param).data_ptr() != address + last.start * run.itemsize


def _flat_from(first: Tensor, numel: int) -> Tensor:
    """``numel`` elements from the start of ``first``, beyond its end within its storage."""
    return torch.as_strided(first, (numel,), (1,), first.storage_offset())


class FusedAdam(_FlatOptimizer):
    """``torch.optim.Adam(fused=True)`` over flat buffers; weight decay is an L2 term.

    Args:
        params: parameters, named parameters or groups.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in torch, also per group.
    """

    _kernel = staticmethod(torch._fused_adam_)

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
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        _require(group, "lr", float(group["lr"]) >= 0, "non-negative")
        _require(group, "eps", group["eps"] >= 0, "non-negative")
        _require(group, "weight_decay", group["weight_decay"] >= 0, "non-negative")
        _require(group, "betas", all(0 <= beta < 1 for beta in group["betas"]), "in [0, 1)")

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if group["amsgrad"] else ())

    def _update(self, group: dict[str, Any], count: int, stretches: Sequence[_Stretch]) -> None:
        beta1, beta2 = group["betas"]
        weights = [s.of(s.run.weights) for s in stretches]
        states = {key: [s.of(s.run.state[key]) for s in stretches] for key in self._state_keys(group)}
        step = torch.full((), float(count + 1), dtype=torch.float32, device=weights[0].device)
        kernel: Callable[..., Any] = self._kernel
        kernel(
            weights,
            [s.grads for s in stretches],
            states["exp_avg"],
            states["exp_avg_sq"],
            states.get("max_exp_avg_sq", []),
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

    def _check_group(self, group: dict[str, Any]) -> None:
        _require(group, "lr", float(group["lr"]) >= 0, "non-negative")
        _require(group, "momentum", group["momentum"] >= 0, "non-negative")
        _require(group, "weight_decay", group["weight_decay"] >= 0, "non-negative")
        plain = group["momentum"] > 0 and group["dampening"] == 0
        _require(group, "nesterov", not group["nesterov"] or plain, "with momentum and without dampening")

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def _update(self, group: dict[str, Any], count: int, stretches: Sequence[_Stretch]) -> None:
        buffers = [s.of(s.run.state["momentum_buffer"]) for s in stretches] if group["momentum"] else []
        torch._fused_sgd_(
            [s.of(s.run.weights) for s in stretches],
            [s.grads for s in stretches],
            buffers,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=count == 0,
        )


def _require(group: dict[str, Any], key: str, ok: bool, expected: str) -> None:
    if not ok:
        raise ValueError(f"{key} must be {expected}, got {group[key]}.")
