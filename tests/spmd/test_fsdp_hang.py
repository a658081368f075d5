"""A rank that stays away from a gather: the other names it and where it waits, both leave records, it ends.

Over gloo the collective raises when its time is over. Over NCCL nothing does: torch's watchdog ends the
process, once its flight recorder has written beside our records.
"""

import json
import os
import pickle
import re
import subprocess
import sys

import pytest

from rank_pool import DEVICE, _free_port

TIMEOUT_S = 6
_SCRIPT = f"""
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from ragged_fsdp import fully_shard
from ragged_fsdp.watch import keep_records
from ragged_fsdp.trainer.ranks import recorder_variables

run, device, rank = Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
(run / "hangs").mkdir(parents=True, exist_ok=True)
os.environ.update(recorder_variables(os.environ, str(run)))
keep_records(run / "hangs" / "start")
(run / f"imported-{{rank}}").touch()
while len(list(run.glob("imported-*"))) < 2:  # one may import longer than a collective may take
    time.sleep(0.01)
if device == "cuda":
    torch.cuda.set_device(0)
backend = "nccl" if device == "cuda" else "gloo"
dist.init_process_group(backend, rank=rank, world_size=2, timeout=timedelta(seconds={TIMEOUT_S}))
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
for layer in model:
    fully_shard(layer)
fully_shard(model)
x = torch.ones(4, 64, device=device)
model(x).sum().backward()
torch.accelerator.synchronize() if device == "cuda" else None
if rank == 1:
    time.sleep(300)
model(x).sum().backward()
torch.accelerator.synchronize() if device == "cuda" else None
"""


@pytest.mark.timeout(150)
def test_the_waiting_rank_names_the_collective_and_both_leave_their_records(tmp_path):
    """Over NCCL it takes the time-out, 10 s for dumps, and the imports of the two."""
    script = tmp_path / "stays_away.py"
    script.write_text(_SCRIPT)
    port = str(_free_port())
    ranks = []
    for rank in range(2):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        env["NCCL_HOSTID"] = f"rank{rank}"
        with open(tmp_path / f"rank{rank}.txt", "w") as log:
            command = [sys.executable, script, tmp_path / "run", DEVICE]
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        assert ranks[0].wait(timeout=120) != 0
        # who started them ends it
        assert ranks[1].poll() is None, (tmp_path / "rank1.txt").read_text()[-3000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = (tmp_path / "rank0.txt").read_text()
    assert "rank 0: all-gather of group '0' (rank 0 of 2 of process group" in said, said[-3000:]
    assert re.search(r"launched [345] s ago", said), said[-3000:]
    assert f"gives up after {TIMEOUT_S} s" in said
    assert "all-gather of group '0': did not arrive: rank 1" in said
    hangs = tmp_path / "run" / "hangs"
    waits = [json.loads((hangs / f"start/rank-0000{rank}.json").read_text())["waits_in"] for rank in range(2)]
    assert waits[0]["phase"] == "all-gather" and waits[0]["group"] == "0" and waits[1] is None
    if DEVICE == "cuda":
        _check_flight_recorder(hangs)


def _check_flight_recorder(hangs):
    for rank in range(2):  # rank 1 is asleep, but not its watchdog
        with (hangs / f"nccl-rank-{rank}").open("rb") as file:
            entries = pickle.load(file)["entries"]
        assert any("all_gather" in entry["profiling_name"] for entry in entries)
        assert all(entry["state"] == "completed" for entry in entries) == (rank == 1)
