"""Optimizers whose state is checked when it is loaded, and whose steps are prepared once.

A step that looked everything up anew would cost more host time than the kernels take. So
:class:`ExactStateOptimizer` plans parameters when they are added and notes where their state lies; whoever
exchanges either between steps (by loading, moving or clearing it, or by sharding the model afterwards) is
noticed, and it is planned anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ragged_fsdp.optim.checks import require_distinct, require_matching_grad
from ragged_fsdp.optim.state import StateForm, StateNote, are_same, local_part, require_state
from ragged_fsdp.torch_internals import disable_dynamo, local_of, spec_of

__all__ = [
    "CheckedStateOptimizer",
    "ExactStateOptimizer",
    "Gradients",
    "are_params_of",
    "between_load_hooks",
    "group_names",
    "loss_of",
    "unchanged_by_errors",
]


class Gradients:
    """Reads the local gradients of a group's parameters: each step the same checks, as cheap as can be."""

    def __init__(self, named: Iterable[tuple[str, Tensor]], same_dtype: bool = False) -> None:
        self._same_dtype = same_dtype
        self._expected = [
            (name, param, spec_of(param) if isinstance(param, DTensor) else None) for name, param in named
        ]

    def read(self) -> dict[int, Tensor]:
        """Contiguous local gradients of the parameters that have one, by their index in the group."""
        grads = {}
        for index, (name, param, spec) in enumerate(self._expected):
            grad = param.grad
            if grad is None:
                continue
            plain = type(grad) is Tensor and spec is None and grad.layout is torch.strided
            sharded = isinstance(grad, DTensor)
            if not plain and not (sharded and spec_of(grad) is spec):
                require_matching_grad(name, param)
            if self._same_dtype and grad.dtype is not param.dtype:
                raise TypeError(f"{name}: expected a gradient of {param.dtype}, got {grad.dtype}.")
            local = local_of(grad) if sharded else grad
            grads[index] = local if local.is_contiguous() else local.contiguous()
        return grads


@dataclass(frozen=True)
class _Untouched:
    """Hides a tensor from ``Optimizer.load_state_dict``, which would cast it to the parameter's dtype."""

    tensor: Tensor


def group_names(optimizer: torch.optim.Optimizer, index: int) -> list[str]:
    """The names of a group's parameters that were given to the constructor, or their positions."""
    group = optimizer.param_groups[index]
    positions = range(len(group["params"]))
    return group.get("param_names") or [f"param_groups[{index}]['params'][{i}]" for i in positions]


