"""Two source trees that take turns, each in a process that has its own package: ratios and failures."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.step import trees  # noqa: E402
from benchmarks.step.case import Case  # noqa: E402

_PLAYER = """
import sys
from multiprocessing.connection import Connection
from types import SimpleNamespace

import ragged_fsdp

MS = getattr(ragged_fsdp, "MS", 1.0)  # of the tree that this process was given


def prepare(case, name):
    if MS is None:
        raise RuntimeError("cannot be built")
    return SimpleNamespace(wire=SimpleNamespace(network=None), turns=0)


def timed(case, run):
    free = run.wire.network.free
    assert len(case.wires) == 1 and (case.wires[0] is None) == free
    run.turns += 1
    ms = MS * (1 if free else 2)
    times = {"forward_backward_ms": ms, "step_ms": ms, "host_ms": ms, "forward_backward_all_ms": [ms]}
    loss = 2.0 if free else MS
    return {**times, "peak_allocated_gib": MS, "peak_reserved_gib": max(1.0, 4.0 - run.turns), "loss": loss}


sys.modules["benchmarks.step.measure"] = SimpleNamespace(prepare=prepare, timed=timed)
from benchmarks.step.trees import play

play(Connection(int(sys.argv[1])))
"""
_CASE = Case("small-dense", 4, 128, 64, (None, 400.0))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Makes a source tree whose steps take so many milliseconds, for processes that measure a stand-in."""
    player = tmp_path / "player.py"
    player.write_text(_PLAYER)
    monkeypatch.setattr(trees, "_PLAYER", [sys.executable, str(player)])

    def make(name: str, ms: float | None) -> Path:
        package = tmp_path / name / "ragged_fsdp"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"MS = {ms}\n")
        return package.parent

    return make


def test_both_trees_are_timed_in_every_round(tree):
    said = []
    folders = {"old": tree("old", 2.0), "new": tree("new", 3.0)}
    result = trees.compare_trees(_CASE, "ours", folders, said.append, rounds=3, limit_s=60)
    rows = {(row["tree"], row["wire"]): row for row in result["rows"]}
    assert list(rows) == [(label, wire) for label in folders for wire in _CASE.wires]
    assert rows["old", None]["step_ms_by_round"] == [2.0] * 3 and rows["new", 400.0]["step_ms"] == 6.0
    assert rows["old", None]["peak_reserved_gib"] == 3.0, "the first turn, which needed most, counts"
    assert said[-1] == "small-dense, ours: round 3 of 3 is over"
    head, free, slow = trees.ratios(result, new="new", old="old")
    assert len(head) == len(free) == len(slow) and (free[1], slow[1]) == ("free", "400")
    assert free[3] == "1.5000" and slow[4] == "1.500 to 1.500" and free[9] == "1.5000"
    assert free[-1] == "same" and slow[-1] == "3, was 2"


def test_a_tree_that_fails_is_named(tree):
    said = []
    folders = {"old": tree("old", 2.0), "new": tree("new", None)}
    result = trees.compare_trees(_CASE, "ours", folders, said.append, rounds=3, limit_s=60)
    (row,) = result["rows"]
    assert row["tree"] == "new" and "cannot be built" in row["error"] and said[0].startswith("new: failed")
    assert len(trees.ratios(result, new="new", old="old")) == 1


def test_another_package_than_the_trees_is_refused(tree, tmp_path):
    """An installed package must not stand in for a folder that has none."""
    (tmp_path / "empty").mkdir()
    folders = {"old": tmp_path / "empty", "new": tree("new", 3.0)}
    result = trees.compare_trees(_CASE, "ours", folders, [].append, rounds=1, limit_s=60)
    (row,) = result["rows"]
    assert row["tree"] == "old" and "expected ragged_fsdp from" in row["error"]
