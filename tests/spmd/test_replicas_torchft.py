"""The adapter to torchft, with a lighthouse and managers that are really started."""

import random
import re
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: pip install '.[torchft]'")

import torch
from benchmarks.faults import replicas as benchmark
from benchmarks.faults.replicas import Setting, kill_replicas
from torch import nn
from torchft.manager import ExceptionWithTraceback

import odd_replicas
from ragged_fsdp.integrations.torchft import Replicas, SplitError, groups
from ragged_fsdp.integrations.torchft.first import FirstState
from ragged_fsdp.replicas import HealingError, ReplicaGradients
from ragged_fsdp.replicas.copies import MOST_FAILURES, Copies
from ragged_fsdp.replicas.transport import Received
from rank_pool import DEVICE

SETTINGS = {
    "cpu": {"backend": "gloo"},
    # ranks take turns on the device: few collectives in a step, and few steps to compute again
    "cuda": {"backend": "nccl", "layers": 1, "connect_s": 5.0, "pause_s": 0.25, "last_steps": 5},
}


class _Others:
    """A manager under which other replicas are there, each with a past, a model and options."""

    def __init__(self, pasts: dict[int, int], model: int = 7, options: int = 5) -> None:
        self.pasts, self.model, self.options, self.error = pasts, model, options, None
        self.participates = True
        self.members = tuple(pasts)

    def allreduce(self, roll: torch.Tensor, reduce_op: object) -> "_Others":
        for replica, past in self.pasts.items():
            roll[:, replica] += torch.tensor([1, past, self.model, self.options])
        return self

    def wait(self) -> None: ...

    def settle(self, given_up: object) -> None: ...

    def watched(self, given_up: object) -> nullcontext:
        return nullcontext()

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def is_participating(self) -> bool:
        return self.participates

    def current_step(self) -> int:
        return 5

    def num_participants(self) -> int:
        return len(self.pasts)

    def state_dict(self) -> dict[str, int]:
        return {}


def _among(others: _Others, replica: int = 1, past: int = 3) -> Replicas:
    ours = object.__new__(Replicas)
    ours.replica, ours._lineage, ours._model, ours._manager = replica, past, (1, 7), others
    ours._device, ours._group = torch.device("cpu"), others
    ours._gradients = SimpleNamespace(times_laid_out=1)
    silent = dict.fromkeys(("begin", "give_up", "rest"), lambda: None)
    ours._attempts = SimpleNamespace(**silent, given_up=lambda: False)
    ours._patience = ours._wait = timedelta(seconds=1)
    ours._init_sync, ours._least, ours._pauses = False, 1, 0
    ours._state = SimpleNamespace(options_hash=lambda: "5", groups=[{"lr": 0.25}])
    ours._copies, ours._all_ranks = Copies(ours._state), lambda one: one
    return ours


def test_replicas_that_took_different_steps_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert _among(_Others({0: 3, 4: 3}))._agree() == (0, 1, 4)
    with pytest.raises(SplitError, match=r"replica 1: up to step 5 .* than replicas \[0\]"):
        _among(_Others({0: 9}))._agree()  # of equal sides that with the lowest number stays
    stays = _Others({2: 9})
    assert _among(stays)._agree() is None and stays.error is not None  # and averages again without the other
    with pytest.raises(SplitError):
        _among(_Others({2: 9, 3: 9}))._agree()  # the larger side stays


def test_only_the_replica_that_is_not_like_the_others_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was started with another setting, or a number twice, must not end all."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    for other, match in (
        ({"model": 8}, r"replica 1: its model, .* of replicas \[0\] on rank 0"),
        ({"options": 6}, r"in step 5 its optimizer has other options than replicas \[0\], here lr \[0.25\]"),
    ):
        with pytest.raises(ValueError, match=match):
            _among(_Others({0: 3}, **other))._agree()
        stays = _Others({2: 3}, **other)
        assert _among(stays)._agree() is None and stays.error is not None
    with pytest.raises(ValueError, match="replica 1: two living replicas"):
        _among(_Others({1: 3}))._agree()
    for twice in (0, 2):  # by two others
        stays = _Others({twice: 3})
        stays.allreduce = lambda roll, reduce_op, stays=stays: (
            [_Others.allreduce(stays, roll, None)] and (_Others.allreduce(stays, roll, None))
        )
        assert _among(stays)._agree() is None and stays.error is not None


