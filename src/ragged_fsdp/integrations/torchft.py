"""torchft: replicas of a sharded model, each a job of its own, that go on when others die and rejoin.

A replica is an ordinary job of a few ranks, with ``fully_shard`` inside. torchft's lighthouse knows which
replicas live; :class:`Replicas` averages their gradients between the backward and the optimizer::

    replicas = Replicas(model, optimizer, replica=int(os.environ["REPLICA"]))
    while replicas.step < steps:
        replicas.begin()                       # who takes part is found out beside the forward
        loss = model(batch(replicas.step, replica)).mean()
        loss.backward()
        replicas.average()                     # gradients are now the mean over the replicas that are there
        optimizer.step()
        optimizer.zero_grad()

A replica that dies takes its own gradients with it and no step: the others average again what they have. One
that comes, or fell behind, copies the state of the same rank of a peer and takes part from the next step on.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft.checkpointing.transport import CheckpointTransport
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from ragged_fsdp.optim.base import local_part
from ragged_fsdp.replicas.gradients import ReplicaGradients
from ragged_fsdp.replicas.state import Offer, ReplicaState
from ragged_fsdp.replicas.transport import HealingError, Received, StateServer, job_token, receive
from ragged_fsdp.torch_internals import backend_of

__all__ = ["Averaged", "Change", "Replicas", "SplitError"]

_LOGGER = logging.getLogger(__name__)
_MOST_REPLICAS = 1024
_KEY = "default"
_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "50"}
"""Of groups between replicas: torch's watchdog would end this process when a peer's connection breaks, and
sleep four times the second before, while the next group waits for it to go."""
_POLL_S = 0.0005
_ASK_S = 0.05
_GIVEN_UP, _FIRST_STATE = "given up", "first state"
_MOST_FAILED_COPIES = 3


def _as_int(digest: str) -> int:
    """Small enough for the sum over all replicas."""
    return int(digest[:10], 16)


class SplitError(RuntimeError):
    """This replica took steps that the others did not, because each side took the other for dead."""


@dataclass(frozen=True)
class Averaged:
    """What the gradients are after :meth:`Replicas.average`."""

    step: int
    replicas: tuple[int, ...]
    """Whose gradients are in the mean."""
    attempts: int
    """How often it was averaged: more than once if a replica died in the middle."""


@dataclass(frozen=True)
class Change:
    """Who left and who came between two steps of this replica."""

    step: int
    members: tuple[int, ...]
    left: tuple[int, ...]
    came: tuple[int, ...]
    waited_s: float
    """From the end of this replica's backward to the average."""
    copied_bytes: int = 0
    """What this rank copied from a peer, if it was the one that came or fell behind."""
    copied_s: float = 0.0

    def __str__(self) -> str:
        parts = [f"step {self.step}: replicas {list(self.members)}"]
        parts += [f"left: {list(self.left)}"] if self.left else []
        parts += [f"came: {list(self.came)}"] if self.came else []
        parts.append(f"waited {self.waited_s:.2f} s")
        if self.copied_s:
            parts.append(f"copied {self.copied_bytes:,} bytes in {self.copied_s:.2f} s")
        return ", ".join(parts)


