"""The weights that replicas begin with: those of one of them, on all ranks of all others."""

from __future__ import annotations

import time
from collections.abc import Callable

from ragged_fsdp.integrations.torchft.groups import ReplicaMembers
from ragged_fsdp.integrations.torchft.transport import StateTransport
from ragged_fsdp.replicas.attempts import ASK_S, Attempts, Told, tell
from ragged_fsdp.replicas.copies import Copies
from ragged_fsdp.replicas.state import Offer
from ragged_fsdp.replicas.transport import HealingError

__all__ = ["FirstState"]

_KEY = "first state"
_STEP = 0


class FirstState:
    """Replicas that begin the job in one meeting all take the state of that with the lowest number.

    torchft would do so too, but choose another one for each rank: of a sharded model every rank would have
    its part of other weights, and contribute with other replicas.
    """

    def __init__(
        self,
        replica: int,
        group: ReplicaMembers,
        transport: StateTransport,
        attempts: Attempts,
        copies: Copies,
        timeout_s: float,
    ) -> None:
        self._replica, self._group, self._transport = replica, group, transport
        self._attempts, self._copies, self._timeout_s = attempts, copies, timeout_s

    def exchange(self, offer: Callable[[], Offer | str], counters: dict[str, int]) -> None:
        """Give this rank's state or copy that of the giver; HealingError if it does not come."""
        first, store = min(self._group.members), self._group.store
        if self._replica == first:
            tell(store, _KEY, self._transport.offer(_STEP, offer(), counters))
            return
        address = self._address_of(first)
        received, _ = self._transport.receive(address, _STEP, self._timeout_s)
        self._copies.keep(received)

    def _address_of(self, first: int) -> str:
        """Where replica ``first`` offers its state, after its first backward, which may take long."""
        told, until = Told(self._group.store, _KEY), time.monotonic() + self._timeout_s
        try:
            while told.value is None:
                if told.gone or self._attempts.given_up():
                    raise HealingError(f"the average was given up before replica {first} offered its state")
                if time.monotonic() > until:
                    late = f"replica {first} gave no first state within {self._timeout_s} s; is init_sync on?"
                    failure = HealingError(late)
                    self._copies.failed(failure)
                    raise failure from TimeoutError()
                time.sleep(ASK_S)
        finally:
            told.rest()
        return told.value.decode()
