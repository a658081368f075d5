"""FSDPModule: the methods a sharded module offers, with FSDP2's names and meaning.

It is a subclass of torch's class of that name, because the ecosystem tests ``isinstance`` on it, and it
overrides every public method: nothing of FSDP2's runtime is used.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from ragged_fsdp.collectives import Comm, UserComm, process_group_comm
from ragged_fsdp.fsdp.autograd import leave_frame
from ragged_fsdp.fsdp.reduce.transport import ReduceScatter
from ragged_fsdp.fsdp.runtime.group import ParamGroup, Residence
from ragged_fsdp.fsdp.runtime.schedule import Schedule
from ragged_fsdp.fsdp.runtime.state import ModuleState, state_of, states_below
from ragged_fsdp.topology import subgroup
from ragged_fsdp.torch_internals import STATE_KEY

__all__ = [
    "FSDPModule",
    "GradientReductionHandle",
    "UnshardHandle",
    "register_fsdp_forward_method",
    "register_stage",
    "reshard_all",
    "share_comm_ctx",
    "swap_class",
]


class UnshardHandle(TorchUnshardHandle):
    """Waits for an asynchronous :meth:`FSDPModule.unshard`."""

    def __init__(self, groups: Iterable[ParamGroup] = ()) -> None:
        self._groups = tuple(groups)

    def wait(self) -> None:
        """Let the current stream use the unsharded parameters, which are then registered."""
        for group in self._groups:
            group.wait_for_unshard()
        self._groups = ()


class GradientReductionHandle:
    """Waits for an asynchronous :meth:`FSDPModule.finalize_backward`."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule: Schedule | None = schedule

    def wait(self) -> None:
        """Let the current stream use the reduced gradients."""
        if self._schedule is not None:
            self._schedule.finish_reductions()
            self._schedule = None


