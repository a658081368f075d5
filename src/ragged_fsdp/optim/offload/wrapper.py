"""``offload_state``, and what it adds to the class of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from ragged_fsdp.optim.base import between_load_hooks, loss_of, unchanged_by_errors
from ragged_fsdp.optim.offload.lanes import Parts, devices_of
from ragged_fsdp.optim.offload.part import State, steps_whole
from ragged_fsdp.torch_internals import disable_dynamo

__all__ = ["OffloadedState", "offload_state"]

_OptimizerT = TypeVar("_OptimizerT", bound=Optimizer)


def offload_state(optimizer: _OptimizerT, *, part_numel: int = 1 << 23) -> _OptimizerT:
    """Keep the state of an optimizer in the host's memory; changes the optimizer, and returns it.

    Updates are the optimizer's own, bit for bit; parameters and gradients stay where they are. Call it before
    making learning-rate schedulers. State that the optimizer has moves at its next step.

    Args:
        optimizer: any of ours, or of ``torch.optim`` but ``LBFGS``. One of another origin works too, but all
            of its state is on the device during a step.
        part_numel: elements of a rank's parameters that are updated at a time. Three times their state is on
            the device during a step.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"offload_state: expected an optimizer, got {type(optimizer).__name__}.")
    name = type(optimizer).__name__
    if "state" not in vars(optimizer):
        raise TypeError(f"offload_state: {name} has no state of its own; give the optimizer that it wraps.")
    if isinstance(optimizer, OffloadedState):
        raise ValueError(f"offload_state: the state of this {name} is on the host already.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("offload_state: LBFGS keeps lists of tensors in its state, which cannot be moved.")
    if "step" in vars(optimizer):
        raise ValueError(
            f"offload_state: something has replaced the step of this {name}, as schedulers do; call "
            "offload_state right after making the optimizer."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError("offload_state: expected differentiable=False, got True: copies have no gradient.")
    if part_numel < 1:
        raise ValueError(f"part_numel: expected at least 1, got {part_numel}.")
    devices_of(optimizer, type(optimizer))
    optimizer.__class__ = _class_over(type(optimizer))  # type: ignore[assignment]
    optimizer._part_numel = part_numel  # type: ignore[attr-defined]
    return optimizer


def _class_over(kind: type[Optimizer]) -> type[Optimizer]:
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Offloaded{kind.__name__}", (OffloadedState, kind), {"_kind": kind})
    return _KINDS[kind]


_KINDS: dict[type[Optimizer], type[Optimizer]] = {}


def _new(kind: type[Optimizer]) -> Optimizer:
    """An optimizer that a copy or a pickle is about to give its state."""
    made = _class_over(kind)
    return made.__new__(made)


def _hooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that runs the optimizer's hooks, as torch makes it of the step of each class."""
    wrapped: Any = Optimizer.profile_hook_step(step)
    wrapped.hooked = True
    return wrapped  # type: ignore[no-any-return]


class OffloadedState(Optimizer):
    """What :func:`offload_state` adds to the class of an optimizer."""

    _kind: type[Optimizer]
    _part_numel: int = 1 << 23
    _offload: Parts | None = None

    @property
    def state(self) -> State:  # type: ignore[override]
        """State by parameter, on the host; waits until the last step's has arrived there."""
        if self._offload is not None:
            self._offload.wait()
        return self.__dict__["state"]  # type: ignore[no-any-return]

    @state.setter
    def state(self, state: State) -> None:
        self.__dict__["state"] = state

    @_hooked
    @disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters, a part at a time; the loss of the closure, which runs once."""
        loss = loss_of(closure)
        self._offloaded().step()
        return loss

    @disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, of this optimizer with or without offload; a part at a time is on the device."""
        with unchanged_by_errors(self, _offload=self._offload):
            if steps_whole(self._kind):
                super().load_state_dict(state_dict)
                self._offload_anew()
            else:
                self._load_parts(state_dict)

    def _load_parts(self, state_dict: dict[str, Any]) -> None:
        """Let torch load the groups, between the hooks of the user, which see the state too."""
        adapted: list[dict[str, Any]] = []

        def hide(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            adapted.append(loaded)
            return {**loaded, "state": {}}

        def load(_: Optimizer) -> None:
            fresh = self._new_parts()
            for part in fresh.parts:
                part.load(adapted[0])
            fresh.publish()
            self._offload = fresh

        with between_load_hooks(self, hide, load):
            Optimizer.load_state_dict(self, state_dict)  # parts load as their kind does

    def __getstate__(self) -> dict[str, Any]:  # type: ignore[override]
        return {**super().__getstate__(), "_part_numel": self._part_numel}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy or a pickle, which finds the optimizer's own class: this one is made as it is needed."""
        return _new, (self._kind,), self.__getstate__()

    def _offloaded(self) -> Parts:
        """The parts; made anew if parameters or state were exchanged since the last step."""
        stale = self._offload is None or self._offload.is_stale()
        return self._offload_anew() if stale else self._offload  # type: ignore[return-value]

    def _offload_anew(self) -> Parts:
        """New parts, with what state there is."""
        offload = self._new_parts()
        offload.take()
        offload.publish()
        self._offload = offload
        return offload

    def _new_parts(self) -> Parts:
        return Parts(self, self._kind, self._part_numel)
