"""Schedule: what the modules below one root do when, from the first gather of a forward to the last
reduction.

One object per root owns the order of forwards, what is prefetched and kept, the phases of every module, and,
through its :class:`CommContext`, streams and pending reductions. Hooks tell it what happens; it tells
groups what to do. A group knows only where its parameters are
(:class:`~ragged_fsdp.fsdp.runtime.group.Residence`).

What it knows of one ``fully_shard`` call is a :class:`~ragged_fsdp.fsdp.runtime.turns.Turn`, in whose module
is the table of phases too.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ragged_fsdp.fsdp.autograd import in_backward, on_parameters, outside_compile
from ragged_fsdp.fsdp.parts.left_out import check_managed
from ragged_fsdp.fsdp.runtime.conditional import Conditionals
from ragged_fsdp.fsdp.runtime.group import ParamGroup, Residence
from ragged_fsdp.fsdp.runtime.roots import check_dense, check_shared, find_companions, name_groups, outside
from ragged_fsdp.fsdp.runtime.turns import ALLOWED_PHASES, Phase, Turn
from ragged_fsdp.fsdp.streams import CommContext, arena_bytes, pooled_bytes
from ragged_fsdp.torch_internals import current_graph_task_id, queue_callback

__all__ = ["Schedule"]

logger = logging.getLogger("ragged_fsdp")
_KEPT_MODULES = 2  # backward starts with one of them gathered and the next one prefetched


class ForwardOrder:
    """The order in which turns start their forward, recorded to prefetch the next one.

    One per root of a forward: a training step and an evaluation that starts at a submodule have
    different orders. A forward that leaves the recorded order stops prefetching until it is seen again.
    """

    def __init__(self) -> None:
        self.recorded: list[Turn] = []
        self._current: list[Turn] = []
        self._position: int | None = 0

    def begin(self) -> None:
        """A forward starts."""
        self._current = []
        self._position = 0

    def advance(self, turn: Turn) -> Turn | None:
        """``turn`` starts; the one that started next the last time, if this is the same order."""
        self._current.append(turn)
        if self._position is None or self._position >= len(self.recorded):
            return None
        if self.recorded[self._position] is not turn:
            self._position = None
            return None
        self._position += 1
        return self.recorded[self._position] if self._position < len(self.recorded) else None

    def end(self) -> None:
        """The forward is over; what was seen is what the next one will follow."""
        self.recorded = self._current
        self._current = []


class Schedule:
    """One per root; before the first forward every call has one of its own, of which the root's remains."""

    def __init__(self, turn: Turn) -> None:
        self.turns = [turn]
        """All turns below the root, once it is known."""
        self.comm: CommContext = None  # type: ignore[assignment]
        """Made once, when the root is known or a module is first gathered by hand; None before."""
        self.forward_root: Turn | None = None
        """Where the forward that is running started; not always the root (an encoder alone, for example)."""
        self.is_last_backward = True
        self.manual_finalization = False
        self.post_optim_event: Any = None
        """Which the user recorded after the optimizer step, for the next gathers to wait for."""
        self.conditionals = Conditionals()
        """Votes on modules that not every rank runs, if there are such below the root."""
        self._orders: dict[Turn, ForwardOrder] = {}
        self._order = ForwardOrder()
        self._ended: list[Turn] = []
        """Turns in the order their forward ended; backward runs through it from the end."""
        self._gathered: set[ParamGroup] = set()
        """What the forward that is running has gathered: if it raises, that is dropped."""
        self._prefetched: set[ParamGroup] = set()
        """Groups gathered because the recorded order or the user said so, and not used yet."""
        self._first: list[Turn] = []
        """The first turns that the last backward had to gather: their next forward keeps what it gathered."""
        self._kept: set[ParamGroup] = set()
        """Groups that the byte budget keeps after forward."""
        self._backward: Any = None
        """Weak reference to the end of the backward that is running; autograd drops it with a failed one."""
        self._leads = False
        """Whether no module has ended the backward that is running: no gradients wait for a reduction."""
        self._arena_bytes = self._pooled_bytes = 0
        """What the root's gradient buffers and gathered layers need of the memory that is kept."""

    # -- the root --------------------------------------------------------------------------------

    def open_comm(self, device: torch.device) -> CommContext:
        """The communication context of the groups, made at the first call."""
        if self.comm is None:
            self.use_comm(CommContext(device))
        return self.comm

    def use_comm(self, comm: CommContext) -> None:
        """Communicate through ``comm`` from now on; what its roots share grows to what this one needs."""
        if self.comm is not None:
            self.comm.finish_all()  # nobody would wait for what was launched through it
            if self.comm is not comm:
                self.comm.arena.release()  # nor free what it keeps: groups remember where their buffers were
        self.comm = comm
        for turn in self.turns:
            for group in turn.groups:
                group.context = comm
        self.follow_settings()
        comm.arena.nbytes = max(comm.arena.nbytes, self._arena_bytes)
        comm.gather_pool.nbytes = max(comm.gather_pool.nbytes, self._pooled_bytes)

    def adopt(self, root: Turn, turns: Sequence[Turn], module: nn.Module, device: torch.device) -> None:
        """Run all ``turns`` from now on and prepare their groups; if that raises nothing was adopted."""
        groups = [group for turn in turns for group in turn.groups]
        name_groups(groups, module)
        check_shared(groups)
        check_dense(groups)
        for group in groups:  # may raise, on parameters on the meta device: the next forward tries again
            group.lazy_init()
        check_managed(module, *outside(turns))
        self.turns = list(turns)
        for turn in turns:
            turn.is_root = turn is root
            find_companions(turn.groups)
        if root.auto_reshard:
            for group in root.groups:
                group.settings.reshard_after_forward = False
        self._arena_bytes = arena_bytes(
            [group.reducer.nbytes for group in groups if not group.reducer.transport.companion]
        )
        self._pooled_bytes = pooled_bytes([group.transport.nbytes for group in groups])
        self.use_comm(self.comm or CommContext(device))

    def forget_root(self) -> None:
        """Before groups are added: the next forward looks at all of them anew."""
        if self.forward_root is not None or self.is_in_backward:
            raise RuntimeError("parameters can be adopted between steps, not inside a forward or a backward.")
        for turn in self.turns:
            turn.is_root = None

    def follow_settings(self) -> None:
        """Derive from the settings of each group what all share: the most gradient buffers any asks for."""
        if self.comm is not None:
            asked = [group.settings.max_grad_buffers for turn in self.turns for group in turn.groups]
            self.comm.ask_grad_buffers(self, max(asked, default=1))

    def _enter(self, turn: Turn, phase: Phase) -> None:
        if turn.phase is not phase:
            if (turn.phase, phase) not in ALLOWED_PHASES:
                raise RuntimeError(f"no transition from {turn.phase.name} to {phase.name}; this is a bug.")
            turn.phase = phase

    # -- forward ---------------------------------------------------------------------------------

    def begin_forward(self, root: Turn) -> None:
        """A forward starts at ``root``."""
        self.forward_root = root
        self._gathered.clear()
        self._order = self._orders.setdefault(root, ForwardOrder())
        self._order.begin()
        if self.conditionals.all:
            self.conditionals.begin(root)
        if not torch.is_grad_enabled():
            self.comm.arena.release()
        if in_backward():
            return  # a checkpointed forward is computed again
        fills_arena = False
        for turn in self.turns:
            for group in turn.groups:
                settings = group.settings
                fills_arena |= settings.reduce_grads and settings.reduce_comm.common_memory
                if group.residence is Residence.KEPT:  # no backward came: parameters may have changed since
                    group.reshard()
                elif group.residence is not Residence.SHARDED and turn.under is None and group.is_old:
                    group.to_sharded()  # gathered by an evaluation or by hand, and written since
        if fills_arena and torch.is_grad_enabled():
            self.comm.arena.fill(self.comm.max_grad_buffers)
        event, self.post_optim_event = self.post_optim_event, None
        if event is not None and self.comm.streams:
            self.comm.streams["gather"].wait_event(event)

    def start(self, turn: Turn) -> bool:
        """Gather for the forward of ``turn``, and what comes next, and wait for the first.

        Whether it begins now: a list may run in parts.
        """
        begins = turn.phase is not Phase.FORWARD
        if self.conditionals.all:
            if self._is_conditional(turn):
                self._start_conditional(turn)
                return begins
            if begins and not in_backward():
                # before its gathers: those of others' modules come first
                turn.behind_conditional |= self.conditionals.pass_gap()
        self._enter(turn, Phase.FORWARD)  # before the gathers: one that raises is given up with the others
        for group in turn.groups:
            if group.residence is Residence.UNSHARDED:
                group.settle()
            else:
                if begins:
                    self._gathered.add(group)
                if group.residence is not Residence.GATHERING:
                    group.unshard()
        if begins:
            self._prefetch(turn)  # before the wait, or the next gather would wait for what this one decodes
        for group in turn.groups:
            group.wait_for_unshard()
            self._prefetched.discard(group)
        return begins

    def _is_conditional(self, turn: Turn) -> bool:
        """Whether this rank may be alone in running ``turn``; not if the forward began inside its module."""
        return turn.under is not None and self.forward_root is not None and self.forward_root.under is None

    def _start_conditional(self, turn: Any) -> None:
        """Gather for the forward of ``turn`` with all ranks, or use what was gathered for it; no order is
        recorded, since other ranks would not follow it."""
        if not in_backward():
            self.conditionals.run(turn.under)
        self._enter(turn, Phase.FORWARD)
        self._use_gathered(turn)

    @staticmethod
    def _use_gathered(turn: Any) -> None:
        for group in turn.groups:
            turn.under.check_gathered(group)
            if group.residence is Residence.UNSHARDED:
                group.settle()
            group.wait_for_unshard()

    def _prefetch(self, turn: Turn) -> None:
        """Gather what is needed after ``turn``."""
        following = self._order.advance(turn) if turn.groups else None
        ahead = turn.forward_prefetch
        if ahead is None:
            ahead = () if following is None else (following,)
        for other in ahead:
            away = (Residence.SHARDED, Residence.PARKED)
            gathered = [group for group in other.groups if group.residence in away]
            self._prefetched.update(gathered)  # all of them first: one gather may bring the others along
            for group in gathered:
                group.unshard()

    def recompute(self, turn: Turn) -> None:
        """Gather for a forward that a backward computes again; nothing is recorded."""
        if turn.under is not None and turn.under.by_vote:
            self._use_gathered(turn)
            return
        for group in turn.groups:
            group.unshard()
            group.wait_for_unshard()

    def end(self, turn: Turn) -> None:
        """The forward of ``turn`` is over: reshard, or keep what backward needs first."""
        conditional = self.conditionals.all and self._is_conditional(turn)
        if not conditional and not in_backward():  # a checkpoint around this module recomputes in backward
            trains = torch.is_grad_enabled()
            may_keep = trains and turn.auto_reshard and not turn.is_root
            for group in turn.groups:
                self._reshard_after_forward(group, may_keep and (turn in self._first or group in self._kept))
            if trains and turn.groups:
                turn.positions.append(len(self._ended))
                self._ended.append(turn)
        self._enter(turn, Phase.IDLE)

    def reshard(self, turn: Turn) -> None:
        """At the user's wish: what the end of a forward does in one, else free what is gathered."""
        for group in turn.groups:
            if turn.phase is Phase.FORWARD:
                self._reshard_after_forward(group, False)
            else:
                group.to_sharded()

    def _reshard_after_forward(self, group: ParamGroup, keep: bool) -> None:
        if not group.settings.reshard_after_forward:
            return
        if group.residence is Residence.UNSHARDED and group.parking is not None:
            group.park()
        elif group.residence is Residence.UNSHARDED and keep:
            group.keep()
        else:
            group.reshard()

    @property
    def parts_graphs(self) -> bool:
        """Whether what the forward returns may need gradients on some ranks only; not one computed again."""
        return bool(self.conditionals.trained) and not in_backward()

    def end_forward(self) -> None:
        """The forward that is running ends: the next one may follow its order."""
        if self.conditionals.all:
            self.conditionals.end_forward()
        self._order.end()
        self._choose_kept()
        self._leave_forward()
        if not torch.is_grad_enabled() and any(g.pin_memory for turn in self.turns for g in turn.groups):
            # gathers copy from the host's memory; no backward will wait, and the user may write the weights
            self.comm.streams["gather"].synchronize()

    @outside_compile
    def abort_forward(self, turn: Turn) -> None:
        """The forward of ``turn`` raised: be ready for the next one, which must gather anew what it gathered.

        What was gathered before it stays: a rank that serves requests with unsharded weights may fail alone,
        and must not be alone in the next gather.
        """
        is_last = self.forward_root is turn  # no module above can handle the error and go on
        if turn.phase is not Phase.FORWARD and not is_last:
            return  # it had not begun, or had ended, or backward computes it again
        stopped = in_backward()  # a recomputation that had gone far enough
        for other in self.turns if is_last else [turn]:
            if other.phase is Phase.FORWARD:
                self._enter(other, Phase.IDLE)
                other.still_to_run.clear()
            for group in other.groups:
                if group in self._gathered and not stopped:
                    group.to_sharded()
        if is_last:
            if not stopped:
                self.conditionals.abort_forward()
            self._leave_forward()

    def _leave_forward(self) -> None:
        """However the forward ended: prefetched groups it did not use are dropped."""
        self.forward_root = None
        for group in self._prefetched:
            if group.residence is Residence.GATHERING:
                group.reshard()
        self._prefetched.clear()

    def _choose_kept(self) -> None:
        """Fill the byte budget from the end of the forward: those groups are needed again first."""
        left = max((turn.gathered_budget_bytes for turn in self.turns), default=0)
        self._kept.clear()
        if not left:
            return
        for turn in reversed(self._order.recorded):
            if not turn.gathered_budget_bytes or turn.is_root:
                continue
            for group in reversed(turn.groups):
                if group in self._kept:
                    continue
                left -= group.transport.nbytes
                if left < 0:
                    return
                self._kept.add(group)

    # -- backward --------------------------------------------------------------------------------

    def pre_backward(self, turn: Turn) -> None:
        """A gradient of an output of ``turn`` is there: gather, and prefetch what backward needs next."""
        if self._backward is None or self._backward() is None:
            self._begin_backward()
        begins = turn.phase is not Phase.BACKWARD
        self._enter(turn, Phase.BACKWARD)
        if begins:
            for group in turn.groups:
                group.backward_id = current_graph_task_id()
        if turn.under is not None and turn.under.by_vote:
            self._use_gathered(turn)
            return
        if begins:
            for group in turn.groups:
                gathers = group.residence is not Residence.UNSHARDED
                if gathers and turn not in self._first and len(self._first) < _KEPT_MODULES:
                    self._first.append(turn)
                if group.settings.unshard_in_backward:
                    group.unshard()
        if turn.backward_prefetch is not None:
            for other in turn.backward_prefetch:
                self._gather_ahead(other)
        elif begins:
            turn.following = self._before_in_forward(turn)
            if turn.positions:
                turn.positions.pop()
            self._gather_ahead(turn.following)
            if self._leads and not turn.is_root:
                self._gather_beyond(turn, turn.following)
        if begins:
            for group in turn.groups:
                group.wait_for_unshard()

    @staticmethod
    def _gather_ahead(turn: Turn | None) -> None:
        for group in reversed(turn.groups) if turn is not None else ():
            if group.settings.unshard_in_backward:
                group.unshard()

    def _before_in_forward(self, turn: Turn) -> Turn | None:
        """The turn whose forward ended before the last one of ``turn``: its backward is next."""
        last = turn.positions[-1] if turn.positions else 0
        for position in range(last - 1, -1, -1):
            if self._ended[position] is not turn:
                return self._ended[position]
        return None

    def _begin_backward(self) -> None:
        """Once per backward, after one that failed too: run :meth:`end_backward` when it is over."""
        if self._backward is not None:
            self._drop_failed_backward()
        self._first.clear()
        self._leads = True
        end = functools.partial(self.end_backward)
        self._backward = weakref.ref(end)
        queue_callback(end)

    @on_parameters
    def post_backward(self, turn: Turn) -> None:
        """The gradients of the inputs of ``turn`` are there: reshard and reduce."""
        if self._backward is None:
            # the loss came from inside a module, past the hooks of its outputs: without an end the module
            # would stay DONE, and its next forward would be taken for one that a backward computes again
            self._begin_backward()
        self._enter(turn, Phase.DONE)
        if turn.under is not None and turn.under.by_vote:
            return  # reduced at the end, where the other ranks can take part
        for group in reversed(turn.groups):
            group.collect()
        self._leads = False
        following, turn.following = turn.following, None
        self._gather_beyond(turn, following)
        for group in reversed(turn.groups):
            group.reduce()

    def _gather_beyond(self, turn: Turn, following: Turn | None) -> None:
        """Gather what the backward of ``following`` will gather ahead when it starts, if the order decides.

        Weights are needed before gradients are: behind the reduction of ``turn`` they would wait for the
        network, and for the reduction that it waits for. The first backward does so when it starts:
        there is room where later ones have gradients, and nothing else is on the network.
        """
        if turn.gathers_first and following is not None and following.backward_prefetch is None:
            self._gather_ahead(self._before_in_forward(following))

    @outside_compile
    def end_backward(self) -> None:
        """Post-backward of the turns whose inputs needed no gradient; then wait for all reductions."""
        self.forward_root = None
        for turn in self.turns:
            turn.still_to_run.clear()
            self._end_turn(turn, all_groups=turn.phase is not Phase.DONE)
        self._end_conditionals()
        if self.is_last_backward and not self.manual_finalization:
            self.finish_reductions()
        self._backward = None

    def finalize(self) -> None:
        """Launch what is left to reduce: gradients that were collected while sync was off."""
        for turn in reversed(self.turns):
            self._end_turn(turn, all_groups=True)
        self._end_conditionals()

    def _end_conditionals(self) -> None:
        """Reduce modules that not every rank ran: all ranks are here."""
        if self.conditionals.all:
            self.conditionals.end_backward(is_last=self.is_last_backward)

    def _end_turn(self, turn: Turn, *, all_groups: bool) -> None:
        """Reduce what ``turn`` has left; modules that not every rank ran wait until all ranks reduce them."""
        with_all_ranks = turn.under is not None and turn.under.owed
        for group in reversed(turn.groups) if not with_all_ranks else ():
            # gathered again after its own: a module that runs twice, checkpointed with use_reentrant
            is_gathered = group.residence is Residence.UNSHARDED
            if is_gathered:
                group.hand_over()  # autograd lets this stream wait for those of the backward
            if is_gathered or all_groups:
                group.post_backward()
        self._enter(turn, Phase.IDLE)

    def finish_reductions(self) -> None:
        """Let the current stream see every reduced gradient; forget the order of the forward."""
        if self.comm is None:
            return
        self.comm.finish_all()
        self.comm.arena.end_backward()
        for turn in self.turns:
            for group in turn.groups:
                group.finish_backward()
        self._forget_order()

    def _forget_order(self) -> None:
        self._ended.clear()
        for turn in self.turns:
            turn.positions.clear()
            turn.following = None

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward is running; one that raised never ended, and does not run."""
        return self._backward is not None and in_backward()

    # -- failures --------------------------------------------------------------------------------

    def recover(self) -> None:
        """Before a forward: if the last backward raised, forget it."""
        if self._backward is not None and not in_backward():
            self._drop_failed_backward()

    def _drop_failed_backward(self) -> None:
        logger.warning("the last backward raised; the gradients it had not reduced are dropped")
        self.reset()

    def reset(self) -> None:
        """Forget an iteration that failed in the middle."""
        if self.comm is None:
            return
        self.comm.join()
        self._forget_order()
        for turn in self.turns:
            turn.still_to_run.clear()
            self._enter(turn, Phase.IDLE)
            for group in turn.groups:
                group.reset_iteration()
        for conditional in self.conditionals.all:
            conditional.forget()
        self.forward_root = None
        self._backward = None
