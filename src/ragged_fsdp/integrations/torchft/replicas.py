"""A step of this replica among the others, over torchft."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchft.manager import Manager

from ragged_fsdp.integrations.torchft.first import FirstState
from ragged_fsdp.integrations.torchft.groups import Gloo, Nccl
from ragged_fsdp.integrations.torchft.transport import StateTransport
from ragged_fsdp.optim.state import local_part
from ragged_fsdp.replicas.attempts import Attempts, replica_store
from ragged_fsdp.replicas.copies import Copies
from ragged_fsdp.replicas.gradients import ReplicaGradients
from ragged_fsdp.replicas.roll import MOST_REPLICAS, Roll, Says, SplitError, as_number, column
from ragged_fsdp.replicas.state import Offer, ReplicaState
from ragged_fsdp.replicas.steps import Averaged, Change
from ragged_fsdp.replicas.transport import HealingError, job_token

__all__ = ["Replicas"]

_LOGGER = logging.getLogger(__name__)
_PAUSE_S = 1.0
_RETRIES = 1 << 30
"""How often a manager asks a lighthouse that it does not reach: until its rank does not wait any more."""


class Replicas:
    """This replica among the others; every rank of it makes one, after ``fully_shard`` and the optimizer.

    Args:
        model, optimizer: of this replica, sharded alike in all of them.
        replica: its number, which no other living replica has; a restarted one keeps it.
        min_replicas: with fewer than these no step is taken; :meth:`average` waits for them.
        token: the secret that members of the job share; default: ``RAGGED_FSDP_REPLICA_TOKEN``.
        lighthouse: its address, ``http://host:port``; default: torchft's ``TORCHFT_LIGHTHOUSE``.
        timeout_s: how long an average may take, the wait for the slowest replica and for one that copies its
            state included; a replica that stands still longer is left behind.
        connect_s: how long replicas may take to meet after a change. Over NCCL they then connect in the first
            collective, which may take ``timeout_s``.
        wait_s: how long to wait for ``min_replicas``, after which :meth:`average` raises TimeoutError; at
            least, and by default, three times ``timeout_s``.
        host: the name under which others reach this rank; default: the machine's.
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
        wait_s: float | None = None,
        host: str | None = None,
        init_sync: bool = True,
        extra: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]] | None = None,
        on_change: Callable[[Change], None] | None = None,
    ) -> None:
        if not 0 <= replica < MOST_REPLICAS:
            raise ValueError(f"replica: expected a number from 0 to {MOST_REPLICAS - 1}, got {replica}.")
        if not 1 <= min_replicas <= MOST_REPLICAS:
            raise ValueError(f"min_replicas: expected 1 to {MOST_REPLICAS}, got {min_replicas}.")
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
        self._copies = Copies(self._state)
        self._known: tuple[int, ...] = ()
        self._init_sync, self._least = init_sync, min_replicas
        self._pauses = 0
        """Made in this step because too few replicas were at it."""
        self._timeout = timedelta(seconds=timeout_s)
        self._patience = 3 * self._timeout
        """With ranks and replicas that may still be in an average, which is more than one collective."""
        self._wait = max(self._patience, timedelta(seconds=wait_s or 0))
        host = host or socket.gethostname()
        self._device = local_part(next(iter(model.parameters()))).device
        self._group = (Nccl if self._device.type == "cuda" else Gloo)(connect_s, timeout_s)
        self._transport = StateTransport(self._copies, secret, host, timeout_s, self._device)
        store = replica_store(host, timeout_s)
        self._attempts = Attempts(store, self._group)
        self._first_state = FirstState(
            replica, self._group, self._transport, self._attempts, self._copies, timeout_s
        )
        # Last: from here on the lighthouse waits for this replica, so that it must be ready to take a step.
        self._manager = Manager(
            pg=self._group,
            load_state_dict=self._copies.keep,
            state_dict=self._offer,
            min_replica_size=min_replicas,
            use_async_quorum=True,
            timeout=self._timeout,
            quorum_timeout=self._wait,
            quorum_retries=_RETRIES,
            connect_timeout=timedelta(seconds=connect_s),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=store.host,
            store_port=store.port,
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
        self._copies.begin()
        self._ask()

    def average(self) -> Averaged:
        """After the backward: the gradients become their mean over the replicas that are there.

        Always for one step of the job, which the optimizer must take next. A replica that had to copy its
        state from a peer contributed nothing to that step, but has it after this. If all that are left are
        such, because who gave the state died, there is no gradient: the step changes nothing.

        Raises TimeoutError where ``min_replicas`` are not there for ``wait_s``.
        """
        if not self._begun:
            raise RuntimeError("average: call begin() before the forward.")
        began, attempts = time.monotonic(), 1
        while (averaged := self._attempt()) is None:
            attempts += 1
            self._before_again()
            self._ask()
        present, contributors = averaged
        self._gradients.hand_over(present)
        text = f"{self._lineage} {self.step} {contributors}"
        self._lineage = as_number(hashlib.sha256(text.encode()).hexdigest())
        self._begun, self._pauses = False, 0
        self._tell(time.monotonic() - began)
        return Averaged(self.step - 1, contributors, attempts)

    def _ask(self) -> None:
        """Ask who takes part, on a thread of the manager: its counters jump when a state is copied there."""
        self._counters = self._manager.state_dict()
        self._manager.start_quorum()

    def _before_again(self) -> None:
        """Say why the step is averaged again; first wait, if too few replicas are at it."""
        there, error = self._manager.num_participants(), self._manager.errored()
        if there >= self._least:
            why = error.original_exception if error is not None else "another rank of this replica failed"
            _LOGGER.warning("step %d is averaged again: %s", self.step, why)
            self._pauses = 0
            return
        few = (
            f"replica {self.replica}, step {self.step}: expected at least {self._least} replicas "
            f"(min_replicas) at this step, got {there}; there are {list(self._group.members)}"
        )
        if self._pauses * _PAUSE_S >= self._wait.total_seconds():  # all ranks have counted alike
            raise TimeoutError(f"{few}, for {self._wait} (wait_s).")
        if self._pauses == 1:  # in the attempt before others may have copied the state of this step
            _LOGGER.warning("%s", few)
        time.sleep(_PAUSE_S if self._pauses else 0)
        self._pauses += 1

    def close(self) -> None:
        """Leave the job."""
        self._manager.shutdown(wait=False)

    def _attempt(self) -> tuple[Tensor, tuple[int, ...]] | None:
        """Average the gradients and commit; None if a replica left on the way."""
        manager = self._manager
        self._attempts.begin()
        self._wait_for_quorum()
        if self._init_sync and self.step == 0 and len(self._group.members) > 1 and not manager.errored():
            try:
                self._first_state.exchange(self._offer, manager.state_dict())
            except HealingError as error:  # it died, say
                manager.report_error(error)
        present, flats = self._gradients.collect()
        with self._group.watched(self._attempts.given_up):
            contributors = self._agree()
            if contributors is not None:
                self._reduce(present, flats, len(contributors))
            failed = self._failed()
        self._attempts.rest()
        if failed:
            self._let_go()
        committed = manager.should_commit(self._patience)
        self._settle_copy(committed)
        if committed and self._copies.healed and self._options() != self._agreed_options:
            raise RuntimeError(
                f"replica {self.replica}: the optimizer's options came from a peer that then changed them in "
                f"step {self.step - 1}; set them before begin(), or between average() and the step."
            )
        return (present, contributors) if committed and contributors is not None else None

    def _wait_for_quorum(self) -> None:
        try:
            self._manager.wait_quorum()
        except TimeoutError as error:
            raise TimeoutError(
                f"replica {self.replica}, step {self.step}: the lighthouse named no members within "
                f"{self._wait} (wait_s). Fewer replicas ask than its --min_replicas, one that lives does not "
                "ask, a rank of this one does not, or the lighthouse is away."
            ) from error

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
        return self._manager.is_participating() and not self._copies.healed and not self._copies.arrived

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
        if (error := self._group.errored()) is not None:
            self._manager.report_error(error)
        return self._manager.errored() is not None

    def _agree(self) -> tuple[int, ...] | None:
        """Whose gradients will be in the mean; None if a replica left. All must have one model, one past."""
        own = Says(self._lineage, self._fingerprint(), self._options())
        table = column(self.replica, own).to(self._device)
        self._add_up(table).wait()
        if self._failed():
            return None
        roll = Roll.of(table)
        if roll.counts[self.replica] > 1:
            raise ValueError(f"replica {self.replica}: two living replicas have this number.")
        if self._contributes() and own != roll.kept:
            raise self._odd_one_out(own, roll)
        if not roll.agree:
            # the others leave; what is averaged then is averaged without them
            self._manager.report_error(
                RuntimeError("a replica took other steps, has another model or a number twice")
            )
            return None
        self._agreed_options = (roll.kept or own).options
        return roll.contributors

    def _odd_one_out(self, own: Says, roll: Roll) -> Exception:
        assert roll.kept is not None
        if own.past != roll.kept.past:
            return SplitError(
                f"replica {self.replica}: up to step {self.step} it has taken other steps than replicas "
                f"{roll.by}; start it again, to copy their state."
            )
        if own.model != roll.kept.model:
            return ValueError(
                f"replica {self.replica}: its model, how it is cut or trained, or the class of its optimizer "
                f"differs from that of replicas {roll.by} on rank {dist.get_rank()}; start all with the same "
                "settings and the same number of ranks."
            )
        return ValueError(
            f"replica {self.replica}: in step {self.step} its optimizer has other options than replicas "
            f"{roll.by}, here lr {[float(g['lr']) for g in self._state.groups if 'lr' in g]}; set them from "
            "replicas.step, or give the state of a scheduler as extra."
        )

    def _fingerprint(self) -> int:
        times = self._gradients.times_laid_out
        if self._model[0] != times:
            self._model = times, as_number(self._state.fingerprint())
        return self._model[1]

    def _options(self) -> int:
        return as_number(self._state.options_hash())

    def _offer(self) -> Offer | str:
        try:
            offer = self._state.offer(self._ready)
        except Exception as error:  # that of the one that needs it, and no reason not to go on here
            return f"{type(error).__name__}: {error}"
        offer.header["lineage"] = self._lineage
        return offer

    def _settle_copy(self, committed: bool) -> None:
        """After the vote: what was copied becomes this rank's if every rank of the replica has copied."""
        whole = committed or self._all_ranks(self._copies.arrived)
        self._copies.raise_if_hopeless()
        if not self._copies.arrived:
            return
        if whole:
            self._lineage = int(self._copies.take_over()["lineage"])
        else:
            self._copies.drop()
            self._manager.load_state_dict(self._counters)  # behind again: all ranks will copy

    def _all_ranks(self, one: bool) -> bool:
        """Whether it is so on every rank of this replica; all of them ask."""
        least = torch.tensor(int(one), device=self._device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return bool(least)

    def _tell(self, waited_s: float) -> None:
        members, known, copies = self._group.members, self._known, self._copies
        self._known = members
        left = tuple(sorted(set(known) - set(members)))
        came = tuple(sorted(set(members) - set(known))) if known else ()
        if not (left or came or copies.healed):
            return
        change = Change(self.step - 1, members, left, came, waited_s, copies.nbytes, copies.seconds)
        if dist.get_rank() == 0:
            _LOGGER.warning("%s", change)
        if self._on_change is not None:
            self._on_change(change)
