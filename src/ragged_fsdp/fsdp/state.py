"""ModuleState: the hooks of one ``fully_shard`` call.

A state belongs to the module, or to the list of modules, passed to the call. States below one root share a
:class:`RootContext`. The first state to run a forward becomes the root.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _State
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _to_kwargs

from ragged_fsdp.fsdp.autograd import (
    BackwardHooks,
    BeforeBackward,
    after_backward,
    cast_floating,
    in_backward,
    map_tensors,
    outside_compile,
)
from ragged_fsdp.fsdp.managed import STATE_ATTRIBUTE, state_of
from ragged_fsdp.fsdp.param_group import ParamGroup
from ragged_fsdp.fsdp.phases import Phase, Residence
from ragged_fsdp.fsdp.root import RootContext
from ragged_fsdp.fsdp.schedule import CommContext

__all__ = ["ModuleState"]


class ModuleState(_State):
    """State and hooks of the modules of one call; the composable contract makes it empty."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: tuple[nn.Module, ...] = ()
        self.groups: list[ParamGroup] = []
        self._backward_hooks: dict[ParamGroup, BackwardHooks] = {}
        self.device = torch.device("cpu")
        self.mp_policy = MixedPrecisionPolicy()
        self.is_root: bool | None = None
        self.auto_reshard = True
        """Whether the library chose ``reshard_after_forward``: the root then stays gathered."""
        self.gathered_budget_bytes = 0
        """Bytes of gathered parameters that may stay between forward and backward."""
        self.root = RootContext()
        self.comm = CommContext()
        self.phase = Phase.IDLE
        self.forward_prefetch: list[ModuleState] | None = None
        self.backward_prefetch: list[ModuleState] | None = None
        self.still_to_run: set[nn.Module] = set()
        """Modules of a list whose forward has not run in this pass."""

    def init(
        self,
        modules: Sequence[nn.Module],
        groups: Sequence[ParamGroup],
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        auto_reshard: bool,
    ) -> None:
        """Attach to ``modules``."""
        self.modules = tuple(modules)
        self.groups = list(groups)
        self._backward_hooks = {g: BackwardHooks(g.post_backward, self.pre_backward) for g in self.groups}
        self.device = device
        self.mp_policy = mp_policy
        self.auto_reshard = auto_reshard
        for group in self.groups:
            group.context = self.comm
        for module in self.modules:
            module.__dict__[STATE_ATTRIBUTE] = self
            pre = self.pre_forward if len(self.modules) == 1 else self._list_pre_forward
            module.register_forward_pre_hook(pre, prepend=True, with_kwargs=True)
            post = self.post_forward if len(self.modules) == 1 else self._list_post_forward
            module.register_forward_hook(post, prepend=False)

    # -- root ------------------------------------------------------------------------------------

    def lazy_init(self) -> None:
        """Become the root: all modules are sharded by now, so the states below can be found."""
        if self.is_root is not None:
            return
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {self.modules}")
        self.is_root = True
        root_module = self.modules[0]
        states: dict[ModuleState, None] = {}
        for name, module in root_module.named_modules():
            state = state_of(module)
            if state is None:
                continue
            if state is not self and state not in states and state.is_root is not None:
                self.is_root = None
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )
            states[state] = None
        if self.auto_reshard:
            for group in self.groups:
                group.reshard_after_forward = False
        try:
            self.root.adopt(self, list(states), root_module)
        except BaseException:  # parameters on the meta device, for example: the next forward tries again
            self.root.disband()
            raise

    def _begin_iteration(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Once per forward, in the module where it starts."""
        self.lazy_init()
        self.root.begin_forward(self)
        if self.root.post_optim_event is not None:
            self.comm.wait_user_event(self.root.post_optim_event)
            self.root.post_optim_event = None
        if self.device.type != "cpu" and (args or kwargs):
            moved_args, moved_kwargs = _to_kwargs(args, kwargs, self.device, False)
            return moved_args[0], moved_kwargs[0]
        return args, kwargs

    # -- forward ---------------------------------------------------------------------------------

    @outside_compile
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Gather, register the unsharded parameters, prepare the post-backward."""
        self.root.recover()
        if self.phase is Phase.PRE_BACKWARD:  # recomputation of a checkpointed forward
            for group in self.groups:
                group.unshard()
                group.wait_for_unshard()
            return self._cast_inputs(args, kwargs)
        first = self.phase is not Phase.FORWARD
        self.phase = Phase.FORWARD
        if first and self.root.forward_root is None:
            args, kwargs = self._begin_iteration(args, kwargs)
        args, kwargs = self._cast_inputs(args, kwargs)
        following = None
        for group in self.groups:
            entering = group.phase is not Phase.FORWARD
            group.phase = Phase.FORWARD
            if entering and group.residence is not Residence.UNSHARDED:
                group.gathered_in = self.root.forwards
            group.unshard(group.settings.unshard_async_op)
            group.wait_for_unshard()
            if entering:
                args, kwargs = self._hook_inputs(group, args, kwargs)
                following = self.root.order.advance(group)
        if first:
            self._prefetch_forward(following)
        return args, kwargs

    def _prefetch_forward(self, following: ParamGroup | None) -> None:
        if self.forward_prefetch is not None:
            for state in self.forward_prefetch:
                for group in state.groups:
                    if group.residence is not Residence.UNSHARDED:
                        group.gathered_in = self.root.forwards
                    group.unshard(group.settings.unshard_async_op)
        elif following is not None:
            for group in self.root.groups_with(following):
                if group.residence in (Residence.SHARDED, Residence.PARKED):
                    group.speculative = True
                    group.unshard(group.settings.unshard_async_op)

    @outside_compile
    def post_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Reshard and hook the outputs."""
        if self.phase is Phase.PRE_BACKWARD:
            return self._cast_output(output)
        self._end_groups()
        output = self._hook_outputs(output)
        self.phase = Phase.IDLE
        if self.root.forward_root is self:
            output = self._end_incomplete_lists(output)
            self.root.end_forward()
        return self._cast_output(output)

    @outside_compile
    def abort_forward(self) -> None:
        """The forward raised: be ready for the next one, which must gather anew what this one gathered.

        What was gathered before it stays: a rank that serves requests with unsharded weights may fail alone,
        and must not be alone in the next gather.
        """
        if self.phase is not Phase.FORWARD and self.root.forward_root is not self:
            return  # it had not begun, or had ended, or backward computes it again
        is_last = self.root.forward_root is self  # no module above can handle the error and go on
        for state in self.root.states if is_last else [self]:
            if state is self or state.phase is Phase.FORWARD:
                state.phase = Phase.IDLE
                state.still_to_run.clear()
            self.root.give_up(state.groups)
        if is_last:
            self.root.leave_forward()

    def _end_groups(self) -> None:
        for group in self.groups:
            if not in_backward():  # a checkpoint around this module recomputes in backward
                trains = torch.is_grad_enabled()
                chosen_here = trains and self.auto_reshard and not self.is_root
                group.keep_gathered = chosen_here and self.root.keeps(group)
                group.reshard()
                if trains:
                    group.forward_positions.append(len(self.root.backward_order))
                    self.root.backward_order.append(group)
            group.phase = Phase.IDLE

    @outside_compile
    def _list_pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not self.still_to_run:
            self.still_to_run.update(self.modules)
        return self.pre_forward(module, args, kwargs)

    @outside_compile
    def _list_post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The group is done with the last module of the list; before that only the cast applies."""
        if module in self.still_to_run:
            self.still_to_run.discard(module)
            if not self.still_to_run:
                return self.post_forward(module, args, output)
        return self._cast_output(output)

    def _end_incomplete_lists(self, output: Any) -> Any:
        """End the forward of lists of which only some modules ran (a head that is called per chunk later)."""
        for state in reversed(self.root.states):
            if state is self or not state.still_to_run:
                continue
            state._end_groups()
            output = state._hook_outputs(output)
            state.phase = Phase.IDLE
            output = state._cast_output(output)
            state.still_to_run.clear()
        return output

    def _cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        return cast_floating(dtype, args), cast_floating(dtype, kwargs) if kwargs else kwargs

    def _cast_output(self, output: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else cast_floating(dtype, output)

    # -- backward --------------------------------------------------------------------------------

    def _hook_inputs(self, group: ParamGroup, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """One node on all inputs that need gradients; its backward is the group's post-backward."""
        if not torch.is_grad_enabled():
            return args, kwargs
        return after_backward(self._backward_hooks[group], args, kwargs)

    def _hook_outputs(self, output: Any) -> Any:
        """The first gradient of an output is the start of this module's backward."""
        if not torch.is_grad_enabled():
            return output
        functorch = torch._C._are_functorch_transforms_active()

        def hook(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                if tensor._base is not None:
                    self._warn_view()
                tensor.register_hook(self.pre_backward)
            elif functorch and (torch.is_floating_point(tensor) or torch.is_complex(tensor)):
                return BeforeBackward.apply(self.pre_backward, tensor)
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
    def pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        """Gather for backward and prefetch the group whose backward comes next."""
        self.root.begin_backward()
        self.phase = Phase.PRE_BACKWARD
        entering = []
        for group in self.groups:
            if group.phase is Phase.PRE_BACKWARD:
                continue
            entering.append(group)
            group.phase = Phase.PRE_BACKWARD
            if group.residence is not Residence.UNSHARDED:
                self.root.note_gather(group)
            group.unshard(group.settings.unshard_async_op)
            group.wait_for_unshard()
        if self.backward_prefetch is not None:
            for state in self.backward_prefetch:
                _prefetch_backward(reversed(state.groups))
        elif entering:
            _prefetch_backward(self.root.before_in_forward(entering))
        return grad


def _prefetch_backward(groups: Any) -> None:
    for group in groups:
        phase, group.phase = group.phase, Phase.PRE_BACKWARD
        group.unshard(group.settings.unshard_async_op)
        group.phase = phase
