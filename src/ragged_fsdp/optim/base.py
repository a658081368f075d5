"""What the optimizers of this package do alike: check options, lay state out like parameters, prepare steps.

State of a DTensor parameter is a DTensor over the same mesh, laid out like the parameter; checkpoints then
save, load and reshard it like the parameter. (State with one value per block instead of per element is in
:mod:`ragged_fsdp.optim.blocks`.) All of it is local bookkeeping: nothing here communicates.

A step that looked everything up anew would cost more host time than the kernels take. So
:class:`ExactStateOptimizer` plans parameters when they are added and notes where their state lies; whoever
exchanges either between steps (by loading, moving or clearing it, or by sharding the model afterwards) is
noticed, and it is planned anew.
"""

from __future__ import annotations

import fnmatch
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.dtensor import is_ragged, ragged_layout, ragged_spec, wrap_local
from ragged_fsdp.dtensor.geometry import shard_box
from ragged_fsdp.torch_internals import disable_dynamo, local_of, spec_of

__all__ = [
    "ADAM_RANGES",
    "CheckedStateOptimizer",
    "ExactStateOptimizer",
    "Gradients",
    "StateForm",
    "StateNote",
    "StepCounters",
    "TensorAddresses",
    "are_params_of",
    "are_same",
    "as_tuple",
    "between_load_hooks",
    "check_options",
    "form_like",
    "fresh_moments",
    "group_names",
    "is_excluded",
    "local_part",
    "loss_of",
    "name_patterns",
    "number",
    "require_distinct",
    "require_matching_grad",
    "require_optimisable",
    "require_option",
    "require_state",
    "state_like",
    "state_values",
    "unchanged_by_errors",
    "wrap_state",
]

_CHECKS: dict[str, Callable[[float], bool]] = {
    "positive": lambda value: value > 0,
    "non-negative": lambda value: value >= 0,
    "at least 1": lambda value: value >= 1,
    "a number": lambda value: not math.isnan(value),
    "an integer": lambda value: value == math.floor(value) if math.isfinite(value) else False,
}

ADAM_RANGES = {"lr": "non-negative", "eps": "positive", "weight_decay": "non-negative"}
"""What optimizers built on Adam expect of the options they share with it."""


def check_options(group: dict[str, Any], expected: dict[str, str]) -> None:
    """Raise, naming the option, unless each has the range that ``expected`` names; betas are in [0, 1)."""
    for key, what in expected.items():
        require_option(group, key, _CHECKS[what](number(group[key])), what)
    if "betas" in group:
        betas = as_tuple(group["betas"])
        ok = isinstance(betas, tuple) and len(betas) == 2 and all(0 <= number(beta) < 1 for beta in betas)
        require_option(group, "betas", ok, "two, in [0, 1)")


def as_tuple(value: Any) -> Any:
    """Several values as a tuple; what is not several stays as it is, for the check that names it."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def number(value: Any) -> float:
    """``value`` as a float; what is no number becomes NaN, which is in no range.

    Nor is a text that reads like one (YAML takes ``1e-3`` for text): it would fail in the first step.
    """
    try:
        return math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        return math.nan


def require_option(group: dict[str, Any], key: str, ok: bool, expected: str) -> None:
    """Raise if an option of a group is not as it must be."""
    if not ok:
        raise ValueError(f"{key} must be {expected}, got {group[key]!r}.")


def name_patterns(patterns: str | Sequence[str]) -> tuple[str, ...]:
    """Shell patterns of names, of which one may be given alone."""
    found = (patterns,) if isinstance(patterns, str) else as_tuple(patterns)
    if not isinstance(found, tuple) or not all(isinstance(pattern, str) for pattern in found):
        raise ValueError(f"exclude must be patterns of names, got {patterns!r}.")
    return found


def is_excluded(name: str, group: dict[str, Any]) -> bool:
    """Whether the group's ``exclude`` patterns match a parameter; they need names."""
    patterns = name_patterns(group["exclude"])  # a group may have one alone, whose letters are no patterns
    if patterns and "param_names" not in group:
        raise ValueError(
            f"exclude={patterns!r} matches names, but parameters came without; pass model.named_parameters()."
        )
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


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


def require_optimisable(name: str, param: Tensor) -> None:
    """Raise unless the parameter holds floats of which each rank may update its part alone."""
    if not param.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point parameter, got {param.dtype}.")
    for placement in getattr(param, "placements", ()):
        if placement.is_partial():
            raise ValueError(f"{name}: a parameter cannot be {placement}; redistribute it first.")


def require_distinct(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a parameter comes twice: it would be updated twice, with one state for both."""
    seen: dict[int, str] = {}
    for name, param in named:
        if (first := seen.get(id(param))) is not None:
            raise ValueError(f"{name}: the same parameter as {first}; an optimizer takes each of them once.")
        seen[id(param)] = name


def require_matching_grad(name: str, param: Tensor) -> None:
    """Raise unless the gradient lies where the parameter does: then it can be used part by part."""
    grad = param.grad
    if grad is None or grad.layout is not torch.strided:
        raise RuntimeError(
            f"{name}: expected a dense gradient, got {'none' if grad is None else 'a sparse one'}."
        )
    if not isinstance(param, DTensor) and not isinstance(grad, DTensor):
        return
    ours, theirs = getattr(param, "placements", None), getattr(grad, "placements", None)
    if ours != theirs:
        raise RuntimeError(f"{name}: the gradient's placements {theirs} differ from the parameter's {ours}.")


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


def are_same(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def are_params_of(params: Sequence[list[Tensor]], groups: Sequence[dict[str, Any]]) -> bool:
    """Whether these are the parameters of the groups, group by group and in their order."""
    return len(params) == len(groups) and all(
        are_same(noted, group["params"]) for noted, group in zip(params, groups)
    )


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
