"""Importing the package changes nothing for tensors that are not ours: a program asks before and after."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "ragged_stock.py"


def test_tensors_that_are_not_ours_behave_as_before():
    result = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr
    *differences, summary = result.stdout.strip().splitlines()
    assert not differences, "\n".join(differences)
    assert int(summary.split()[0]) > 40, summary
