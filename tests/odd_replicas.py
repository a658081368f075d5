"""Ranks of the replicas' benchmark to which odd things happen; each stands in for its ``run_rank``.

The *quiet* ones have gloo with the manners of NCCL: nothing raises. A collective that failed is seen when it
is looked for, as over NCCL where a connection is seen to be broken, and not at all by the ranks of one
replica, which if they are *deaf* do not hear of it either. The other replicas come late to every average and
say so, for a kill to find them there. So the code for NCCL's silence runs where there is no GPU.
"""

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.faults import replicas as benchmark

from ragged_fsdp.integrations import torchft
from ragged_fsdp.integrations.torchft import groups, replicas, transport
from ragged_fsdp.replicas import HealingError

BLIND = 0
"""The replica that never sees a broken connection."""
_LATE_S = 0.3
_run_rank, _kill, _batch = benchmark.run_rank, benchmark.Job.kill, benchmark.batch


class _Silent(dist._Work):
    """Ends as NCCL's works do for the host: whatever came of it."""

    def __init__(self, work: Any, own: list[torch.Tensor], tensors: list[torch.Tensor], failed: list) -> None:
        super().__init__()
        self._work, self._own, self._tensors, self._failed = work, own, tensors, failed

    def wait(self, timeout: Any = None) -> bool:
        try:
            self._work.wait()
        except RuntimeError:
            self._failed.append(self._work)
            return True
        for tensor, own in zip(self._tensors, self._own):
            tensor.copy_(own)
        return True

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Quiet(groups.Gloo):
    sees = True
    hears = True
    late = Path()
    """Is there while its replica is late."""

    def __init__(self, connect_s: float, timeout_s: float) -> None:
        super().__init__(connect_s, timeout_s)
        self._patience_s, self._failed, self._error = timeout_s, [], None

    def _create_pg(self, *args: Any, **kwargs: Any) -> Any:
        self._failed, self._error = [], None
        return super()._create_pg(*args, **kwargs)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> _Silent:
        if self.sees and tensors[0].ndim == 2:  # the first of an average
            self.late.touch()
            time.sleep(_LATE_S)
            self.late.unlink(missing_ok=True)
        own = [tensor.clone() for tensor in tensors]
        return _Silent(super().allreduce(own, opts), own, tensors, self._failed)

    def abort(self, errored: bool = True) -> None:
        self._error = RuntimeError("aborted")
        super().abort(errored=errored)

    def errored(self) -> Exception | None:
        return self._error

    def settle(self, given_up: Any) -> None:
        if not self._failed:
            return
        until = time.monotonic() + (0.0 if self.sees else 1.5 * self._patience_s)  # an abort takes time too
        while time.monotonic() < until and not (self.hears and given_up()):
            time.sleep(0.05)
        self._failed = []
        self.abort()


def run_quiet_rank(setting: Any, lighthouse: str, replica: int, *more: Any) -> None:
    """One replica does not see that another died, but may be told."""
    replicas.Gloo = _Quiet  # type: ignore[misc]
    _Quiet.sees, _Quiet.late = replica != BLIND, _late(setting, replica)
    _run_rank(setting, lighthouse, replica, *more)


def run_deaf_rank(*arguments: Any) -> None:
    """The same; it is not told."""
    _Quiet.hears = False
    run_quiet_rank(*arguments)


def kill_while_late(job: benchmark.Job, replica: int, choose: random.Random) -> None:
    """The benchmark's, while the replica is late and others may wait for it."""
    late = _late(job.setting, replica)
    while late.exists():  # it may be about to come
        time.sleep(0.001)
    while not late.exists():
        time.sleep(0.001)
    _kill(job, replica, choose)


def _late(setting: Any, replica: int) -> Path:
    return Path(setting.folder) / f"late-{replica}"


def run_slow_rank(setting: Any, lighthouse: str, replica: int, *more: Any) -> None:
    """Replica 0 takes long to its first average."""

    def slow_batch(setting: Any, step: int, replica: int, rank: int) -> torch.Tensor:
        if step == 0:
            time.sleep(1.5 * setting.connect_s)
        return _batch(setting, step, replica, rank)

    if replica == 0:
        benchmark.batch = slow_batch
    _run_rank(setting, lighthouse, replica, *more)


def run_half_rank(setting: Any, lighthouse: str, replica: int, life: int, rank: int) -> None:
    """Of a replica that comes back one rank cannot connect at first, when the other one can copy."""
    connect, failures = groups.ReplicaMembers.configure, [ConnectionError("on purpose")]

    def fail_once(self: Any, *args: Any, **kwargs: Any) -> None:
        if failures:
            raise failures.pop()
        connect(self, *args, **kwargs)

    if life and rank:
        groups.ReplicaMembers.configure = fail_once  # type: ignore[method-assign]
    _run_rank(setting, lighthouse, replica, life, rank)


def run_uncopied_rank(setting: Any, lighthouse: str, replica: int, life: int, rank: int) -> None:
    """Of a replica that comes back one rank can connect, but its first copy breaks off."""
    receive, failures = transport.receive, [ConnectionError("on purpose")]

    def break_off_once(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise HealingError("it did not come") from failures.pop()
        return receive(*args, **kwargs)

    if life and rank:
        transport.receive = break_off_once
    _run_rank(setting, lighthouse, replica, life, rank)


def run_choosy_rank(*arguments: Any) -> None:
    """Of a replica that wants another one beside it."""
    torchft.Replicas = partial(torchft.Replicas, min_replicas=2)  # type: ignore[misc,assignment]
    _run_rank(*arguments)


def run_second_rank(setting: Any, lighthouse: str, replica: int, *more: Any) -> None:
    """Its processes have been a replica before."""
    build = benchmark.build

    def build_after_another(setting: Any, seed: int) -> Any:
        asked = {"token": setting.token, "lighthouse": lighthouse, "host": "127.0.0.1"}
        torchft.Replicas(*build(setting, seed), replica=replica, **asked).close()
        dist.barrier()
        return build(setting, seed)

    benchmark.build = build_after_another
    _run_rank(setting, lighthouse, replica, *more)
