"""The example of reinforcement learning runs as its page says, and its two processes end with one policy."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples/rl_loop.py"


def test_the_generator_has_the_policy_s_weights():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*command, str(SCRIPT), "--rounds", "2"],
        env=env,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    lines = run.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["round 0", "round 1"]
    assert lines[2] == "policy and generator choose the same tokens: True", run.stdout
