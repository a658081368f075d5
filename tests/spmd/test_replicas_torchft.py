"""The adapter to torchft, with a lighthouse and managers that are really started."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: pip install '.[torchft]'")

import torch
from benchmarks.faults.replicas import Setting, kill_replicas

from ragged_fsdp.integrations import torchft as adapter
from ragged_fsdp.integrations.torchft import _MOST_REPLICAS, Replicas, SplitError
from rank_pool import DEVICE

SETTINGS = {
    "cpu": {"backend": "gloo"},
    # ranks take turns on the device: few collectives in a step, and few steps to compute again
    "cuda": {"backend": "nccl", "layers": 1, "connect_s": 5.0, "pause_s": 0.25, "last_steps": 5},
}


class _Others:
    """A manager under which other replicas are there, each with a past and a model."""

    def __init__(self, pasts: dict[int, int], model: int = 7) -> None:
        self.pasts, self.model, self.error = pasts, model, None

    def allreduce(self, roll: torch.Tensor, reduce_op: object) -> "_Others":
        for replica, past in self.pasts.items():
            roll[replica] += 1
            roll[_MOST_REPLICAS + replica] += past
            roll[-1] += self.model
        return self

    def wait(self) -> None: ...

    def settle(self) -> None: ...

    def errored(self) -> Exception | None:
        return self.error

    def report_error(self, error: Exception) -> None:
        self.error = error

    def is_participating(self) -> bool:
        return True

    def current_step(self) -> int:
        return 5


def _among(others: _Others, replica: int = 1, past: int = 3) -> Replicas:
    ours = object.__new__(Replicas)
    ours.replica, ours._lineage, ours._fingerprint, ours._manager = replica, past, 7, others
    ours._device, ours._group = torch.device("cpu"), others
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
    with pytest.raises(ValueError, match="models, or how they are cut"):
        _among(_Others({0: 3}, model=8))._agree()
    with pytest.raises(ValueError, match="replica 1: two living replicas"):
        _among(_Others({1: 3}))._agree()


@pytest.mark.parametrize("answers", [["SUCCESS", "SUCCESS"], ["SUCCESS", "COMM_ERROR"]])
def test_over_nccl_a_broken_connection_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch, answers: list[str]
) -> None:
    """The device is done at the third look, or never if a peer is gone."""
    left, aborted = list(answers), []
    event = SimpleNamespace(query=lambda: not left)
    backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name=left.pop(0)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(adapter, "backend_of", lambda pg, device: backend)
    adapter._Nccl.settle(SimpleNamespace(_pg="a group", abort=lambda: aborted.append(True)))
    assert bool(aborted) == (answers[-1] != "SUCCESS")


def test_over_nccl_an_aborted_group_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched after the abort waits for no peer, and is waited for."""
    waited = []
    event = SimpleNamespace(query=lambda: False, synchronize=lambda: waited.append(True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(record_event=lambda: event))
    adapter._Nccl.settle(SimpleNamespace(_pg=None))
    assert waited


def test_over_nccl_replicas_meet_within_the_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store of a replica that died is not waited for as long as an average."""
    waits, wanted = [], {"rank": 0, "world_size": 1, "group_world_size": 2, "global_ranks": [3, 5]}

    def meet(self: adapter._Nccl, **given: object) -> None:
        waits.append(self._timeout.total_seconds())
        raise RuntimeError("nobody is there")

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 0))
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "30")
    monkeypatch.setattr(adapter.ProcessGroupNCCL, "configure", meet)
    group = adapter._Nccl(connect_s=2.0, timeout_s=30.0)
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
