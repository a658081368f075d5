"""A peer's state on this rank, from where it has arrived to where it is this rank's own."""

from __future__ import annotations

from typing import Any

from ragged_fsdp.replicas.state import Piece, ReplicaState
from ragged_fsdp.replicas.transport import HealingError, Received

__all__ = ["MOST_FAILURES", "Copies"]

MOST_FAILURES = 3


class Copies:
    """What a rank has copied and not taken over, and what became of copies before.

    A replica takes copies over on all of its ranks or on none: one of which only some ranks are at the
    others' step would count as one that is, and its other ranks would contribute, and give away, a state
    that is none of that step.
    """

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._arrived: Received | None = None
        self._failure: HealingError | None = None
        self._failures = 0
        self.healed = False
        """Whether the state became a peer's since the forward: the gradients are of another one then."""
        self.nbytes, self.seconds = 0, 0.0
        """What the copy that was taken over since the forward brought, and how long it took."""

    def begin(self) -> None:
        """Before a forward."""
        self.healed, self.nbytes, self.seconds = False, 0, 0.0

    def check(self, header: dict[str, Any]) -> list[list[Piece]]:
        """The pieces of each run that is about to come; ValueError unless they fit this rank."""
        return self._state.check(header)

    @property
    def arrived(self) -> bool:
        """Whether there is one to be taken over or dropped."""
        return self._arrived is not None

    def keep(self, received: Received) -> None:
        """One has arrived."""
        self._arrived = received

    def failed(self, failure: HealingError) -> None:
        """One has not, or does not fit."""
        self._failure = failure

    def raise_if_hopeless(self) -> None:
        """Raise if the copy that just failed cannot succeed, or was one too many.

        The giver may have died or gone on; what is wrong with the copy itself stays wrong.
        """
        failure, self._failure = self._failure, None
        if failure is None:
            return
        self._failures += 1
        if not isinstance(failure.__cause__, OSError) or self._failures == MOST_FAILURES:
            raise failure

    def drop(self) -> None:
        """Forget the one that has arrived."""
        self._arrived = None

    def take_over(self) -> dict[str, Any]:
        """Make the one that has arrived this rank's state; the header that came with it."""
        received, self._arrived = self._arrived, None
        assert received is not None
        self._state.load(received.header, received.runs)
        self.healed, self._failures = True, 0
        self.nbytes, self.seconds = received.nbytes, received.seconds
        return received.header
