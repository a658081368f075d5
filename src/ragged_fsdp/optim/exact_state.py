"""The base of optimizers that prepare their steps: planned groups, exact state, changes that are noticed.

A step that looked everything up anew would cost more host time than the kernels take. So parameters are
planned when they are added, and state is noted where it lies; whoever exchanges either between steps (by
loading, moving or clearing it, or by sharding the model afterwards) is noticed, and it is planned anew.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ragged_fsdp.optim.state import StateForm, local_of, require_state

__all__ = ["ExactStateOptimizer"]


@dataclass(frozen=True)
class _Untouched:
    """Hides a tensor from ``Optimizer.load_state_dict``, which would cast it to the parameter's dtype."""

    tensor: Tensor


class ExactStateOptimizer(torch.optim.Optimizer):
    """An optimizer that plans each group as it is added, and whose state keeps its dtypes when loaded."""

    _planned: list[list[Tensor]]
    """The parameters of each group when it was planned."""

    _noted: list[Any] | None = None
    """All state when a step last noted where it lies; None if it is read anew anyway."""

    def _plan_group(self, index: int) -> None:
        """Check the options and parameters of a group and prepare for them; may raise, changing nothing."""
        raise NotImplementedError

    def _forget_plans(self) -> None:
        """Drop what was prepared: groups or state have been replaced."""
        raise NotImplementedError

    def _expected_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, StateForm | None]:
        """What the state of a parameter must hold, if there is any."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; nothing is changed if one of its options or parameters is refused."""
        super().add_param_group(param_group)
        try:
            self._plan_group(len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise
        self._planned = [list(group["params"]) for group in self.param_groups]

    def named_group_params(self, group_index: int) -> Iterator[tuple[str, Tensor]]:
        """The parameters of a group with the names given to the constructor, or their position."""
        group = self.param_groups[group_index]
        names = group.get("param_names")
        for index, param in enumerate(group["params"]):
            yield (names[index] if names else f"param_groups[{group_index}]['params'][{index}]"), param

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # written by an optimizer without some of our options
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        self._plan_all()  # options may have come with the state

    def _plan_all(self) -> None:
        self._forget_plans()
        self._noted = None
        for index in range(len(self.param_groups)):
            self._plan_group(index)
        self._planned = [list(group["params"]) for group in self.param_groups]

    def _follow_changes(self) -> None:
        """Plan anew if parameters or state were exchanged; called before a step changes anything.

        Accelerate shards after making the optimizer; users clear state, or move it away and back.
        """
        planned, current = self._planned, [group["params"] for group in self.param_groups]
        if [*map(len, planned)] != [*map(len, current)] or not all(map(_are_same, planned, current)):
            self._plan_all()
        elif self._noted is not None and not _are_same(self._noted, self._state_values()):
            self._require_states()
            self._plan_all()

    def _note_state(self) -> None:
        """At the end of a step: remember where the state lies, if that is not known."""
        if self._noted is None:
            self._noted = self._state_values()

    def _state_values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self.state.values())))

    def _require_states(self) -> None:
        for index, group in enumerate(self.param_groups):
            for name, param in self.named_group_params(index):
                if state := self.state.get(param):
                    require_state(name, param, state, self._expected_state(param, group))

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, except that state tensors keep their dtype; they move to the parameter's device.

        State or options that do not fit raise, naming the parameter, and nothing is changed.
        """
        hidden = {
            param_id: {
                key: _Untouched(value) if isinstance(value, Tensor) and key != "step" else value
                for key, value in entries.items()
            }
            for param_id, entries in state_dict["state"].items()
        }
        before = self.state, self.param_groups
        try:
            super().load_state_dict({**state_dict, "state": hidden})
            for param, entries in self.state.items():
                for key, value in entries.items():
                    if isinstance(value, _Untouched):
                        entries[key] = value.tensor.to(device=local_of(param).device)
            self._require_states()
        except Exception:
            self.state, self.param_groups = before
            self._plan_all()
            raise

    def _loss_of(self, closure: Callable[[], Any] | None) -> Any:
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


def _are_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))
