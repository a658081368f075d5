"""State of an optimizer: laid out like its parameter, counted, and noted to see that somebody exchanged it.

State of a DTensor parameter is a DTensor over the same mesh, laid out like the parameter; checkpoints then
save, load and reshard it like the parameter. (State with one value per block instead of per element is in
:mod:`ragged_fsdp.optim.blocks`.) All of it is local bookkeeping: nothing here communicates.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dtensor import is_ragged, ragged_layout, ragged_spec, wrap_local
from ragged_fsdp.dtensor.geometry import shard_box
from ragged_fsdp.torch_internals import local_of

__all__ = [
    "StateForm",
    "StateNote",
    "StepCounters",
    "TensorAddresses",
    "are_same",
    "form_like",
    "fresh_moments",
    "local_part",
    "require_state",
    "state_like",
    "state_values",
    "wrap_state",
]


def local_part(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, the tensor itself otherwise. Called without autograd."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def state_like(param: Tensor, local: Tensor) -> Tensor:
    """``local``, one value per element of the parameter's local part, laid out like the parameter."""
    return wrap_state(param, local, tuple(param.shape), getattr(param, "placements", ()))


def fresh_moments(param: Tensor) -> dict[str, Tensor]:
    """Adam's moments of a parameter before its first step, in fp32."""
    local = local_part(param)
    return {
        key: state_like(param, torch.zeros(local.shape, dtype=torch.float32, device=local.device))
        for key in ("exp_avg", "exp_avg_sq")
    }


def wrap_state(
    param: Tensor, local: Tensor, shape: tuple[int, ...], placements: Sequence[Placement]
) -> Tensor:
    """``local`` as this rank's part of a tensor over the mesh of ``param``; itself if that has no mesh."""
    if not isinstance(param, DTensor):
        return local
    spec = ragged_spec(param.device_mesh, tuple(placements), shape, local.dtype)
    if is_ragged(spec):
        local_shape = ragged_layout(spec).local_shape
    else:
        coordinate = tuple(param.device_mesh.get_coordinate() or ())
        local_shape = shard_box(shape, param.device_mesh.shape, coordinate, spec.placements)[1]
    return wrap_local(local.view(local_shape), spec)


@dataclass(frozen=True)
class StateForm:
    """What a tensor of a parameter's state must be; ``placements`` is None of plain tensors."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...] | None
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        where = "a plain tensor" if self.placements is None else f"a DTensor under {self.placements}"
        return f"{where} of shape {self.shape}" + (f" and {self.dtype}" if self.dtype else "")

    def accepts(self, value: Tensor) -> bool:
        """Whether a tensor has this form; any dtype will do if none is asked for."""
        return self == form_like(value, self.dtype and value.dtype)


def form_like(param: Tensor, dtype: torch.dtype | None = None) -> StateForm:
    """The form of state with one value per element of a parameter."""
    return StateForm(tuple(param.shape), getattr(param, "placements", None), dtype)


def require_state(
    name: str, param: Tensor, state: Mapping[str, Any], expected: Mapping[str, StateForm | None]
) -> None:
    """Raise unless the state has all that is expected, in its form (None: any) and on the right device."""
    if missing := [key for key in expected if key not in state]:
        raise RuntimeError(
            f"{name}: state {missing} is missing, found {sorted(state)}: it was saved by another "
            "optimizer or under other options."
        )
    for key, form in expected.items():
        value = state[key]
        if form is None:
            continue
        if not isinstance(value, Tensor) or not form.accepts(value):
            found = form_like(value, value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise RuntimeError(f"{name}: state {key} must be {form}, got {found}.")
        # of the local parts: the mesh of a DTensor that is kept on the host says another device
        here, found_on = local_part(param).device, local_part(value).device
        if found_on != here:
            raise RuntimeError(f"{name}: state {key} must be on {here}, got {found_on}.")


class TensorAddresses:
    """Where the memory of tensors is, to see that one has got other memory since.

    Each step asks, so all of them are asked within C: a Python call for each would take as long as kernels.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._plain = [tensor for tensor in tensors if not isinstance(tensor, DTensor)]
        self._sharded = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
        self._noted = self._current()

    def have_changed(self) -> bool:
        """Whether a tensor is no longer where it was when this object was made."""
        return self._noted != self._current()

    def _current(self) -> list[int]:
        address = Tensor.data_ptr
        return [*map(address, self._plain), *map(address, map(local_of, self._sharded))]


class StepCounters:
    """Step counts of the parameters of a group: one addition counts a step for all of them.

    A parameter's ``state["step"]`` is a scalar view of ``flat``, as optimizers of torch have it. Each step
    reads them all: who broadcasts into a view, or writes there through NumPy, leaves no trace to ask for.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        # on the host, whatever the default device is: a step must not wait for a device to read them
        self.flat = torch.zeros(len(params), dtype=torch.float32, device="cpu")
        self.views = list(self.flat)
        self.index_of = {param: index for index, param in enumerate(params)}

    def counts(self) -> list[float]:
        """Steps of each parameter: whole numbers."""
        return self.flat.tolist()

    def adopt(self, param: Tensor, state: dict[str, Any]) -> None:
        """Make ``state["step"]`` the parameter's view, keeping a value that was loaded."""
        index = self.index_of[param]
        view = self.views[index]
        if state.get("step") is not view:
            self.flat[index] = float(state.get("step", 0.0))
            state["step"] = view

    def advance(self, indices: Collection[int]) -> None:
        """Count one step for these parameters."""
        if len(indices) == self.flat.numel():
            self.flat += 1
        elif indices:
            self.flat[torch.tensor(list(indices), device="cpu")] += 1

    def by_count(self, indices: Iterable[int]) -> dict[float, list[int]]:
        """``indices`` by the number of steps that these parameters have taken."""
        counts, members = self.counts(), defaultdict(list)
        for index in indices:
            members[counts[index]].append(index)
        return members


def are_same(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def state_values(state: Mapping[Tensor, dict[str, Any]]) -> list[Any]:
    """All that an optimizer's state holds; compared with :func:`are_same`, it tells what was exchanged."""
    return list(chain.from_iterable(map(dict.values, state.values())))


class StateNote:
    """All that an optimizer's state held, and where: it tells what users exchanged, cleared or moved.

    Who writes ``value.data = value.data.to(device)`` moves a tensor that stays the same object.
    """

    def __init__(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        self._values = state_values(state)
        self._addresses = TensorAddresses([value for value in self._values if isinstance(value, Tensor)])

    def is_of(self, state: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the state still holds that, there."""
        return are_same(self._values, state_values(state)) and not self._addresses.have_changed()