def test_nothing_holds_a_group_that_has_failed_when_ranks_wait_for_each_other() -> None:
    """gloo closes its connections then, and not before: a peer that waits for this rank would not notice."""
    held, seen = [], []

    class Work:
        def wait(self) -> None:
            try:
                raise ConnectionError("closed by peer")
            except ConnectionError as error:
                manager.error = ExceptionWithTraceback(error)

    def launch(tensor: torch.Tensor, reduce_op: object = None) -> Work:
        work = Work()
        held.append(weakref.ref(work))
        return work

    manager = _Others({})
    ours = _among(manager)
    ours._gradients.collect = lambda: (torch.zeros(1), [torch.zeros(2)])
    manager.wait_quorum = lambda: None
    manager.abort = lambda: None
    manager.should_commit = lambda timeout: seen.append([timeout, *(ref() for ref in held)])
    for first_succeeds in (False, True):
        manager.error = None
        held.clear()
        manager.allreduce = launch
        if first_succeeds:  # the roll comes through, and the gradients do not
            ours._agree = lambda: (1,)
        assert ours._attempt() is None
    assert seen == [[ours._patience, None], [ours._patience, None, None]]


@pytest.mark.parametrize("others", [{0: 3, 2: 3}, {}])
def test_gradients_of_another_state_are_in_no_mean(others: dict[int, int]) -> None:
    """A replica copies its state, a third one dies, and the step is averaged again: now it is like the others
    but for its gradients, which are of the weights it came with. Where the giver died too nobody has any."""
    model = nn.Linear(2, 1)
    manager = _Others(others)
    ours = _among(manager)
    ours._gradients = ReplicaGradients(model)
    ours._gradients.times_laid_out, ours._model = 0, (1, 7)
    ours._state.load = lambda header, runs: None
    manager.wait_quorum = manager.abort = manager.start_quorum = lambda: None
    steps = iter([False, True])

    def allreduce(tensor: torch.Tensor, reduce_op: object) -> _Others:
        assert not tensor.any()  # of this replica nothing
        if tensor.ndim == 2:
            return _Others.allreduce(manager, tensor, reduce_op)
        tensor += len(others) * (1 if tensor.dtype == torch.int64 else 3)
        return manager

    def should_commit(timeout: timedelta) -> bool:
        if not manager.participates:  # as torchft does, whatever becomes of the attempt
            ours._copies.keep(Received({"lineage": 3}, [], 0, 0.0))
        manager.participates = True
        return next(steps)

    manager.allreduce, manager.should_commit = allreduce, should_commit
    manager.participates, ours._begun, ours._tell = False, True, lambda waited_s: None
    model(torch.ones(1, 2)).sum().backward()
    averaged = ours.average()
    assert averaged.attempts == 2 and averaged.replicas == tuple(others)
    for param in model.parameters():
        assert param.grad is None if not others else torch.equal(param.grad, torch.full_like(param, 3.0))


def test_what_a_peer_needs_and_cannot_have_is_its_error_alone() -> None:
    """The giver goes on; the one that asks is told why."""
    ours = _among(_Others({}))
    ours._ready, ours._state.offer = None, lambda ready: {}["missing"]
    assert ours._offer() == "KeyError: 'missing'"


class _Aborts(groups.Nccl):
    """A group that was never made, and notes that it is aborted."""

    def __init__(self, aborted: list[bool]) -> None:
        self._pg, self._aborted = "a group", aborted

    def abort(self, errored: bool = True) -> None:
        self._pg = None
        self._aborted.append(True)


@pytest.mark.parametrize("answers", [["SUCCESS", "SUCCESS"], ["SUCCESS", "COMM_ERROR"]])
def test_over_nccl_a_broken_connection_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, answers: list[str]
) -> None:
    """The device is done at the third look, or never if a peer is gone."""
    left, aborted = list(answers), []
    event = SimpleNamespace(query=lambda: not left)
    backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name=left.pop(0)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(groups, "backend_of", lambda pg, device: backend)
    _Aborts(aborted).settle(lambda: False)
    assert bool(aborted) == (answers[-1] != "SUCCESS")


