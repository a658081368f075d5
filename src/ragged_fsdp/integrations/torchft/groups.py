"""torchft's process groups between replicas, which know who they are made of and when to wait no more."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from ragged_fsdp.replicas.attempts import ASK_S
from ragged_fsdp.torch_internals import backend_of

__all__ = ["Gloo", "Nccl", "ReplicaMembers"]

_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "50"}
"""For groups between replicas: torch's watchdog would end this process when a peer's connection breaks, and
sleep four times the second before, while the next group waits for it to go."""
_POLL_S = 0.0005
_LOOK_S = 0.2  # by then nearly every average is over


class ReplicaMembers:
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


class Gloo(ReplicaMembers, ProcessGroupGloo):
    """Over gloo. Connecting must fail soon, for a replica may die while it does; averaging may wait."""

    def __init__(self, connect_s: float, timeout_s: float) -> None:
        super().__init__(timeout=timedelta(seconds=connect_s))
        self._average_timeout = timedelta(seconds=timeout_s)

    def _opts_hook(self, opts: Any) -> Any:
        opts.timeout = self._average_timeout
        return opts

    def settle(self, given_up: Callable[[], bool]) -> None:
        """Nothing: a collective that failed has raised."""

    @contextmanager
    def watched(self, given_up: Callable[[], bool]) -> Iterator[None]:
        """Nothing: a connection that breaks ends whatever waits for it."""
        yield


class Nccl(ReplicaMembers, ProcessGroupNCCL):
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
        ask_at = time.monotonic() + ASK_S
        while not done.query():
            if self._pg is None:  # torchft aborts it too, on a thread, when the time is over
                done.synchronize()  # nothing before it waits for a peer any more
                return
            if self._end_if_hopeless(given_up if time.monotonic() > ask_at else lambda: False):
                return
            time.sleep(_POLL_S)

    @contextmanager
    def watched(self, given_up: Callable[[], bool]) -> Iterator[None]:
        """While it is entered, a call that waits for a peer on the host comes to an end in the same way.

        NCCL connects there where it must, and launches there; who waits in such a call cannot look.
        """
        over = threading.Event()
        look = threading.Thread(target=self._look, args=(over, given_up), name="replica watch", daemon=True)
        look.start()
        try:
            yield
        finally:
            over.set()

    def _look(self, over: threading.Event, given_up: Callable[[], bool]) -> None:
        wait_s = _LOOK_S
        while not over.wait(wait_s) and not self._end_if_hopeless(given_up):
            wait_s = ASK_S

    def _end_if_hopeless(self, given_up: Callable[[], bool]) -> bool:
        """Abort the group if it can come to nothing, and say why; whether that is so."""
        group, why = self._pg, None
        if group is None:
            return True
        if backend_of(group, torch.device("cuda")).get_error().name != "SUCCESS":
            why = "the connection to a peer is broken"
        elif given_up():
            why = "another rank gave it up"
        if why is not None:
            self.abort()
            self._errored = RuntimeError(why)  # for the log; torchft's own says that it was aborted
        return why is not None
