"""The autograd side of the hooks: finding tensors in nested values, nodes that call back in backward."""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ragged_fsdp.torch_internals import (
    CreationMeta,
    DisableFuncTorch,
    FrameAction,
    FrameExecStrategy,
    are_functorch_transforms_active,
    current_graph_task_id,
    disable_compile,
    set_code_exec_strategy,
    set_creation_meta,
    set_grad_enabled,
)

__all__ = [
    "BackwardHooks",
    "BeforeBackward",
    "after_backward",
    "cast_floating",
    "in_backward",
    "leave_frame",
    "map_tensors",
    "need_gradient",
    "on_parameters",
    "outside_compile",
    "tensors_in",
]


_LEAVES = frozenset((type(None), bool, int, float, str))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """``value`` with every tensor in it replaced: lists, tuples, dicts, sets, named tuples, dataclasses.

    What has no tensor that changed is the same object afterwards.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind in _LEAVES:
        return value
    if hasattr(kind, "__dataclass_fields__"):
        return _map_dataclass(function, value)
    if isinstance(value, dict):
        changed = {k: map_tensors(function, v) for k, v in value.items()} if value else value
        if _same(value.values(), changed.values()):
            return value
        made = {} if kind is dict else copy.copy(value)  # a model output that is a dict keeps its class
        for key, item in changed.items():
            made[key] = item
        return made
    if isinstance(value, (list, tuple, set)):
        items = [map_tensors(function, v) for v in value]
        if _same(value, items):
            return value
        return kind(*items) if isinstance(value, tuple) and hasattr(kind, "_fields") else kind(items)
    return value


def _same(old: Any, new: Any) -> bool:
    return all(map(operator.is_, old, new))


def _map_dataclass(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        if not hasattr(value, field.name):
            continue
        old = getattr(value, field.name)
        new = map_tensors(function, old)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return value
    if not isinstance(value, dict) and all(f.init for f in dataclasses.fields(value)):
        return dataclasses.replace(value, **changed)
    made = copy.copy(value)
    for name, new in changed.items():
        if isinstance(made, dict):  # the model outputs of transformers: items and attributes agree
            made[name] = new
        else:
            object.__setattr__(made, name, new)
    return made


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, as often as it is there."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, value)
    return found


def cast_floating(dtype: torch.dtype, value: Any) -> Any:
    """``value`` with its floating-point tensors cast to ``dtype``."""
    only = value[0] if type(value) is tuple and len(value) == 1 else None
    if type(only) is torch.Tensor and only.dtype == dtype:  # the inputs of most layers
        return value

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if torch.is_floating_point(tensor) and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread."""
    return current_graph_task_id() != -1


def leave_frame(function: Callable, *, below: bool) -> Callable:
    """Let the compiler run ``function`` as it is, and with ``below`` all that it calls.

    Compiled modules call their hooks outside the graph, but each Python frame there would be taken for one
    more function to compile. Set in the code object: the compiler is not even imported.
    """
    strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP if below else FrameAction.DEFAULT)
    set_code_exec_strategy(function.__code__, strategy)
    return function


def outside_compile(function: Callable) -> Callable:
    """Keep the compiler out of ``function``: hooks resize storages and launch collectives."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # traced as a part of what calls the module
            return disable_compile(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return leave_frame(call, below=True)


def on_parameters(function: Callable) -> Callable:
    """Run ``function`` on tensors that outlive the forward and are no inputs of it.

    That is without autograd, outside inference mode and outside functorch transforms.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if are_functorch_transforms_active():
            with DisableFuncTorch(), torch.inference_mode(False), torch.no_grad():
                return function(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return function(*args, **kwargs)
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            set_grad_enabled(True)

    return call


class BackwardHooks(NamedTuple):
    """What a module does around its backward."""

    after: Callable[[], None]
    """When the gradients of its inputs are there."""
    before: Callable[[Any], Any]
    """When a gradient arrives: at its outputs, or, in a second backward, at the gradients of its inputs."""

    def at_inputs(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        """The gradients of the module's inputs are there; None leaves them as they are."""
        self.after()
        if not torch.is_grad_enabled():
            return None
        # create_graph: a second backward starts here and needs the weights
        return tuple(g if g is None else BeforeBackward.apply(self.before, g)[0] for g in grads)


class AfterBackward(torch.autograd.Function):
    """Identity whose backward calls back with the gradients, and takes those that it returns, if any.

    On the inputs of a module it runs when the module's own backward is done. In the form that functorch
    transforms need.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(callback: Callable[[Any], Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.callback = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, *(ctx.callback(grads) or grads))

    @staticmethod
    def jvp(ctx: Any, callback_tangent: Any, *tangents: Any) -> tuple[Any, ...]:
        return tangents


class BeforeBackward(AfterBackward):
    """The node of :class:`AfterBackward` on outputs, where a module's backward begins: that of tangents too.

    It stands where a tensor hook would not do: on outputs under functorch, whose outer graph hooks do not
    reach, and on gradients that will be differentiated again.
    """

    @staticmethod
    def jvp(ctx: Any, callback_tangent: Any, *tangents: Any) -> tuple[Any, ...]:
        return tuple(t if t is None else BeforeBackward.apply(ctx.callback, t)[0] for t in tangents)


def after_backward(hooks: BackwardHooks, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A module's inputs; those that need gradients behind a node whose backward calls ``hooks.after``."""
    if not kwargs and len(args) == 1 and type(args[0]) is torch.Tensor:  # most layers
        return (_behind_node(hooks, args) if args[0].requires_grad else args), kwargs
    found = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not found:
        return args, kwargs
    replaced = dict(zip(map(id, found), _behind_node(hooks, found)))
    return map_tensors(lambda t: replaced.get(id(t), t), (args, kwargs))


def _behind_node(hooks: BackwardHooks, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    if len(inputs) > 1 or type(inputs[0]) is not torch.Tensor or are_functorch_transforms_active():
        return AfterBackward.apply(hooks.at_inputs, *inputs)
    # a single tensor needs no node of ours: torch's own with a hook takes a third of the time
    alias = inputs[0].view_as(inputs[0])
    # as an output of a Function: torch forbids the change in place that would lose the hook
    set_creation_meta(alias, CreationMeta.IN_CUSTOM_FUNCTION)
    # of the node, not of the tensor: a module may return its input, and what its outputs do comes first
    alias.grad_fn.register_prehook(hooks.at_inputs)  # type: ignore[union-attr]
    return (alias,)


class _Ends(torch.autograd.Function):
    """Identity whose output needs a gradient, though its input does not: the gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, needs_gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


def need_gradient(value: Any) -> Any:
    """``value``, of which the first floating-point tensor needs a gradient now, unless one of them does."""
    found = [tensor for tensor in tensors_in(value) if torch.is_floating_point(tensor)]
    if not found or any(tensor.requires_grad for tensor in found) or are_functorch_transforms_active():
        return value
    made = _Ends.apply(torch.empty(0, requires_grad=True), found[0])
    return map_tensors(lambda tensor: made if tensor is found[0] else tensor, value)