class CheckedStateOptimizer(torch.optim.Optimizer):
    """An optimizer that refuses state which does not fit its parameters, by name, and is then unchanged."""

    def _expected_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, StateForm | None]:
        """What the state of a parameter must hold, if there is any."""
        raise NotImplementedError

    def named_group_params(self, group_index: int) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a group with the names given to the constructor, or their position."""
        yield from zip(group_names(self, group_index), self.param_groups[group_index]["params"])

    def _require_states(self) -> None:
        for index, group in enumerate(self.param_groups):
            for name, param in self.named_group_params(index):
                if state := self.state.get(param):
                    require_state(name, param, state, self._expected_state(param, group))

    def __setstate__(self, state: dict[str, Any]) -> None:
        known: Sequence[dict[str, Any]] = getattr(self, "param_groups", ())  # none in a copy that is made
        super().__setstate__(state)
        for index, group in enumerate(self.param_groups):
            for key, value in {**self.defaults, **(known[index] if known else {})}.items():
                group.setdefault(key, value)  # written by an optimizer without some of our options


class ExactStateOptimizer(CheckedStateOptimizer):
    """An optimizer that plans each group as it is added, and whose state keeps its dtypes when loaded."""

    _planned: Sequence[tuple[list[Tensor], Gradients]] = ()
    """The parameters of each group when it was planned, and what reads their gradients."""

    _same_dtype: ClassVar[bool] = False
    """Whether gradients must have the dtype of their parameter."""

    _places: Mapping[Tensor, int] = MappingProxyType({})
    """Where parameters stand in the optimizer that this one is a part of, if it is (see ``offload``)."""

    _noted: StateNote | None = None
    """The state at the end of the last step; None if a step has begun some since, and before the first."""

    def _plan_group(self, index: int) -> None:
        """Check the options and parameters of a group and prepare for them; may raise, changing nothing."""
        raise NotImplementedError

    def _forget_plans(self) -> None:
        """Drop what was prepared: groups or state have been replaced."""
        raise NotImplementedError

    def _update_all(self, every_grad: Sequence[dict[int, Tensor]]) -> None:
        """Update every parameter that has a gradient: for each group those, by their index in it."""
        raise NotImplementedError

    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; no communication."""
        loss = loss_of(closure)
        self._follow_changes()
        every_grad = [gradients.read() for _, gradients in self._planned]  # raises before anything changes
        self._update_all(every_grad)
        if self._noted is None:
            self._noted = StateNote(self.state)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; nothing is changed if one of its options or parameters is refused."""
        super().add_param_group(param_group)
        try:
            self._require_distinct()
            self._plan_group(len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            raise
        self._planned = (*self._planned, self._planned_group(len(self.param_groups) - 1))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plan_all()  # options may have come with the state

    def _plan_all(self) -> None:
        self._require_distinct()
        self._forget_plans()
        self._noted = None
        for index in range(len(self.param_groups)):
            self._plan_group(index)
        self._planned = [self._planned_group(index) for index in range(len(self.param_groups))]

    def _require_distinct(self) -> None:
        groups = range(len(self.param_groups))
        require_distinct(chain.from_iterable(map(self.named_group_params, groups)))

    def _planned_group(self, index: int) -> tuple[list[Tensor], Gradients]:
        gradients = Gradients(self.named_group_params(index), self._same_dtype)
        return list(self.param_groups[index]["params"]), gradients

    def _follow_changes(self) -> None:
        """Plan anew if parameters or state were exchanged; called before a step changes anything.

        Accelerate shards after making the optimizer; users clear state, or move it away and back.
        """
        if not are_params_of([params for params, _ in self._planned], self.param_groups):
            self._plan_all()
        elif self._noted is not None and not self._noted.is_of(self.state):
            self._require_states()
            self._plan_all()

    @disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the dtypes of state tensors; they move to the parameter's device.

        State or options that do not fit raise, naming the parameter, and nothing is changed.
        """
        with unchanged_by_errors(self), between_load_hooks(self, _hide_tensors, _show_tensors):
            super().load_state_dict(state_dict)


def _hide_tensors(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    hidden = {
        param_id: {
            key: _Untouched(value) if isinstance(value, Tensor) and key != "step" else value
            for key, value in entries.items()
        }
        for param_id, entries in loaded["state"].items()
    }
    return {**loaded, "state": hidden}


def _show_tensors(optimizer: ExactStateOptimizer) -> None:
    for param, entries in optimizer.state.items():
        for key, value in entries.items():
            if isinstance(value, _Untouched):
                entries[key] = value.tensor.to(device=local_part(param).device)
    optimizer._require_states()


@contextmanager
def unchanged_by_errors(optimizer: torch.optim.Optimizer, **attributes: Any) -> Iterator[None]:
    """Gives an optimizer its state, groups and these attributes back if what runs inside raises."""
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups, **attributes}
    try:
        yield
    except BaseException:  # of a load that Ctrl-C stopped half of the state would stay
        optimizer.param_groups = before["param_groups"]
        optimizer.__setstate__(before)  # which plans anew
        raise


@contextmanager
def between_load_hooks(
    optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any]
) -> Iterator[None]:
    """Call ``before`` behind all hooks on what is to be loaded, ``after`` ahead of all on what was loaded.

    So the hooks of users see state as it was saved and as it will be used, whatever lies between.
    """
    handles = [
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What the closure of a step returns, if there is one; a step runs without gradients, it does not."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def are_params_of(params: Sequence[list[Tensor]], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether these are the parameters of the groups, group by group and in their order."""
    return len(params) == len(groups) and all(
        are_same(noted, group["params"]) for noted, group in zip(params, groups)
    )
