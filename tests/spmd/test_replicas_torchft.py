"""The adapter to torchft, with a lighthouse and managers that are really started."""

from pathlib import Path

import pytest

pytest.importorskip("torchft", reason="torchft is not installed: pip install '.[torchft]'")

from benchmarks.faults.replicas import Setting, kill_replicas


@pytest.mark.timeout(300)
def test_a_killed_replica_costs_no_step_and_comes_back(tmp_path: Path) -> None:
    """2x2; `kill_replicas` compares losses and state with a run of the same schedule without a kill."""
    result = kill_replicas(Setting(str(tmp_path), replicas=2), kills=1, seed=0)
    assert result["rejoins"] == 1 and result["steps_lost"] == 0
    changes = [
        line
        for path in tmp_path.glob("log-*-0")
        for line in path.read_text().splitlines()
        if "change" in line
    ]
    assert any('"left": [' in line and '"left": []' not in line for line in changes)
    assert any('"copied_bytes": 0' not in line for line in changes)
