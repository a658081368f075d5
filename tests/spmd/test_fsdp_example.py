"""The ported script: one line differs from stock FSDP2's, the losses do not."""

import difflib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
STOCK, PORTED = EXAMPLES / "charlm_fsdp2.py", EXAMPLES / "charlm_ragged.py"


def _losses(script, *arguments, ranks=2):
    """Run the script under torchrun; the losses it prints, by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*command, str(script), *arguments], env=env, capture_output=True, text=True, timeout=170, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)  loss (\S+)", run.stdout)}


def test_one_line_differs():
    changes = [
        line
        for line in difflib.ndiff(STOCK.read_text().splitlines(), PORTED.read_text().splitlines())
        if line[0] in "+-"
    ]
    assert changes == [
        "- from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard",
        "+ from ragged_fsdp import MixedPrecisionPolicy, fully_shard",
    ]


def test_the_ported_script_trains_alike_and_takes_over_a_stock_checkpoint(tmp_path):
    """Stock runs two steps and saves, the port goes on from there: together the losses of the port alone."""
    checkpoint = str(tmp_path / "stock")
    with ThreadPoolExecutor(1) as beside:
        straight = beside.submit(_losses, PORTED, "--steps", "4")
        first = _losses(STOCK, "--steps", "2", "--checkpoint", checkpoint)
        ported = _losses(PORTED, "--steps", "4", "--checkpoint", checkpoint)
    assert list(straight.result()) == [1, 2, 3, 4]
    assert {**first, **ported} == straight.result()
