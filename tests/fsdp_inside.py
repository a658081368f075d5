"""The one place where tests look inside the runtime; everything else is said from outside.

What is here has no outside: states that only the schedule knows, streams on a device that has none, memory
that is kept and not used, a fault planted in the middle. Who changes the structure of the runtime changes
this file, and no test. Only unit tests of pure functions import those functions themselves:
``unit/test_fsdp_pure.py``, ``gpu/test_code_kernels.py`` and ``gpu/test_kernel_compilation.py``.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ragged_fsdp import collectives, topology, watch
from ragged_fsdp.dbuffer import redistribute, storage
from ragged_fsdp.fsdp import streams
from ragged_fsdp.fsdp.construct import builder, call, network
from ragged_fsdp.fsdp.gather.codes import Codes
from ragged_fsdp.fsdp.parts import left_out
from ragged_fsdp.fsdp.reduce import exchange, sends
from ragged_fsdp.fsdp.reduce.reducer import GradReducer
from ragged_fsdp.fsdp.runtime import group as groups
from ragged_fsdp.fsdp.runtime.group import ALLOWED_MOVES, ParamGroup, Residence
from ragged_fsdp.fsdp.runtime.schedule import Schedule
from ragged_fsdp.fsdp.runtime.turns import ALLOWED_PHASES, Phase, Turn
from ragged_fsdp.fsdp.streams import CommContext, PendingReduction

__all__ = [
    "BROKEN",
    "PHASES",
    "PHASE_MOVES",
    "RESIDENCES",
    "RESIDENCE_MOVES",
    "SharedContext",
    "Watch",
    "break_streams",
    "comm_contexts_of",
    "comm_memory_of",
    "companions",
    "contexts_made",
    "exchange_in_rounds",
    "fail_messages",
    "forget_levels",
    "forget_warnings",
    "forward_is_running",
    "gather_stream",
    "gradient_memory_kept",
    "gradient_memory_lent",
    "gradient_storages",
    "group_names",
    "intercept_streams",
    "look_for_late_collectives",
    "no_memory_for_shards",
    "no_memory_to_decode",
    "on_sum_of_exchange",
    "pending_reductions",
    "phase_after",
    "pool_memory",
    "pretend_streams",
    "refuse_levels",
    "remembered_of_a_step",
    "say_again",
    "stream_is",
    "use_comm_memory",
    "wait_long_for_others",
]


def _groups(module: nn.Module) -> list[Any]:
    return module._get_fsdp_state().groups


def _context(module: nn.Module) -> CommContext:
    return module._get_fsdp_state().schedule.comm


# -- states ----------------------------------------------------------------------------------------

PHASES = [phase.name for phase in Phase]
PHASE_MOVES = {(start.name, end.name): when for (start, end), when in ALLOWED_PHASES.items()}
RESIDENCES = [residence.name for residence in Residence]
RESIDENCE_MOVES = {(start.name, end.name): when for (start, end), when in ALLOWED_MOVES.items()}


def phase_after(start: str, end: str) -> str:
    """The phase of a turn that was in ``start`` when the schedule let it enter ``end``."""
    turn = Turn()
    turn.phase = Phase[start]
    Schedule(turn)._enter(turn, Phase[end])
    return turn.phase.name


def residence_after(start: str, end: str) -> str:
    """The residence of a group that was in ``start`` when it moved to ``end``."""
    group = object.__new__(ParamGroup)
    group.label = "layer"
    group.residence = Residence[start]
    group._move(Residence[end])
    return group.residence.name


def forward_is_running(root: nn.Module) -> bool:
    """Whether a forward below ``root`` has begun and not ended."""
    return root._get_fsdp_state().schedule.forward_root is not None


def forget_warnings() -> None:
    """Warnings that are given once in a process are given again."""
    left_out._WARNED.clear()


def group_names(root: nn.Module) -> list[str]:
    """What the groups below ``root`` are called in errors and profiles."""
    turns = root._get_fsdp_state().schedule.turns
    return [group.label for turn in turns for group in turn.groups]


def companions(module: nn.Module) -> list[bool]:
    """Which groups of a module do not wait for the reduction of its largest."""
    return [group.reducer.transport.companion for group in _groups(module)]


def pending_reductions(root: nn.Module) -> list[str]:
    """The groups whose reductions were launched and not waited for yet, in the order of their launch."""
    return [entry.owner.members.label for entry in _context(root).pending]


def remembered_of_a_step(root: nn.Module) -> list[Any]:
    """What a schedule still remembers of forwards and backwards that are over: it should be nothing."""
    schedule = root._get_fsdp_state().schedule
    places = [place for turn in schedule.turns for place in turn.positions]
    return [*schedule._ended, *places, *_context(root).pending]


def comm_contexts_of(module: nn.Module) -> list[Any]:
    """What a module and its groups communicate through: one object, as often as it is held."""
    state = module._get_fsdp_state()
    return [state.schedule.comm, *(group.context for group in state.groups)]


def contexts_made(patch: pytest.MonkeyPatch) -> list[Any]:
    """The communication contexts that are made from here on, until ``patch`` is undone."""
    made: list[Any] = []
    init = CommContext.__init__

    def noting(self: CommContext, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    patch.setattr(CommContext, "__init__", noting)
    return made


# -- memory ----------------------------------------------------------------------------------------


def gradient_memory_kept(root: nn.Module) -> int:
    """Bytes that are allocated now for gradient buffers of later backwards, and lent to none."""
    return sum(storage.untyped.nbytes() for storage in _context(root).arena._free)


def gradient_storages(root: nn.Module) -> list[torch.UntypedStorage]:
    """The memory that is kept for gradient buffers and lent to none, allocated or not."""
    return [storage.untyped for storage in _context(root).arena._free]


def gradient_memory_lent(root: nn.Module) -> int:
    """How many gradient buffers are in use."""
    return _context(root).arena._lent


def use_comm_memory(module: nn.Module, comm: Any) -> None:
    """Let weights and gradient buffers of a module lie in the memory of ``comm``; None is the common one."""
    for group in _groups(module):
        group.settings.gather_comm = group.settings.reduce_comm = comm or collectives.Comm()


def comm_memory_of(module: nn.Module) -> list[Any]:
    """Where weights and gradient buffers of each group of a module lie; None is the common memory."""
    comms = [group.settings.gather_comm for group in _groups(module)]
    return [None if comm.common_memory else comm for comm in comms]


def pool_memory(pg: dist.ProcessGroup, device: torch.device) -> tuple[Any, Any]:
    """A comm over memory of ``pg``'s allocator, or of a plain pool where its backend has none; its pool."""
    comm: Any = collectives.process_group_comm(pg, device)
    if comm is None:
        comm = object.__new__(collectives.ProcessGroupComm)
        comm._pool = torch.cuda.MemPool()
    return comm, comm._pool