def test_over_nccl_the_wait_ends_when_others_gave_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL says that all is well."""
    aborted: list[bool] = []
    event = SimpleNamespace(query=lambda: bool(aborted))
    backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name="SUCCESS"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(groups, "backend_of", lambda pg, device: backend)
    _Aborts(aborted).settle(lambda: True)
    assert aborted


@pytest.mark.parametrize("why", ["the connection to a peer is broken", "another rank gave it up", ""])
def test_over_nccl_a_call_that_waits_on_the_host_ends_too(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """NCCL may connect, or launch, and wait for a peer there, where nobody looks at the device."""
    aborted: list[bool] = []
    answer = SimpleNamespace(name="COMM_ERROR" if "broken" in why else "SUCCESS")
    monkeypatch.setattr(groups, "backend_of", lambda *_: SimpleNamespace(get_error=lambda: answer))
    monkeypatch.setattr(groups, "_LOOK_S", 0.02)
    group, until = _Aborts(aborted), time.monotonic() + 0.5
    with group.watched(lambda: "gave" in why):
        while not aborted and time.monotonic() < until:
            time.sleep(0.01)
    assert bool(aborted) == bool(why) and (not why or str(group._errored) == why)
    time.sleep(0.1)
    assert len(aborted) <= 1, "nobody looks any more"


def test_first_weights_are_not_waited_for_without_end() -> None:
    """``init_sync`` may be off there, or the host of the store stand still; the third time is the last."""
    copies, quiet = Copies(SimpleNamespace()), SimpleNamespace(given_up=lambda: False)
    for attempt, check in enumerate([lambda _: False, lambda _: time.sleep(30), lambda _: False]):
        group = SimpleNamespace(members=(0, 1), store=SimpleNamespace(check=check))
        first = FirstState(1, group, SimpleNamespace(), quiet, copies, timeout_s=0.1)
        with pytest.raises(HealingError, match=r"replica 0 gave no first state within 0.1 s; is init_sync"):
            first.exchange(lambda: "", {})
        if attempt < MOST_FAILURES - 1:
            copies.raise_if_hopeless()
    with pytest.raises(HealingError):
        copies.raise_if_hopeless()


def test_over_nccl_an_aborted_group_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched after the abort waits for no peer, and is waited for."""
    waited = []
    event = SimpleNamespace(query=lambda: False, synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))
    group = _Aborts([])
    group._pg = None
    group.settle(lambda: False)
    assert waited


def test_over_nccl_replicas_meet_within_the_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a replica that died is not waited for as long as an average."""
    waits, wanted = [], {"rank": 0, "world_size": 1, "group_world_size": 2, "global_ranks": [3, 5]}

    def meet(self: groups.Nccl, **given: object) -> None:
        waits.append(self._timeout.total_seconds())
        raise RuntimeError("nobody is there")

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 0))
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "30")
    monkeypatch.setattr(groups.ProcessGroupNCCL, "configure", meet)
    group = groups.Nccl(connect_s=2.0, timeout_s=30.0)
    with pytest.raises(RuntimeError, match="nobody"):
        group.configure("store", "replica", **wanted)
    assert waits == [2.0] and group._timeout.total_seconds() == 30.0 and group.members == (1, 2)


@pytest.mark.timeout(300)
def test_a_killed_replica_costs_no_step_and_comes_back(tmp_path: Path) -> None:
    """2x2; `kill_replicas` compares losses and state with a run of the same schedule without a kill."""
    result = kill_replicas(Setting(str(tmp_path), replicas=2, **SETTINGS[DEVICE]), kills=1, seed=0)
    assert result["rejoins"] == 1 and result["steps_lost"] == 0
    changes = [
        line
        for path in tmp_path.glob("log-*-0")
        for line in path.read_text().splitlines()
        if "change" in line
    ]
    assert any('"left": [' in line and '"left": []' not in line for line in changes)
    assert any('"copied_bytes": 0' not in line for line in changes)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("run_rank", [odd_replicas.run_half_rank, odd_replicas.run_uncopied_rank])
def test_a_replica_of_which_one_rank_has_copied_is_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_rank: Callable[..., None]
) -> None:
    """Its other rank would contribute, and give away, the weights that it started with."""
    monkeypatch.setattr(benchmark, "run_rank", run_rank)
    result = kill_replicas(Setting(str(tmp_path), replicas=3, **SETTINGS[DEVICE]), kills=1, seed=0)
    assert result["rejoins"] == 1 and result["contributions_lost_by_survivors"] == 0


@pytest.mark.timeout(300)
def test_replicas_that_start_together_take_the_weights_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a replica those of the same one, however long it takes to its first average."""
    monkeypatch.setattr(benchmark, "run_rank", odd_replicas.run_slow_rank)
    setting = Setting(str(tmp_path), replicas=2, least=2, **SETTINGS[DEVICE])
    with benchmark.job_of(setting) as job:
        benchmark.disturbed(job, 0, random.Random(0))
    schedule, _ = benchmark.schedule_of(job)
    assert schedule[:2] == [[0], [0, 1]]  # the weights of that with the lowest number
    benchmark.compare_with_quiet_run(job)


