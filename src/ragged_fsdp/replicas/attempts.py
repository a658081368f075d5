"""What ranks tell each other of an attempt to average, beside its collectives: in stores.

A store has a host, which may die or stand still, and with it who asks it. So nobody waits for one here but
threads that have nothing else to do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

__all__ = ["ASK_S", "Attempts", "Told", "replica_store", "tell"]

ASK_S = 0.05
_GIVEN_UP = "given up"


def replica_store(host: str, timeout_s: float) -> Any:
    """A store of this replica alone, kept by its first rank, which others reach under the name ``host``.

    Not that of the launcher: its address may be one that only this machine understands (``127.0.0.1``), and
    it may hold what an earlier life of this replica left there, or another one in the same processes.
    """
    timeout, place = timedelta(seconds=timeout_s), [("", 0)]
    store = None
    if dist.get_rank() == 0:
        try:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            place = [(host, store.port)]
        except RuntimeError as error:
            place = [(str(error), 0)]
    dist.broadcast_object_list(place)
    ((name, port),) = place
    if not port:
        raise ValueError(f"host: expected a name under which others reach this rank, got {host!r}: {name}")
    return store or dist.TCPStore(name, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _beside(call: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=call, args=args, name="replica store", daemon=True).start()


def tell(store: Any, key: str, value: str = "") -> None:
    """Say ``value`` under ``key`` of a store, if it is still there."""

    def say() -> None:
        with suppress(dist.DistError):  # it may be a store of the replica that died
            store.set(key, value)

    _beside(say)


class Told:
    """What somebody says under a key of a store, as far as it was heard since this was made."""

    def __init__(self, store: Any, key: str) -> None:
        self.value: bytes | None = None
        """None until it was heard."""
        self.gone = False
        """Whether the store is, with the replica that kept it."""
        self._asks = True
        _beside(self._ask, store, key)

    def rest(self) -> None:
        """Ask no more."""
        self._asks = False

    def _ask(self, store: Any, key: str) -> None:
        try:
            while self._asks and self.value is None:
                if store.check([key]):
                    self.value = store.get(key)
                time.sleep(ASK_S)
        except dist.DistError:
            self.gone = True


class _Meets(Protocol):
    """A process group between replicas."""

    store: Any
    """Where they met; None where they did not."""


class Attempts:
    """The attempts to average, counted alike by all ranks of this replica, and whether one is given up.

    Who gives up tells the other ranks of this replica, in ``store``, and the same rank of the others, where
    ``group`` met: over NCCL one may see that a peer is gone and another not, for as long as an average may
    take.
    """

    def __init__(self, store: Any, group: _Meets) -> None:
        self._store, self._group = store, group
        self._number = 0
        self._told: list[Told] = []
        """By those of this replica, and of the others; empty while nobody wants to know."""
        self._asking = threading.Lock()
        """Several threads may want to know."""

    def begin(self) -> None:
        """The next one begins."""
        self._number += 1
        self.rest()

    def give_up(self) -> None:
        """Tell the others that this one failed: they need not wait for it."""
        tell(self._store, self._own_key)
        if self._group.store is not None:
            tell(self._group.store, _GIVEN_UP)

    def given_up(self) -> bool:
        """Whether anyone has given it up, as far as was heard since the first call; it does not wait."""
        with self._asking:
            if not self._told:
                self._told = [Told(self._store, self._own_key)]
                if self._group.store is not None:
                    self._told.append(Told(self._group.store, _GIVEN_UP))
            return any(told.gone or told.value is not None for told in self._told)

    def rest(self) -> None:
        """Ask no more."""
        with self._asking:
            for told in self._told:
                told.rest()
            self._told = []

    @property
    def _own_key(self) -> str:
        return f"{_GIVEN_UP} {self._number}"