def no_memory_for_shards() -> AbstractContextManager[None]:
    """Let this rank run out of memory where it copies its shard in ``fully_shard``."""
    return _no_memory(builder, "MainShard", "the shard")


def no_memory_to_decode() -> AbstractContextManager[None]:
    """Let this rank run out of memory when codes have arrived."""
    return _no_memory(Codes, "_decode", "what is decoded")


@contextmanager
def _no_memory(owner: Any, name: str, what: str) -> Iterator[None]:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError(f"no memory for {what}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


# -- streams ---------------------------------------------------------------------------------------

BROKEN = ("waits for no reduction", "frees what is reduced", "waits for no gather", "does not wait to write")
"""Faults of a runtime that only shows them where streams are late, or watched."""


def intercept_streams(patch: pytest.MonkeyPatch, streams: Any) -> None:
    """Let ``streams`` do what contexts do with streams and events, and the launching of collectives.

    It has ``on_stream(context, name, stream)``, ``record(context, ...)``, ``wait(context, event)``,
    ``join(context)`` and ``later(collective)``, which is what is called instead of a collective.
    """
    for name in ("on_stream", "record", "wait", "join"):
        method = getattr(streams, name)
        patch.setattr(CommContext, name, lambda self, *args, _method=method: _method(self, *args))
    _intercept_collectives(patch, streams.later)


def _intercept_collectives(patch: pytest.MonkeyPatch, later: Callable[..., Any]) -> None:
    exchanges = ("all_to_all", "all_to_all_pieces")
    calls = ("gather", "reduce")
    for owner, names in (
        (collectives.Comm, calls),
        (collectives.UserComm, calls),
        (collectives, exchanges),
    ):
        for name in names:
            patch.setattr(owner, name, later(getattr(owner, name)))
    patch.setattr(redistribute, "all_reduce_", later(redistribute.all_reduce_))


def pretend_streams(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Let contexts and storage on the CPU use the streams and events of ``module``.

    It has ``Event``, ``named_stream(name)``, ``current_stream()``, ``on_host(tensor)``, which is told what
    was copied to the host, and ``later(collective)``, which is what is called instead of a collective.
    """
    init, offload = CommContext.__init__, GradReducer._offload

    def with_streams(self: CommContext, device: torch.device) -> None:
        init(self, device)
        self.device_module = module
        self._so_far = streams._SoFar(device)
        self.streams = {name: module.named_stream(name) for name in ("gather", "reduce", "all_reduce")}
        self.arena._has_streams = True

    patch.setattr(torch, "Event", module.Event)
    for owner in (storage, streams):
        patch.setattr(owner, "stream_getter", lambda device: module.current_stream)
    patch.setattr(CommContext, "__init__", with_streams)
    patch.setattr(GradReducer, "_offload", lambda self, *args: module.on_host(offload(self, *args)))
    _intercept_collectives(patch, module.later)


def break_streams(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Plant one of the faults in :data:`BROKEN`."""

    def finish_at_once(context: CommContext, entry: PendingReduction) -> None:
        entry.release()

    def hold_nothing(context: CommContext, *args: object) -> None:
        for entry in context.pending:
            entry.held = None
            entry.release()
        context.pending.clear()

    def wait_for_nothing(context: CommContext, event: Any) -> None:
        """Nor for a reduction."""

    def write_at_once(context: CommContext, name: str, stream: Any = None) -> Any:
        return stream or context.streams[name]

    methods = ("_finish", "make_room", "wait", "on_stream")
    replacements = (finish_at_once, hold_nothing, wait_for_nothing, write_at_once)
    method, replacement = dict(zip(BROKEN, zip(methods, replacements)))[fault]
    patch.setattr(CommContext, method, replacement)


def gather_stream(root: nn.Module) -> torch.Stream:
    """The stream on which weights are gathered."""
    return _context(root).streams["gather"]


@contextmanager
def stream_is(root: nn.Module, name: str) -> Iterator[None]:
    """In debug mode without streams: let the runtime believe that ``name`` is the current one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_context(root).owners, "_current_stream", lambda: name)
        yield


def look_for_late_collectives(root: nn.Module, later_s: float) -> None:
    """Look as the watch's thread does, now and again so much later, and log what is late."""
    for seconds in (0.0, later_s):
        _context(root).watch.report(time.monotonic() + seconds)


class _Stream:
    """Notes which streams it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited_for: list[str] = []

    def wait_event(self, event: Any) -> None:
        self.waited_for.append(event.stream.name)

    def wait_stream(self, stream: _Stream) -> None:
        self.waited_for.append(stream.name)


class _Event:
    """Is behind the work of the stream that recorded it last."""

    def __init__(self, *_: Any) -> None:
        self.stream: Any = None

    def record(self, stream: _Stream) -> None:
        self.stream = stream


class SharedContext:
    """What roots share that compute on streams of their own, by name, and what these streams wait for."""

    Event = _Event

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._streams: dict[str, _Stream] = {}
        self._local = threading.local()
        pretend_streams(patch, self)
        self.computes_on("first")
        self._context = CommContext(torch.device("cpu"))
        self._context.arena.nbytes = 16

    def named_stream(self, name: str) -> _Stream:
        return self._streams.setdefault(name, _Stream(name))

    def current_stream(self) -> _Stream:
        return self._local.now

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def later(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        return collective

    def computes_on(self, name: str) -> None:
        """Let this thread compute on a stream."""
        self._local.now = self.named_stream(name)

    def waited_for(self, name: str) -> list[str]:
        """What a stream has waited for."""
        return self._streams[name].waited_for

    def on_gather_stream(self) -> None:
        """Launch something there."""
        self._context.on_stream("gather")

    def reduce(self) -> None:
        """Reduce a gradient buffer that lies in the memory that roots share."""
        leased, done = self._context.arena.lease(16, 1), _Event()
        done.record(self._streams["reduce"])
        release = functools.partial(self._context.arena.give_back, leased)
        stream = self._context.current_stream()
        self._context.pending.append(PendingReduction(done, release, None, False, None, stream))

    def finish(self) -> None:
        """Wait for all reductions."""
        self._context.finish_all()


class Watch:
    """The watch over collectives that do not finish, with launches that a test makes up."""

    def __init__(self, remembered: int) -> None:
        self._watch = watch.CollectiveWatch(torch.device("cpu"), remembered)

    def launch(
        self, phase: str, group: str, pg: dist.ProcessGroup, device: torch.device, stream: Any
    ) -> None:
        """A collective of ``group`` was launched on ``stream`` just now."""
        self._watch._device = device
        begun = self._watch.begin(phase, SimpleNamespace(label=group), pg)
        self._watch.record(begun, stream)

    def begin(self, phase: str, group: str, pg: dist.ProcessGroup, *, returns: bool) -> None:
        """The host goes into a collective; ``returns``: and comes back, once all ranks are there."""
        self._watch.begin(phase, SimpleNamespace(label=group), pg)
        if returns:
            self._watch.inside = None

    def look_at_begin(self, phase: str, pg: dist.ProcessGroup) -> None:
        """The thread writes what this rank has launched while the host is about to launch."""
        looked_at = self._watch

        class Group:
            @property
            def label(self) -> str:
                looked_at._record(None)
                return "layers.0"

        self._watch.begin(phase, Group(), pg)

    def keep_records(self, folder: Path | None) -> None:
        """Let the ranks of this process write what they launched into ``folder``."""
        watch.keep_records(folder)

    def shift_newest(self, seconds: float) -> None:
        """Let the newest launch have been made so much later."""
        self._watch._in_order()[-1].started_s += seconds

    def report(self, now_s: float) -> None:
        """Look, as the thread does, and log what is late."""
        self._watch.report(now_s)


# -- gathers that are joined ------------------------------------------------------------------------


def join_gathers(patch: pytest.MonkeyPatch) -> list[Any]:
    """Let gathers be joined over gloo, which must not: all is done but for the launch; notes each launch."""
    launched: list[Any] = []

    @contextmanager
    def launch(pg: Any, *args: Any, **options: Any) -> Iterator[None]:
        launched.append(pg)
        yield

    for module in (collectives, groups):
        patch.setattr(module, "joins_gathers", lambda pg, device: True)
        patch.setattr(module, "one_launch", launch)
    return launched


# -- the exchange of gradients ----------------------------------------------------------------------


def exchange_in_rounds(patch: pytest.MonkeyPatch, rounds: int, rail_calls: int = 8) -> None:
    """Let ``reduction="all_to_all"`` send views of gradients of any size, in so many rounds."""
    plan = sends.plan_sends
    patch.setattr(sends, "packs_all", lambda device, shard_numel: False)
    patch.setattr(exchange, "_RAIL_CALLS", rail_calls)
    patch.setattr(sends, "plan_sends", lambda layout, ranks, **_: plan(layout, ranks, rounds=rounds))


def fail_messages(patch: pytest.MonkeyPatch) -> None:
    """Let each step of an exchange arrive, and whoever waits for it be told that it failed."""

    class Failed:
        def wait(self) -> None:
            raise RuntimeError("on purpose")

    send = collectives.all_to_all_pieces

    def fail(*args: Any, async_op: bool) -> Failed:
        send(*args)
        return Failed()

    patch.setattr(collectives, "all_to_all_pieces", fail)


def gradients_held_by_exchanges(patch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the gradients whose memory each exchange holds while it runs."""
    held: list[list[str]] = []
    ready = exchange.GradExchange.ready

    def note(self: Any, *args: Any) -> None:
        before = {index: grad.untyped_storage().data_ptr() for index, grad in self._grads.items()}
        ready(self, *args)
        kept = [*self._grads.values(), *(piece for sent in self._sends for piece in sent)]
        alive = {tensor.untyped_storage().data_ptr() for tensor in kept}
        held.append([self.members.params[index].fqn for index, place in before.items() if place in alive])

    patch.setattr(exchange.GradExchange, "ready", note)
    return held


def wait_long_for_others(patch: pytest.MonkeyPatch) -> None:
    """Let a call that failed wait longer for the other ranks than it does without a word."""
    patch.setattr(call, "_PATIENCE_S", 0.0)
    patch.setattr(call, "compare", lambda *_, **__: time.sleep(0.5))


def refuse_levels(patch: pytest.MonkeyPatch, *, on: bool) -> None:
    """Let the choice of a reduction raise on this rank, as it does where a group's nodes do not allow it."""

    def refuse(*args: Any, **kwargs: Any) -> str:
        raise ValueError("no levels here")

    if on:
        patch.setattr(network, "pick_reduction", refuse)


def forget_levels(patch: pytest.MonkeyPatch) -> None:
    """Let the ranks of process groups tell each other anew where they are."""
    patch.setattr(topology, "_LEVELS", weakref.WeakKeyDictionary())


def say_again(patch: pytest.MonkeyPatch) -> None:
    """Let ``fully_shard`` log what it has said before in this process."""
    patch.setattr(network, "_SAID", set())


def on_sum_of_exchange(patch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Call ``then`` whenever the gradients that arrived were added, on the stream that adds them."""
    add = exchange.sum_rows

    def add_and_tell(*args: Any) -> None:
        add(*args)
        then()

    patch.setattr(exchange, "sum_rows", add_and_tell)
