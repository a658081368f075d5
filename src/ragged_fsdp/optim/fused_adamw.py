"""AdamW, Adam and SGD over flat buffers: one fused call per buffer instead of one entry per parameter.

Parameters that are neighbours in memory, as those of a ``fully_shard`` group are, share flat state and are
updated as one tensor (see ``fused_runs``). The kernels are torch's fused ones, so the numbers are those of
``torch.optim.AdamW(fused=True)``; ``state`` of a parameter is a view of the flat state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ragged_fsdp.optim.exact_state import ExactStateOptimizer
from ragged_fsdp.optim.fused_runs import GroupRuns, Update
from ragged_fsdp.optim.options import ADAM_RANGES, as_tuple, check_options, require_option
from ragged_fsdp.optim.state import StateForm, form_like, local_of, require_optimisable, state_like

__all__ = ["FusedAdam", "FusedAdamW", "FusedSGD"]


class _FlatOptimizer(ExactStateOptimizer):
    """What the fused optimizers share: runs, their state, and the spans of a step."""

    _expected: ClassVar[dict[str, str]]
    """Options and their ranges; see ``options.check_options``."""

    _saves_step: ClassVar[bool] = True
    """Whether torch's optimizer of this kind saves step counts."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._members: list[GroupRuns] | None = None
        super().__init__(params, defaults)

    def _forget_plans(self) -> None:
        self._members = None  # loaded state is moved into flat tensors at the next step

    def _plan_group(self, index: int) -> None:
        check_options(self.param_groups[index], self._expected)
        for name, param in self.named_group_params(index):
            require_optimisable(name, param)
        self._members = None

    def _state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        raise NotImplementedError

    def _apply(self, group: dict[str, Any], update: Update, tensors: list[list[Tensor]]) -> None:
        """Update spans of one dtype and device; ``tensors`` are their weights, then their state."""
        raise NotImplementedError

    def _expected_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, StateForm | None]:
        steps: dict[str, StateForm | None] = {"step": None} if self._saves_step else {}
        return {**steps, **dict.fromkeys(self._state_keys(group), form_like(param))}

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; no communication."""
        loss = self._loss_of(closure)
        self._follow_changes()
        every = self._current_members()
        every_grad = [members.checked_grads() for members in every]  # raises first, if at all
        for group, members, grads in zip(self.param_groups, every, every_grad):
            updates = members.updates(grads)
            counts = members.counters.counts()
            if fresh := [index for index in grads if counts[index] == 0]:
                self._start(group, members, fresh)
            keys = self._state_keys(group)
            for update in updates:
                self._apply(group, update, members.tensors(update.spans, keys))
            members.counters.advance(grads)
        self._note_state()
        return loss

    def _current_members(self) -> list[GroupRuns]:
        """The runs of each group; found again after parameters moved, were added or state was loaded."""
        known = self._members
        if known is not None and not any(run.has_moved() for members in known for run in members.runs):
            return known
        found = [GroupRuns(list(self.named_group_params(i))) for i in range(len(self.param_groups))]
        for group, members in zip(self.param_groups, found):
            loaded = [i for i, param in enumerate(group["params"]) if self.state.get(param)]
            self._start(group, members, loaded)
        self._members = found
        return found

    def _start(self, group: dict[str, Any], members: GroupRuns, positions: Sequence[int]) -> None:
        """Give parameters their views of the runs' state, keeping values they already have.

        In the order of the parameters, not of addresses: ranks must create state in the same order.
        """
        self._noted = None
        for position in positions:
            run, member = members.places[position]
            state = self.state[member.param]
            members.counters.adopt(member.param, state, missing=1.0 if state else 0.0)
            for key in self._state_keys(group):
                if key not in run.state:
                    run.state[key] = torch.zeros_like(run.weights)
                view = run.state[key].view(-1)[member.start : member.start + member.numel]
                if key in state:
                    view.copy_(local_of(state[key]).reshape(-1))
                state[key] = state_like(member.param, view.view(local_of(member.param).shape))


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

    def _apply(self, group: dict[str, Any], update: Update, tensors: list[list[Tensor]]) -> None:
        beta1, beta2 = group["betas"]
        weights, means, squares, *largest = tensors
        step = torch.full((), float(update.count + 1), dtype=torch.float32, device=weights[0].device)
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

    def _apply(self, group: dict[str, Any], update: Update, tensors: list[list[Tensor]]) -> None:
        weights, *buffers = tensors
        torch._fused_sgd_(
            weights,
            update.grads,
            buffers[0] if buffers else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=float(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=update.count == 0,
        )