class _Members:
    """Mixed into a process group of torchft: knows which replicas it is made of and where they met."""

    members: tuple[int, ...] = ()
    store: Any = None
    """None until there has been a meeting."""

    def configure(self, *args: Any, **kwargs: Any) -> None:
        names = ["store_addr", "replica_id", "rank", "world_size"]
        names += ["quorum_id", "group_rank", "group_world_size", "global_ranks"]
        given = {**dict(zip(names, args)), **kwargs}
        self.members = tuple(rank // given["group_world_size"] for rank in given["global_ranks"])
        self.store = None  # nobody is told in the store of the last meeting any more
        super().configure(**given)  # type: ignore[misc]

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        self.store = store  # before connecting: where that fails, the others hear of it there
        return super()._create_pg(store, rank, world_size)  # type: ignore[misc]


class _Gloo(_Members, ProcessGroupGloo):
    """Over gloo. Connecting must fail soon, for a replica may die while it does; averaging may wait."""

    def __init__(self, connect_s: float, timeout_s: float) -> None:
        super().__init__(timeout=timedelta(seconds=connect_s))
        self._average_timeout = timedelta(seconds=timeout_s)

    def _opts_hook(self, opts: Any) -> Any:
        opts.timeout = self._average_timeout
        return opts

    def settle(self, given_up: Callable[[], bool]) -> None:
        """Nothing: a collective that failed has raised."""


class _Nccl(_Members, ProcessGroupNCCL):
    """Over NCCL, where nothing raises: a kernel that waits for a dead peer is ended by an abort alone."""

    def __init__(self, connect_s: float, timeout_s: float) -> None:
        super().__init__(timeout=timedelta(seconds=timeout_s))
        self._connect_timeout, self._average_timeout = (timedelta(seconds=s) for s in (connect_s, timeout_s))

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Meet the others; one that died since they were chosen is not waited for as long as an average."""
        self._timeout = self._connect_timeout  # of the store where they meet
        try:
            super().configure(*args, **kwargs)
        finally:
            self._timeout = self._average_timeout

    def _create_pg(self, *args: Any, **kwargs: Any) -> Any:
        before = {name: os.environ.get(name) for name in _WATCHDOG}
        os.environ.update(_WATCHDOG)
        try:
            return super()._create_pg(*args, **kwargs)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({name: value} if value is not None else {})

    def settle(self, given_up: Callable[[], bool]) -> None:
        """Wait for the device; abort what waits for a peer as soon as its connection is seen to be broken.

        Also if others have ``given_up``: one may see a peer go and another not.
        """
        done = torch.cuda.current_stream().record_event()
        ask_at = time.monotonic() + _ASK_S
        while not done.query():
            group = self._pg  # torchft aborts it too, on a thread, when the time is over
            if group is None:
                done.synchronize()  # nothing before it waits for a peer any more
                return
            if backend_of(group, torch.device("cuda")).get_error().name != "SUCCESS":
                self.abort()
                return
            if time.monotonic() > ask_at and given_up():
                self.abort()
                return
            time.sleep(_POLL_S)


class _Attempts:
    """The attempts to average, counted alike by all ranks of this replica, and what these say of them.

    Who gives up tells the other ranks of this replica and the same rank of the others: over NCCL one may see
    that a peer is gone and another not, for as long as an average may take.
    """

    def __init__(self, group: _Members, timeout: timedelta) -> None:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
        self._store, self._group = dist.PrefixStore("ragged_fsdp", store), group
        self._number = 0
        self._heard: threading.Event | None = None
        """Set when the one that is under way was given up; None while nobody wants to know."""

    def begin(self) -> None:
        """The next one begins."""
        self._number += 1
        self.rest()

    def give_up(self) -> None:
        """Tell the others that this one failed: they need not wait for it."""
        self._store.set(f"given up {self._number}", "")
        if (met := self._group.store) is not None:
            _beside(_give_up_in, met)

    def given_up(self) -> bool:
        """Whether anyone has given it up, as far as was heard since the first call; it does not wait.

        The host of a store may stand still, and with it who asks it: that is a thread.
        """
        if self._heard is None:
            self._heard = threading.Event()
            _beside(self._listen, self._heard, f"given up {self._number}", self._group.store)
        return self._heard.is_set()

    def rest(self) -> None:
        """Ask no more."""
        self._heard = None

    def _listen(self, heard: threading.Event, own: str, met: Any) -> None:
        while self._heard is heard and not heard.is_set():
            try:
                given_up = self._store.check([own]) or (met is not None and met.check([_GIVEN_UP]))
            except dist.DistError:  # the store is gone, with a replica
                given_up = True
            if given_up:
                heard.set()
            time.sleep(_ASK_S)

    def has_copied(self) -> None:
        """This rank has a peer's state. To be said before the vote."""
        self._store.add(f"copied {self._number}", 1)

    def all_have_copied(self) -> bool:
        """Whether every rank of this replica has. To be asked after the vote, which all have come to."""
        return self._store.add(f"copied {self._number}", 0) == dist.get_world_size()


def _beside(call: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=call, args=args, name="given up", daemon=True).start()


def _give_up_in(store: Any) -> None:
    with suppress(dist.DistError):  # it may be a store of the replica that died
        store.set(_GIVEN_UP, "")


class _Transport(CheckpointTransport[dict[str, Any]]):
    """torchft's way from one replica to another, over :mod:`ragged_fsdp.replicas.transport`."""

    def __init__(
        self, state: ReplicaState, token: bytes, host: str, timeout_s: float, device: torch.device
    ) -> None:
        self._state, self._token, self._pin = state, token, device.type == "cuda"
        self._server = StateServer(token, host, timeout_s, device)
        self.received: Received | None = None
        self.failure: HealingError | None = None

    def metadata(self) -> str:
        return self._server.address

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: dict[str, Any], timeout: timedelta
    ) -> None:
        offer: Offer | str = state_dict["user"][_KEY]
        if isinstance(offer, Offer):
            offer.header["counters"] = state_dict["torchft"]
        self._server.offer(step, offer)

    def disallow_checkpoint(self) -> None:
        self._server.withdraw()

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> dict[str, Any]:
        seconds = timeout.total_seconds()
        try:
            received = receive(metadata, self._token, step, seconds, self._state.check, pin_memory=self._pin)
        except HealingError as failure:
            self.failure = failure
            raise
        self.received = received
        counters = received.header["counters"]
        return {
            "user": {_KEY: received},
            "torchft": {key: int(counters[key]) for key in ("step", "batches_committed")},
        }

    def shutdown(self, wait: bool = True) -> None:
        self._server.close()


