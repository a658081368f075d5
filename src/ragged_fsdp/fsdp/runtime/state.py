"""ModuleState: the hooks of one ``fully_shard`` call, which tell the schedule what happens.

A state belongs to the module, or to the list of modules, passed to the call. States below one root share a
:class:`Schedule`. The first state to run a forward becomes the root.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ragged_fsdp.fsdp.autograd import (
    BackwardHooks,
    BeforeBackward,
    after_backward,
    cast_floating,
    map_tensors,
    need_gradient,
    outside_compile,
)
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.runtime.conditional import Conditional, Conditionals
from ragged_fsdp.fsdp.runtime.group import ParamGroup
from ragged_fsdp.fsdp.runtime.schedule import Schedule
from ragged_fsdp.fsdp.runtime.turns import IN_BACKWARD, Turn
from ragged_fsdp.torch_internals import REGISTRY_KEY, are_functorch_transforms_active, base_of, to_kwargs

__all__ = ["ModuleState", "state_of", "states_below"]

_STATE_ATTRIBUTE = "_ragged_fsdp_state"
_SETTERS = "reshard, unshard, set_reshard_after_forward or set_reshard_after_backward of the module"
_END = "set_manual_backward_finalization and finalize_backward of the root"
_INSTEAD_OF = {  # what libraries reach for in FSDP2's own state
    "_fsdp_param_group": _SETTERS,
    "_fsdp_param_groups": _SETTERS,
    "_state_ctx": _END,
    "_root_post_backward_final_callback": _END,
    "_training_state": "reset_iter_state of the root",
}


def state_of(module: nn.Module) -> ModuleState | None:
    """The state of ``module`` if it was sharded, else None."""
    return module.__dict__.get(_STATE_ATTRIBUTE)


def states_below(module: nn.Module) -> list[ModuleState]:
    """The states of ``module`` and of the modules below it, each once."""
    found = (state_of(child) for child in module.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


class ModuleState(Turn):
    """The modules of one call, with its options and its mesh, and their hooks."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        device: torch.device,
        call: tuple[Any, ParallelMesh],
        *,
        gathers_first: bool,
    ) -> None:
        super().__init__()
        self.modules, self.groups = tuple(modules), list(groups)
        self.device, self.gathers_first = device, gathers_first
        self.call = call
        """Options and mesh of the call, should parameters be attached later or be cut again."""
        options = call[0]
        self._mp_policy, self.ignored = options.mp_policy, options.ignored  # torch's name: libraries read it
        self.auto_reshard = options.reshard_after_forward in (None, "auto")
        self.gathered_budget_bytes = options.gathered_budget_bytes or 0
        self.schedule = Schedule(self)
        self._backward_hooks = BackwardHooks(self.post_backward, self.pre_backward)
        single = len(modules) == 1
        for module in modules:
            module.__dict__[_STATE_ATTRIBUTE] = self
            # by which torch's composable APIs know what was applied to a module
            module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = self
            pre = self.pre_forward if single else self._list_pre_forward
            module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True)
            post = self.post_forward if single else self._list_post_forward
            module.register_forward_hook(post, prepend=False)

    if not TYPE_CHECKING:  # which would take any name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Libraries that read FSDP2's private state are told which public name does what they want."""
            instead = _INSTEAD_OF.get(name, "the methods of FSDPModule")
            raise AttributeError(
                f"{name}: the state of a module that ragged_fsdp sharded is not torch's FSDPState and has no "
                f"such attribute; use {instead}."
            )

    # -- root ------------------------------------------------------------------------------------

    def lazy_init(self) -> None:
        """Become the root: all modules are sharded by now, so the states below can be found."""
        if self.is_root is not None:
            return
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        root_module = self.modules[0]
        states: dict[ModuleState, None] = {}
        for name, module in root_module.named_modules():
            state = state_of(module)
            if state is None:
                continue
            if state is not self and state not in states and state.is_root is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )
            states[state] = None
        conditionals = self._find_conditionals(list(states))
        self.schedule.adopt(self, list(states), root_module, self.device)
        self.schedule.conditionals = conditionals
        for state in states:
            state.schedule = self.schedule

    def _find_conditionals(self, states: Sequence[ModuleState]) -> Conditionals:
        """The outermost modules below the root that not every rank runs."""
        names = {module: name for name, module in self.modules[0].named_modules()}
        found = []
        for state in states:
            state.under = None
        for state in states:
            if not state.call[0].conditional or state is self or state.under is not None:
                continue
            name = ", ".join(names[module] for module in state.modules)
            inside = {module for top in state.modules for module in top.modules()}
            below = [other for other in states if inside.issuperset(other.modules)]
            if any(other.call[1].key() != self.call[1].key() for other in below):
                raise ValueError(
                    f"{name}: fully_shard(conditional=True) needs the mesh of the root, over which ranks "
                    "vote; it, or a module below it, was sharded over another."
                )
            conditional = Conditional(name, below)
            for other in below:
                other.under = conditional
            found.append(conditional)
        return Conditionals(found, self.call[1].key(), self.device)

    def prepare_by_hand(self) -> None:
        """Before a gather that the user asks for: the root may not be known yet."""
        self.schedule.open_comm(self.device)
        for group in self.groups:
            group.lazy_init()

    def _begin_iteration(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Once per forward, in the module where it starts."""
        self.lazy_init()
        self.schedule.begin_forward(self)
        if self.device.type != "cpu" and (args or kwargs):
            moved_args, moved_kwargs = to_kwargs(args, kwargs, self.device, False)
            return moved_args[0], moved_kwargs[0]
        return args, kwargs

    # -- forward ---------------------------------------------------------------------------------

    @outside_compile
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather, register the unsharded parameters, prepare the post-backward."""
        self.schedule.recover()
        if self.phase in IN_BACKWARD:  # a checkpointed forward is computed again
            self.schedule.recompute(self)
            args, kwargs = self._cast_inputs(args, kwargs)
            return need_gradient((args, kwargs)) if self.behind_conditional else (args, kwargs)
        if self.schedule.forward_root is None:
            args, kwargs = self._begin_iteration(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        if self.schedule.start(self) and torch.is_grad_enabled() and self.groups:
            if self.behind_conditional:  # they may on another rank: backwards must come past it alike
                args, kwargs = need_gradient((args, kwargs))
            # one node on all inputs that need gradients; its backward is the post-backward
            args, kwargs = after_backward(self._backward_hooks, args, kwargs)
        return args, kwargs

    @outside_compile
    def post_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Reshard and hook the outputs."""
        if self.phase in IN_BACKWARD:
            return self._cast_output(output)
        schedule = self.schedule
        schedule.end(self)
        if schedule.forward_root is self and schedule.parts_graphs:
            output = need_gradient(output)
        output = self._hook_outputs(output)
        if self.under is not None:
            self.under.note_run(output)
        if schedule.forward_root is self:
            output = self._end_incomplete_lists(output)
            schedule.end_forward()
        return self._cast_output(output)

    @outside_compile
    def _list_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self.still_to_run:
            self.still_to_run.update(self.modules)
        return self.pre_forward(module, args, kwargs)

    @outside_compile
    def _list_post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The group is done with the last module of the list; a backward may start at any of them."""
        if module in self.still_to_run:
            self.still_to_run.discard(module)
            if not self.still_to_run:
                return self.post_forward(module, args, output)
        if self.phase not in IN_BACKWARD:
            # else a backward that starts here, from a loss beside the root's, would find no weights
            output = self._hook_outputs(output)
        return self._cast_output(output)

    def _end_incomplete_lists(self, output: Any) -> Any:
        """End the forward of lists of which only some modules ran (a head that is called per chunk later).

        Lists below the root, not below this module: it may call modules that are no children of its own.
        """
        for turn in reversed(self.schedule.turns):
            if turn.still_to_run and turn is not self:
                assert isinstance(turn, ModuleState)
                self.schedule.end(turn)
                output = turn._cast_output(turn._hook_outputs(output))
                turn.still_to_run.clear()
        return output

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self._mp_policy.param_dtype
        if dtype is None or not self._mp_policy.cast_forward_inputs:
            return args, kwargs
        return cast_floating(dtype, args), cast_floating(dtype, kwargs) if kwargs else kwargs

    def _cast_output(self, output: Any) -> Any:
        dtype = self._mp_policy.output_dtype
        return output if dtype is None else cast_floating(dtype, output)

    # -- backward --------------------------------------------------------------------------------

    def _hook_outputs(self, output: Any) -> Any:
        """The first gradient of an output is the start of this module's backward."""
        if not torch.is_grad_enabled():
            return output
        functorch = are_functorch_transforms_active()

        def hook(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                if base_of(tensor) is not None:
                    self._warn_view()
                tensor.register_hook(self.pre_backward)
            elif functorch and (torch.is_floating_point(tensor) or torch.is_complex(tensor)):
                return BeforeBackward.apply(self.pre_backward, tensor)[0]
            return tensor

        return map_tensors(hook, output)

    def _warn_view(self) -> None:
        kind = ", ".join(type(m).__name__ for m in self.modules)
        warnings.warn(
            f"FSDP2-wrapped module ({kind}) returned a view tensor. An in-place op on this view (e.g., "
            "`x += y`) will silently drop the pre-backward hook and skip the all-gather, which can cause "
            "backward to fail or produce wrong gradients. Use out-of-place ops (`out = out + y`, not "
            "`out += y`) or `.clone()` the output before any in-place op.",
            UserWarning,
            stacklevel=2,
        )

    @outside_compile
    def pre_backward(self, grad: Any) -> Any:
        """A gradient of an output is there: gather for backward and prefetch what comes next."""
        self.schedule.pre_backward(self)
        return grad

    @outside_compile
    def post_backward(self) -> None:
        """The gradients of the inputs are there: reshard and reduce."""
        self.schedule.post_backward(self)