class FSDPModule(TorchFSDPModule):
    """Mixed into the class of a module by ``fully_shard``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class: slicing an ``FSDPSequential`` gives a plain one."""
        original = cls.__mro__[cls.__mro__.index(TorchFSDPModule) + 1]
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    @functools.partial(leave_frame, below=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module and give its forward up if it raises; a forward hook would not see an interrupt."""
        try:
            return super(TorchFSDPModule, self).__call__(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            state = self._get_fsdp_state()
            state.schedule.abort_forward(state)
            raise

    # -- parameters ------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Free the unsharded parameters and register the sharded ones; not recursive."""
        state = self._get_fsdp_state()
        state.schedule.reshard(state)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters; not recursive. With ``async_op`` the handle waits for it."""
        state = self._get_fsdp_state()
        state.prepare_by_hand()
        for group in state.groups:
            if group.residence is Residence.KEPT:  # by a forward: the parameters may have changed since
                group.reshard()
            group.unshard(async_op=async_op)
            group.hand_over()
        handle = UnshardHandle(state.groups)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Recover after an exception in forward or backward, on the root; the gradients are lost."""
        self._root_schedule("reset_iter_state").reset()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # ``to``, ``cuda``, ``float`` and friends act on the sharded parameters
        state = self._get_fsdp_state()
        state.schedule.reshard(state)
        result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]
        for group in state.groups:
            group.reset_sharded_params()
            group.stale = True  # prepared before its next gather: others of a list may be cast after this one
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero gradients also where the registered parameters are not the sharded ones."""
        super(TorchFSDPModule, self).zero_grad(set_to_none)  # type: ignore[misc]
        for group in self._groups(recurse=True):
            for param in group.params:
                if set_to_none:
                    param.sharded.grad = None
                elif param.sharded.grad is not None:
                    param.sharded.grad.zero_()

    def _get_fsdp_state(self) -> ModuleState:  # type: ignore[override]
        state = state_of(self)  # type: ignore[arg-type]
        if state is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return state

    # -- when to communicate ---------------------------------------------------------------------

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward waits for the reductions and forgets the forward order."""
        self._get_fsdp_state().schedule.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether :meth:`finalize_backward` ends a backward, instead of its own end; root only."""
        schedule = self._root_schedule("set_manual_backward_finalization")
        if enabled != schedule.manual_finalization and schedule.is_in_backward:
            raise RuntimeError("set_manual_backward_finalization cannot change mode during backward")
        schedule.manual_finalization = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """With manual finalization: reduce what was collected and wait, or return a handle that does."""
        schedule = self._get_fsdp_state().schedule
        if not schedule.manual_finalization:
            raise RuntimeError("finalize_backward needs set_manual_backward_finalization(True)")
        schedule.finalize()
        handle = GradientReductionHandle(schedule)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients; if not they accumulate unsharded, in the reduce dtype."""
        sync = requires_gradient_sync
        self._set(self._groups(recurse), reduce_grads=sync, all_reduce_grads=sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP: whether backward reduces over the replicas; if not the sharded sums accumulate."""
        self._set(self._groups(recurse), all_reduce_grads=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward`` at run time."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}")
        for state in self._states(recurse):
            state.auto_reshard = False
            self._set(state.groups, reshard_after_forward=reshard_after_forward)
            for group in state.groups:
                group.parking = None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the unsharded parameters; keeping them saves the next forward's gather."""
        self._set(self._groups(recurse), reshard_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether a reshard leaves the gathered storage allocated: its address then never changes."""
        self._set(self._groups(recurse), keep_storage=keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this module's parameters at all (an embedding does not)."""
        self._set(self._groups(recurse=False), unshard_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Modules to gather when this one's forward starts, instead of the recorded next one."""
        self._get_fsdp_state().forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Modules to gather when this one's backward starts, instead of the one before it in forward."""
        self._get_fsdp_state().backward_prefetch = _states_of(modules)

    def set_post_optim_event(self, event: torch.Event) -> None:
        """An event recorded after the optimizer step for the next forward's gathers to wait for."""
        if event is not None and not hasattr(event, "wait"):
            raise TypeError(f"set_post_optim_event: event must be an event or None, got {event!r}.")
        self._get_fsdp_state().schedule.post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        self._set(self._groups(recurse=True), unshard_async_op=async_op)

    # -- how to reduce ---------------------------------------------------------------------------

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's gradients by ``factor`` instead of the number of data-parallel ranks."""
        if factor is not None and not (isinstance(factor, int | float) and factor > 0):
            raise ValueError(f"set_gradient_divide_factor: factor must be above 0 or None, got {factor!r}.")
        self._set(self._groups(recurse=False), divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether this module's collectives only sum; scaling then takes a kernel on the shard."""
        self._set(self._groups(recurse=False), sum_only=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether trainable parameters without a gradient get zeros, for ranks that use different ones."""
        self._set(self._groups(recurse), reduce_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Gradient buffers alive at once: memory against overlap.

        With 1, the default, gradients stay where autograd put them until the group's backward is over and
        the reduction before it is done; then they move into the buffer together. With more, a buffer is
        filled as gradients are produced, while others are being reduced. They are shared by all groups below
        one root: the largest number that any of them was given counts.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._set(self._groups(recurse), max_grad_buffers=max_input_buffers)
        self._get_fsdp_state().schedule.follow_settings()

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether reduce-scatters get a communicator of their own and can overlap gathers on the wire."""
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for group in self._groups(recurse):
            settings, whole = group.settings, group.mesh.shard_group
            if not enable:
                settings.reduce_group = None
                continue
            ranks = tuple(dist.get_process_group_ranks(whole))
            own = settings.reduce_group or made.get(ranks)
            settings.reduce_group = own or subgroup(whole, range(whole.size()), group.device)
            made.setdefault(ranks, settings.reduce_group)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call ``hook`` with the reduced shard, after the all-reduce on HSDP, to reduce it further."""
        _check_callable("set_all_reduce_hook: hook", hook)
        groups = self._groups_of_one_mesh("set_all_reduce_hook")
        if stream is not None and any(group.mesh.replicate_group is not None for group in groups):
            raise ValueError("stream cannot be set when using native HSDP")
        self._set(groups, all_reduce_hook=hook, all_reduce_hook_stream=stream)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Call ``comm(output_tensor=, input_tensor=, group=, async_op=)`` for gathers.

        If it has an ``allocate(size, *, dtype, device)`` the output is a tensor from there, and is copied
        into the group's buffer afterwards. Without one the output is that buffer and nothing is copied.
        """
        _check_callable("set_custom_all_gather: comm", comm)
        for group in self._groups_of_one_mesh("set_custom_all_gather"):
            group.settings.gather_comm = group.planned_comm if comm is None else UserComm(comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Call ``comm(output_tensor=, input_tensor=, group=, op=, async_op=)`` for reductions.

        If it has an ``allocate(size, *, dtype, device)`` gradients are collected in a tensor from there.
        """
        _check_callable("set_custom_reduce_scatter: comm", comm)
        groups = self._groups_of_one_mesh("set_custom_reduce_scatter")
        for group in groups:
            if comm is not None and not isinstance(group.reducer.transport, ReduceScatter):
                raise ValueError(
                    f"set_custom_reduce_scatter: the gradients of {group.label} are exchanged, and no "
                    "reduce-scatter would be called; it needs reduction='reduce_scatter'."
                )
        self._set(groups, reduce_comm=Comm() if comm is None else UserComm(comm))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Whether gathered weights and gradient buffers lie in memory of the process group's allocator.

        Over NCCL that is memory from ``ncclMemAlloc``. Where the backend has no allocator nothing changes.
        """
        groups = self._groups(recurse=False)
        for group in groups:
            comms = {"all_gather": group.settings.gather_comm, "reduce_scatter": group.settings.reduce_comm}
            for kind, comm in comms.items():
                if isinstance(comm, UserComm):
                    raise AssertionError(
                        "cannot call set_allocate_memory_from_process_group_for_comm() "
                        f"when custom_{kind} is set: {type(comm.call).__name__}"
                    )
        for group in groups:
            own = process_group_comm(group.mesh.shard_group, group.device) if enable else None
            group.settings.gather_comm = own or group.planned_comm
            group.settings.reduce_comm = own or Comm()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Not supported: symmetric memory would need a rendezvous of the ranks for each gathered buffer."""
        raise NotImplementedError(
            "set_symm_mem_for_comm: ragged_fsdp does not rendezvous its buffers for symmetric memory; "
            "set_allocate_memory_from_process_group_for_comm(True) gives them memory that NCCL registers."
        )

    # -- helpers ---------------------------------------------------------------------------------

    def _root_schedule(self, method: str) -> Schedule:
        state = self._get_fsdp_state()
        if state.is_root is False:
            raise RuntimeError(f"{method} must be called on the root FSDP module")
        return state.schedule

    def _states(self, recurse: bool) -> list[ModuleState]:
        return states_below(self) if recurse else [self._get_fsdp_state()]  # type: ignore[arg-type]

    def _groups(self, recurse: bool) -> list[ParamGroup]:
        return [group for state in self._states(recurse) for group in state.groups]

    @staticmethod
    def _set(groups: Iterable[ParamGroup], **settings: Any) -> None:
        for group in groups:
            group.settings = dataclasses.replace(group.settings, **settings)

    def _groups_of_one_mesh(self, method: str) -> list[ParamGroup]:
        groups = self._get_fsdp_state().groups
        if len({group.mesh.key() for group in groups}) > 1:
            raise ValueError(
                f"{method} is not supported with multiple param groups (from per-param mesh via "
                "shard_placement_fn). It would be ambiguous across groups with different meshes."
            )
        return groups


_CLASSES: dict[type, type] = {}


def swap_class(module: nn.Module) -> None:
    """Put :class:`FSDPModule` in front of the module's class, in place."""
    cls = type(module)
    if cls not in _CLASSES:
        _CLASSES[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_deepcopy})
    module.__class__ = _CLASSES[cls]


def _no_deepcopy(self: Any, memo: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward``, such as ``generate``, gather and reshard.

    No effect on a module that is not sharded; ``ValueError`` if there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not isinstance(method_name, str) or not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._get_fsdp_state()
        try:
            args, kwargs = state.pre_forward(self, args, kwargs)
            return state.post_forward(self, args, method(*args, **kwargs))
        except BaseException:
            state.schedule.abort_forward(state)
            raise

    setattr(module, method_name, wrapped.__get__(module, type(module)))


def reshard_all(model: nn.Module) -> None:
    """Release what is gathered below ``model``, in FSDP2's modules too: an evaluation may have left it."""
    for module in model.modules():
        if isinstance(module, TorchFSDPModule):
            module.reshard()


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the chunks of a pipeline stage, use the same streams.

    Best before the first forward, after which each has streams and kept memory of its own; ``ValueError`` if
    one of them is not sharded.
    """
    states = _states_of(modules, "list of FSDPModules")
    for state in states[1:]:
        state.schedule.use_comm(states[0].schedule.open_comm(states[0].device))


def _check_callable(what: str, given: Any) -> None:
    if given is not None and not callable(given):
        raise TypeError(f"{what} must be callable or None, got {given!r}.")


def _states_of(modules: Any, expected: str = "FSDPModule") -> list[ModuleState]:
    modules = list(modules) if isinstance(modules, Iterable) else [modules]
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects {expected} but got {type(module)}: {module}")
    return [module._get_fsdp_state() for module in modules]


# -- pipelining ----------------------------------------------------------------------------------

# the function under which torch keeps the state of a module that it sharded itself
_TORCH_KEY: Any = torch.distributed.fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]


class _StageState:
    """What ``torch.distributed.pipelining`` reads of FSDP2's state to end the backward of a stage.

    A stage runs the backward of each microbatch without reductions. Up to torch 2.14 it then asks torch's
    ``fully_shard`` for the state of its module, lets every parameter group in it reduce, and calls the end of
    the backward; here there are no groups to walk, and an end that does it all. Later releases call
    ``finalize_backward``.
    """

    def __init__(self, state: ModuleState) -> None:
        self._state = state
        self._state_ctx = self
        self.all_states: tuple[Any, ...] = ()

    def _root_post_backward_final_callback(self) -> None:
        self._state.schedule.finalize()
        self._state.schedule.finish_reductions()


def register_stage(module: nn.Module, state: ModuleState) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state`` find ``module``, should it become a stage."""
    module.__dict__.setdefault(STATE_KEY, {})[_TORCH_KEY] = _StageState(state)
