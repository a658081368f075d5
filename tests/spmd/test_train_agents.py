"""torchrun's agents on two nodes (network namespaces): a worker and a node are killed, and the run goes on.

``benchmarks/faults/agents.py`` has more faults, and three nodes.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_OWN_NETWORK = (
    ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--net"]
)


def _has_namespaces() -> bool:
    if not all(shutil.which(tool) for tool in ("unshare", "nsenter", "ip")):
        return False
    trial = [*_OWN_NETWORK, "ip", "link", "add", "trial", "type", "bridge"]
    return subprocess.run(trial, capture_output=True).returncode == 0


@pytest.mark.timeout(400)
@pytest.mark.skipif(not _has_namespaces(), reason="needs unshare --net with bridges")
def test_a_run_goes_on_when_a_worker_and_then_a_node_die(tmp_path):
    out = tmp_path / "out.json"
    faults = ["--nodes", "2", "--kills", "2", "--kinds", "worker", "node", "--last"]
    faults += ["--steps", "60", "--limit", "150"]
    command = [sys.executable, "-m", "benchmarks.faults.agents", *faults, "--out", str(out)]
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert [fault["fault"] for fault in results["faults"]] == ["worker", "node"]
    assert all(fault["from_step"] >= fault["after_step"] - 6 for fault in results["faults"])