@pytest.mark.skipif(DEVICE == "cuda", reason="it stands for NCCL where there is none")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("run_rank", [odd_replicas.run_quiet_rank, odd_replicas.run_deaf_rank])
def test_a_replica_that_does_not_see_that_a_peer_died_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_rank: Callable[..., None]
) -> None:
    """It is told by another, or waits for an average's time-out; the others in the meantime wait for it."""
    monkeypatch.setattr(benchmark, "run_rank", run_rank)
    monkeypatch.setattr(benchmark.Job, "kill", odd_replicas.kill_while_late)
    setting = Setting(str(tmp_path), replicas=3, layers=1, timeout_s=4.0)
    result = kill_replicas(setting, kills=1, seed=0)
    assert result["kills"][0]["replica"] != odd_replicas.BLIND and result["steps_lost"] == 0
    assert (result["longest_pause_s"] < 3.5) == (run_rank is odd_replicas.run_quiet_rank)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "least, says",
    [
        (1, r"expected at least 2 replicas \(min_replicas\) at this step, got 1; there are \[0\], for 0:"),
        (2, r"the lighthouse named no members within 0:00:06 \(wait_s\). Fewer replicas ask"),
    ],
    ids=["ours", "the lighthouse's"],
)
def test_too_few_replicas_are_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, says: str
) -> None:
    """Whether it is this replica that wants more of them or the lighthouse; all ranks end."""
    monkeypatch.setattr(benchmark, "run_rank", odd_replicas.run_choosy_rank)
    setting = Setting(str(tmp_path), replicas=1, least=least, **{**SETTINGS[DEVICE], "timeout_s": 2.0})
    with benchmark.job_of(setting) as job:
        job.start(0)
        deadline = time.monotonic() + 60
        while any(process.exitcode is None for process in job.processes[0]):
            assert time.monotonic() < deadline, "it waits for ever"
            time.sleep(0.1)
        for rank in range(benchmark.RANKS):
            assert re.search(rf"TimeoutError: replica 0, step 0: {says}", job.said(0, rank)), job.said(
                0, rank
            )


@pytest.mark.timeout(300)
def test_processes_can_be_a_replica_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first life left in a store would be taken for the second's: its manager's address, say."""
    monkeypatch.setattr(benchmark, "run_rank", odd_replicas.run_second_rank)
    with benchmark.job_of(Setting(str(tmp_path), replicas=1, **SETTINGS[DEVICE])) as job:
        benchmark.disturbed(job, 0, random.Random(0))


@pytest.mark.timeout(300)
def test_a_lighthouse_that_comes_back_ends_nobody(tmp_path: Path) -> None:
    """Who asks while it is away asks again."""
    setting, port = Setting(str(tmp_path), replicas=2, **SETTINGS[DEVICE]), benchmark.free_port()
    job = benchmark.Job(setting, f"http://127.0.0.1:{port}")
    try:
        with benchmark.lighthouse(setting, port):
            job.start_all(90.0)
        time.sleep(2.0)
        taken = [len(job.steps(replica)) for replica in range(2)]
        with benchmark.lighthouse(setting, port):
            benchmark.finish(job, 90.0)
        assert all(len(job.steps(replica)) > before for replica, before in enumerate(taken))
    finally:
        for replica in range(2):
            job.end(replica)
