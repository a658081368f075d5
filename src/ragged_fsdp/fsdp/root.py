"""What the states below one root share: the iteration and its order."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ragged_fsdp.fsdp.arena import arena_bytes
from ragged_fsdp.fsdp.autograd import in_backward, outside_compile, queue_callback
from ragged_fsdp.fsdp.gather_pool import pooled_bytes
from ragged_fsdp.fsdp.param_group import ParamGroup
from ragged_fsdp.fsdp.phases import Phase, Residence
from ragged_fsdp.fsdp.schedule import CommContext, ForwardOrder

if TYPE_CHECKING:
    from ragged_fsdp.fsdp.state import ModuleState

__all__ = ["RootContext"]

logger = logging.getLogger("ragged_fsdp")
_COMPANION_SHARE = 4  # of the gradients of a module's largest group a companion has at most one in so many
_KEPT_MODULES = 2  # backward starts with one of them gathered and the next one prefetched


class RootContext:
    """One per root; before lazy initialisation every state has an empty one of its own."""

    def __init__(self) -> None:
        self.states: list[ModuleState] = []
        self.comm = CommContext()
        self.forward_root: ModuleState | None = None
        """Where the forward that is running started; not always the root (an encoder alone, for example)."""
        self.forwards = 0
        """How many have begun: the number of the one that is running."""
        self.orders: dict[Any, ForwardOrder] = {}
        self.order = ForwardOrder()
        self._backward: Any = None
        """Weak reference to the end of the backward that is running; autograd drops it with a failed one."""
        self.is_last_backward = True
        self.manual_finalization = False
        self.backward_order: list[ParamGroup] = []
        """Groups in the order their forward ended; backward runs through it from the end."""
        self.post_optim_event: Any = None
        self.first_gathered: list[ParamGroup] = []
        self._first_known = False
        """Whether this backward went on to a group that is none of the first."""
        self._kept: set[ParamGroup] = set()
        self._owner: dict[ParamGroup, ModuleState] = {}
        self._copies_from_host = False
        """Whether gathers copy from memory of the host, which does not wait for them."""

    def adopt(self, root: ModuleState, states: Sequence[ModuleState], module: nn.Module) -> None:
        """Make ``states`` share this context and prepare their groups."""
        self.states = list(states)
        self.comm = root.comm
        self.comm.use_device(root.device)
        for state in self.states:
            if state is not root:
                state.is_root = False
                state.root = self
                state.comm = self.comm
            for group in state.groups:
                group.context = self.comm
                self._owner[group] = state
        groups = list(self._owner)
        self.comm.max_grad_buffers = max((g.settings.max_grad_buffers for g in groups), default=1)
        self._name(groups, module)
        self._check_shared(groups)
        _check_dense(groups)
        for group in groups:
            group.lazy_init()
        needs = {group: group.grad_buffer_bytes for group in groups}
        for state in self.states:
            _find_companions({group: needs[group] for group in state.groups})
        lent = [need for group, need in needs.items() if not group.reducer.companion]
        self.comm.arena.nbytes = max(self.comm.arena.nbytes, arena_bytes(lent))
        gathered = [group.gathered_bytes for group in groups]
        self.comm.gather_pool.nbytes = max(self.comm.gather_pool.nbytes, pooled_bytes(gathered))
        self._copies_from_host = any(group.pin_memory for group in groups)

    def disband(self) -> None:
        """Undo an :meth:`adopt` that raised."""
        for state in self.states:
            state.is_root = None
            if state.root is self and state is not self.states[0]:
                state.root = RootContext()
            for group in state.groups:
                group.fqn = None
        self.states = []
        self._owner.clear()

    def _name(self, groups: Sequence[ParamGroup], module: nn.Module) -> None:
        by_param = {param.sharded: param for group in groups for param in group.params}
        for name, registered in module.named_parameters():
            if registered in by_param:
                by_param[registered].fqn = name
        by_module: dict[nn.Module, list[ParamGroup]] = {}
        for group in groups:
            for owner in group.modules:
                by_module.setdefault(owner, []).append(group)
        for name, owner in module.named_modules():
            for group in by_module.get(owner, ()):
                group.fqn = name if group.fqn is None else f"{group.fqn}, {name}"

    def _check_shared(self, groups: Sequence[ParamGroup]) -> None:
        seen: set[int] = set()
        for group in groups:
            for param in group.params:
                if param.uid in seen:
                    raise ValueError(
                        f"Parameter '{param.fqn or param.name}' is shared with a parameter already managed "
                        "by another FSDP group. For shared/tied parameters, use "
                        "fully_shard([module_a, module_b]) to place them in the same FSDP group."
                    )
                seen.add(param.uid)

    # -- forward ---------------------------------------------------------------------------------

    def begin_forward(self, state: ModuleState) -> None:
        """A forward starts at ``state``."""
        self.forward_root = state
        self.forwards += 1
        self.order = self.orders.setdefault(state, ForwardOrder())
        self.order.begin()
        if not torch.is_grad_enabled():
            self.comm.arena.release()
        if in_backward():
            return  # a checkpointed forward is computed again
        if torch.is_grad_enabled() and any(group.reducer.leases for group in self._owner):
            self.comm.fill_arena()
        for group in self._owner:
            if group.keep_gathered:  # no backward followed: the parameters may have changed since
                group.drop_kept()

    def end_forward(self) -> None:
        """The forward that is running ends: the next one may follow its order."""
        self.order.end()
        self._choose_kept()
        self.leave_forward()
        if self._copies_from_host and not torch.is_grad_enabled():
            self.comm.streams["gather"].synchronize()  # no backward will wait: the user may write the weights

    def give_up(self, groups: Sequence[ParamGroup]) -> None:
        """The forward that is running raised: what it gathered must not be taken for the present later."""
        stopped = in_backward()  # a recomputation that had gone far enough
        for group in groups:
            if group.phase is Phase.FORWARD:
                group.phase = Phase.IDLE
            if group.gathered_in == self.forwards and not stopped:
                group.to_sharded()

    def leave_forward(self) -> None:
        """However the forward ended: prefetched groups it did not use are dropped."""
        self.forward_root = None
        for group in self._owner:
            if group.speculative and group.residence is Residence.GATHERING:
                group.to_sharded()
            group.speculative = False

    def _choose_kept(self) -> None:
        """Fill the byte budget from the end of the forward: those groups are needed again first."""
        left = max((state.gathered_budget_bytes for state in self.states), default=0)
        self._kept.clear()
        if not left:
            return
        for group in reversed(self.order.recorded):
            state = self._owner[group]
            if not state.gathered_budget_bytes or state.is_root or group in self._kept:
                continue
            left -= group.gathered_bytes
            if left < 0:
                return
            self._kept.add(group)

    def keeps(self, group: ParamGroup) -> bool:
        """Whether ``group`` stays gathered after forward: backward starts with it, or it fits."""
        return group in self.first_gathered or group in self._kept

    def groups_with(self, group: ParamGroup) -> list[ParamGroup]:
        """All groups of the state that owns ``group``: they are needed together."""
        return self._owner[group].groups

    # -- backward --------------------------------------------------------------------------------

    def before_in_forward(self, groups: Sequence[ParamGroup]) -> list[ParamGroup]:
        """The groups of the state whose forward ended before that of ``groups``: their backward is next."""
        order = self.backward_order
        positions = [group.forward_positions.pop() for group in groups if group.forward_positions]
        if not positions:
            return []
        mine = self._owner[groups[0]]
        for position in range(min(positions) - 1, -1, -1):
            owner = self._owner.get(order[position])
            if owner is not None and owner is not mine:
                return list(reversed(owner.groups))
        return []

    def begin_backward(self) -> None:
        """Once per backward: run :meth:`end_backward` when it is over."""
        if self._backward is not None and self._backward() is None:
            self._drop_failed_backward()
        if self._backward is None:
            self.first_gathered.clear()
            self._first_known = False
            end = functools.partial(self.end_backward)
            self._backward = weakref.ref(end)
            queue_callback(end)

    def recover(self) -> None:
        """Before a forward: if the last backward raised, forget it."""
        if self._backward is not None and not in_backward():
            self._drop_failed_backward()

    def _drop_failed_backward(self) -> None:
        logger.warning("the last backward raised; the gradients it had not reduced are dropped")
        self.reset()

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has started and not ended."""
        return self._backward is not None

    def note_gather(self, group: ParamGroup) -> None:
        """The first groups that backward had to gather: their forward need not give the data up next time."""
        if self._first_known or group in self.first_gathered:
            return
        owners = {self._owner[other] for other in (*self.first_gathered, group)}
        self._first_known = len(owners) > _KEPT_MODULES
        if not self._first_known:
            self.first_gathered.append(group)

    @outside_compile
    def end_backward(self) -> None:
        """Post-backward of the groups whose inputs needed no gradient; then wait for all reductions."""
        self.forward_root = None
        for state in self.states:
            state.still_to_run.clear()
            for group in reversed(state.groups):
                # gathered again after it: a module that runs twice, checkpointed with use_reentrant
                if group.phase is not Phase.POST_BACKWARD or group.residence is Residence.UNSHARDED:
                    group.hand_over()  # autograd lets this stream wait for those of the backward
                    group.post_backward()
                group.phase = Phase.IDLE
            state.phase = Phase.IDLE
        if self.is_last_backward and not self.manual_finalization:
            self.finish_reductions()
        self._backward = None

    def finalize(self) -> None:
        """Launch what is left to reduce: gradients that were collected while sync was off."""
        for group in reversed(self._owner):
            group.post_backward()
            group.phase = Phase.IDLE

    def finish_reductions(self) -> None:
        """Let the current stream see every reduced gradient; forget the order of the forward."""
        self.comm.finish_all()
        for group in self._owner:
            group.finish_backward()
        self.backward_order.clear()

    def reset(self) -> None:
        """Forget an iteration that failed in the middle."""
        self.comm.join()
        self.backward_order.clear()
        for state in self.states:
            state.still_to_run.clear()
            state.phase = Phase.IDLE
            for group in state.groups:
                group.reset_iteration()
        self.forward_root = None
        self._backward = None


def _find_companions(needs: dict[ParamGroup, int]) -> None:
    """Mark the small groups of a module, by the bytes that their reductions need."""
    for group, need in needs.items():
        group.reducer.companion = 0 < need * _COMPANION_SHARE <= max(needs.values())


def _check_dense(groups: Sequence[ParamGroup]) -> None:
    """Raise on embeddings that will make sparse gradients: a buffer has no place for them."""
    if not torch.is_grad_enabled():
        return
    for param in (param for group in groups for param in group.params):
        owner = param.places[0].module
        if not isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            continue
        if owner.sparse and param.sharded.requires_grad:
            raise NotImplementedError(
                f"{param.fqn or param.name}: its embedding has sparse=True, and sparse gradients cannot be "
                "reduced into shards; make it with sparse=False, or freeze it."
            )
