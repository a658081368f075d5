"""Implementations that take turns: every round asks each, and one that fails does not stop the others."""

import multiprocessing
import sys
from types import SimpleNamespace

import pytest
from benchmarks.step import turns
from benchmarks.step.case import Case


def _prepare(case: Case, name: str) -> SimpleNamespace:
    if name == "fsdp2":
        raise RuntimeError("cannot be built")
    return SimpleNamespace(ms={"none": 1.0, "ours": 2.0}[name])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that measure a stand-in: the real one needs a device."""
    measure = SimpleNamespace(
        prepare=_prepare, timed=lambda case, run: {"host_ms": 9.0}, host_ms=lambda run: run.ms
    )
    monkeypatch.setitem(sys.modules, "benchmarks.step.measure", measure)
    graphs = SimpleNamespace(replayed=lambda case, run: {"graph_host_ms": run.ms / 10})
    monkeypatch.setitem(sys.modules, "benchmarks.step.graphs", graphs)
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(fork, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(turns.mp, "get_context", lambda method: fork)


@pytest.mark.usefixtures("measured")
def test_turns_and_failures() -> None:
    case, said = Case("small-dense", 4, 128, 64), []
    result = turns.take_turns(case, ["none", "fsdp2", "ours"], said.append, rounds=3, graphs=True, limit_s=30)
    none, fsdp2, ours = result["rows"]
    assert none["host_all_ms"] == [1.0] * 15 and ours["host_all_ms"] == [2.0] * 15
    assert ours["host_ms"] == 2.0 and ours["host_ms_per_layer"] == 0.5 and ours["graph_host_ms"] == 0.2
    assert "cannot be built" in fsdp2["error"] and "host_ms" not in fsdp2
    assert said[0] == "none: ready" and said[1].startswith("fsdp2: failed")