class Replicas:
    """This replica among the others; every rank of it makes one, after ``fully_shard`` and the optimizer.

    Args:
        model, optimizer: of this replica, sharded alike in all of them.
        replica: its number, which no other living replica has; a restarted one keeps it.
        min_replicas: with fewer than these no step is taken.
        token: the secret that members of the job share; default: ``RAGGED_FSDP_REPLICA_TOKEN``.
        lighthouse: its address, ``http://host:port``; default: torchft's ``TORCHFT_LIGHTHOUSE``.
        timeout_s: how long an average may take, the wait for the slowest replica and for one that copies its
            state included; a replica that stands still longer is left behind.
        connect_s: how long replicas may take to meet after a change. Over NCCL they then connect in the first
            collective, which may take ``timeout_s``.
        host: the name under which peers reach this rank; default: the machine's.
        init_sync: whether replicas at step 0 copy the weights of that with the lowest number; without it they
            must be equal.
        extra: by name, a function that returns what else a replica that comes must know (numbers, text,
            lists, tuples, dicts) and one that takes it, such as
            ``{"scheduler": (scheduler.state_dict, scheduler.load_state_dict)}``.
        on_change: called with a :class:`Change` after a step in which replicas left or came; they are
            logged too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        replica: int,
        min_replicas: int = 1,
        token: str | None = None,
        lighthouse: str | None = None,
        timeout_s: float = 60.0,
        connect_s: float = 10.0,
        host: str | None = None,
        init_sync: bool = True,
        extra: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] | None = None,
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        if not 0 <= replica < _MOST_REPLICAS:
            raise ValueError(f"replica: expected a number from 0 to {_MOST_REPLICAS - 1}, got {replica}.")
        secret = job_token(token)
        self.replica = replica
        self._state = ReplicaState(model, optimizer, extra)
        self._gradients = ReplicaGradients(model)
        self._model: tuple[int, int] = (0, 0)
        """Stands for the model and how it is trained; behind how often gradients had been laid out then."""
        self._agreed_options = 0
        self._lineage = 1
        """Stands for all steps so far and whose gradients were in them: equal where the state is."""
        self._on_change = on_change
        self._ready: Any = None
        self._begun = False
        self._healed = False
        """Whether the state became a peer's since the forward: the gradients are of another one then."""
        self._copied: Received | None = None
        """A peer's state that came in this attempt, to be taken over after the vote."""
        self._failed_copies = 0
        self._known: tuple[int, ...] = ()
        self._init_sync = init_sync
        self._timeout = timedelta(seconds=timeout_s)
        host = host or socket.gethostname()
        self._device = local_part(next(iter(model.parameters()))).device
        self._group = (_Nccl if self._device.type == "cuda" else _Gloo)(connect_s, timeout_s)
        self._transport = _Transport(self._state, secret, host, timeout_s, self._device)
        self._attempts = _Attempts(self._group, timedelta(seconds=connect_s))
        self._patience = timedelta(seconds=3 * timeout_s)
        """With ranks and replicas that may still be in an average, which is more than one collective."""
        # Last: from here on the lighthouse waits for this replica, so that it must be ready to take a step.
        self._manager = Manager(
            pg=self._group,
            load_state_dict=self._keep,
            state_dict=self._offer,
            min_replica_size=min_replicas,
            use_async_quorum=True,
            timeout=self._timeout,
            quorum_timeout=self._patience,
            connect_timeout=timedelta(seconds=connect_s),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            lighthouse_addr=lighthouse,
            replica_id=f"replica_{replica}",
            hostname=host,
            checkpoint_transport=self._transport,
            init_sync=False,
        )

    @property
    def step(self) -> int:
        """Steps that the job has taken; jumps when this replica copies the state of a peer."""
        return self._manager.current_step()

    def state_dict(self) -> dict[str, int]:
        """The counters, to be saved with a checkpoint of the model and optimizer."""
        return {**self._manager.state_dict(), "lineage": self._lineage}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a checkpoint was taken; before the first step."""
        self._manager.load_state_dict(state)
        self._lineage = state["lineage"]

    def begin(self) -> None:
        """Before the forward: ask who takes part in this step, and let peers copy this rank's state.

        Neither is waited for. Until :meth:`average` the state must not change.
        """
        if self._begun:
            raise RuntimeError("begin: the last step was begun and not averaged.")
        if torch.accelerator.is_available():
            self._ready = torch.accelerator.current_stream().record_event()
        self._begun = True
        self._transport.received = None
        self._healed = False
        self._ask()

    def average(self) -> Averaged:
        """After the backward: the gradients become their mean over the replicas that are there.

        Always for one step of the job, which the optimizer must take next. A replica that had to copy its
        state from a peer contributed nothing to that step, but has it after this. If all that are left are
        such, because who gave the state died, there is no gradient: the step changes nothing.
        """
        if not self._begun:
            raise RuntimeError("average: call begin() before the forward.")
        began, attempts = time.monotonic(), 1
        while (averaged := self._attempt()) is None:
            attempts += 1
            error = self._manager.errored()
            why = error.original_exception if error is not None else "a rank of this replica failed"
            _LOGGER.warning("step %d is averaged again: %s", self.step, why)
            self._ask()
        present, contributors = averaged
        self._gradients.hand_over(present)
        text = f"{self._lineage} {self.step} {contributors}"
        self._lineage = _as_int(hashlib.sha256(text.encode()).hexdigest())
        self._begun = False
        self._tell(time.monotonic() - began)
        return Averaged(self.step - 1, contributors, attempts)

    def _ask(self) -> None:
        """Ask who takes part, on a thread of the manager: its counters jump when a state is copied there."""
        self._counters = self._manager.state_dict()
        self._manager.start_quorum()

    def close(self) -> None:
        """Leave the job."""
        self._manager.shutdown(wait=False)

    def _attempt(self) -> tuple[Tensor, tuple[int, ...]] | None:
        """Average the gradients and commit; None if a replica left on the way."""
        manager = self._manager
        self._attempts.begin()
        manager.wait_quorum()
        if self._init_sync and self.step == 0 and len(self._group.members) > 1 and not manager.errored():
            self._take_first_state()
        present, flats = self._gradients.collect()
        contributors = self._agree()
        if contributors is not None:
            self._reduce(present, flats, len(contributors))
        if self._failed():
            self._let_go()
        committed = manager.should_commit(self._patience)
        self._take_over(committed)
        if committed and self._healed and self._options() != self._agreed_options:
            raise RuntimeError(
                f"replica {self.replica}: the optimizer's options came from a peer that then changed them in "
                f"step {self.step - 1}; set them before begin(), or between average() and the step."
            )
        return (present, contributors) if committed and contributors is not None else None

    def _take_first_state(self) -> None:
        """Replicas that begin the job in one meeting all take the state of that with the lowest number.

        torchft would do so too, but choose another one for each rank: of a sharded model every rank would
        have its part of other weights, and contribute with other replicas.
        """
        manager, transport, first = self._manager, self._transport, min(self._group.members)
        try:
            store = self._group.store
            if self.replica == first:
                state = {"user": {_KEY: self._offer()}, "torchft": manager.state_dict()}
                transport.send_checkpoint([], 0, state, self._timeout)
                store.set(_FIRST_STATE, transport.metadata())
                return
            self._wait_for_first(first, store)
            address = store.get(_FIRST_STATE).decode()
            self._keep(transport.recv_checkpoint(0, address, 0, self._timeout)["user"][_KEY])
        except (HealingError, dist.DistError) as error:  # it died, say
            manager.report_error(error)

    def _wait_for_first(self, first: int, store: Any) -> None:
        """Until replica ``first`` offers its state, after its first backward, which may take long."""
        until = time.monotonic() + self._timeout.total_seconds()
        while not store.check([_FIRST_STATE]):
            if self._attempts.given_up():
                raise HealingError(f"the average was given up before replica {first} offered its state")
            if time.monotonic() > until:
                late = f"replica {first} gave no first state within {self._timeout}; is init_sync on there?"
                self._transport.failure = HealingError(late)
                raise self._transport.failure from TimeoutError()
            time.sleep(_ASK_S)

    def _reduce(self, present: Tensor, flats: list[Tensor], contributors: int) -> None:
        for work in [self._add_up(tensor) for tensor in (present, *flats)]:
            work.wait()
        for flat in flats:  # by the roll: the manager also counts a replica that was healed before
            flat /= max(1, contributors)

    def _add_up(self, tensor: Tensor) -> Any:
        """Start the sum over the replicas that contribute; the others have zeros."""
        if not self._contributes():
            tensor.zero_()
        return self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM)

    def _contributes(self) -> bool:
        """Whether this replica's gradients are of the state of this step.

        One that copies its state now, or did so in an earlier attempt at this step, has none to give.
        """
        return self._manager.is_participating() and not self._healed and self._copied is None

    def _let_go(self) -> None:
        """End the group, or a replica that waits for this one would find out only by its time-out.

        So would another rank of this one, whose peer is gone too and has not been missed there.

        gloo closes the connections of a group when nobody holds it any more: neither what was launched nor
        a frame of the error. That must be before the ranks of this replica wait for each other: those of
        another may wait for them in turn.
        """
        error = self._manager.errored()
        if error is not None:
            error.original_exception.__traceback__ = None
        self._attempts.give_up()
        self._group.abort()

    def _failed(self) -> bool:
        """Whether a collective of this attempt failed, once all have come to an end."""
        self._group.settle(self._attempts.given_up)
        self._attempts.rest()
        if (error := self._group.errored()) is not None:
            self._manager.report_error(error)
        return self._manager.errored() is not None

    def _agree(self) -> tuple[int, ...] | None:
        """Whose gradients will be in the mean; None if a replica left. All must have one model, one past."""
        own = (self._lineage, self._fingerprint(), self._options())
        roll = torch.zeros(1 + len(own), _MOST_REPLICAS, dtype=torch.int64)
        roll[:, self.replica] = torch.tensor([1, *own])
        roll = roll.to(self._device)
        self._add_up(roll).wait()
        if self._failed():
            return None
        there, *told = roll.tolist()
        if there[self.replica] > 1:
            raise ValueError(f"replica {self.replica}: two living replicas have this number.")
        contributors = tuple(index for index, one in enumerate(there) if one)
        said = {index: tuple(each[index] for each in told) for index in contributors if there[index] == 1}
        says = list(said.values())
        kept = max(says, key=lambda one: (says.count(one), -says.index(one)), default=own)
        if self._contributes() and own != kept:
            others = [index for index in contributors if said.get(index) == kept]
            raise self._odd_one_out(own, kept, others)
        if len(set(says)) > 1 or len(said) < len(contributors):
            # the others leave; what is averaged then is averaged without them
            self._manager.report_error(
                RuntimeError("a replica took other steps, has another model or a number twice")
            )
            return None
        self._agreed_options = kept[-1]
        return contributors

    def _odd_one_out(self, own: tuple[int, ...], kept: tuple[int, ...], others: list[int]) -> Exception:
        if own[0] != kept[0]:
            return SplitError(
                f"replica {self.replica}: up to step {self.step} it has taken other steps than replicas "
                f"{others}; start it again, to copy their state."
            )
        if own[1] != kept[1]:
            return ValueError(
                f"replica {self.replica}: its model, how it is cut or trained, or the class of its optimizer "
                f"differs from that of replicas {others} on rank {dist.get_rank()}; start all with the same "
                "settings and the same number of ranks."
            )
        return ValueError(
            f"replica {self.replica}: in step {self.step} its optimizer has other options than replicas "
            f"{others}, here lr {[float(g['lr']) for g in self._state.groups if 'lr' in g]}; set them from "
            "replicas.step, or give the state of a scheduler as extra."
        )

    def _fingerprint(self) -> int:
        times = self._gradients.times_laid_out
        if self._model[0] != times:
            self._model = times, _as_int(self._state.fingerprint())
        return self._model[1]

    def _options(self) -> int:
        return _as_int(self._state.options_hash())

    def _offer(self) -> Offer | str:
        try:
            offer = self._state.offer(self._ready)
        except Exception as error:  # that of the one that needs it, and no reason not to go on here
            return f"{type(error).__name__}: {error}"
        offer.header["lineage"] = self._lineage
        return offer

    def _keep(self, received: Received) -> None:
        self._copied = received
        self._attempts.has_copied()

    def _take_over(self, committed: bool) -> None:
        """Make a copied state this rank's if every rank of the replica has one, or none of them.

        A replica of which only some ranks are at the others' step would count as one that is: its other
        ranks would contribute, and give away, a state that is none of that step.
        """
        received, self._copied = self._copied, None
        if (failure := self._transport.failure) is not None:
            # the giver may have died or gone on; what is wrong with the copy itself stays wrong
            self._transport.failure, self._failed_copies = None, self._failed_copies + 1
            if not isinstance(failure.__cause__, OSError) or self._failed_copies == _MOST_FAILED_COPIES:
                raise failure
        if received is None:
            return
        if not committed and not self._attempts.all_have_copied():
            self._manager.load_state_dict(self._counters)  # behind again: all ranks will copy
            return
        self._healed, self._failed_copies = True, 0
        self._state.load(received.header, received.runs)
        self._lineage = int(received.header["lineage"])

    def _tell(self, waited_s: float) -> None:
        members, known = self._group.members, self._known
        self._known = members
        received = self._transport.received
        left = tuple(sorted(set(known) - set(members)))
        came = tuple(sorted(set(members) - set(known))) if known else ()
        if not (left or came or received):
            return
        change = Change(self.step - 1, members, left, came, waited_s)
        if received is not None:
            change = Change(self.step - 1, members, left, came, waited_s, received.nbytes, received.seconds)
        if dist.get_rank() == 0:
            _LOGGER.warning("%s", change)
        if self._on_change is not None:
            self._on_change(change)
