"""A rank that stays away from a gather over NCCL: the other says where it waits, and both leave records."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

from rank_pool import _free_port

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_SCRIPT = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from ragged_fsdp import fully_shard
from ragged_fsdp.fsdp.watch import keep_records
from ragged_fsdp.trainer.ranks import recorder_variables

run = Path(sys.argv[1])
(run / "hangs").mkdir(parents=True, exist_ok=True)
os.environ.update(recorder_variables(os.environ, str(run)))
keep_records(run / "hangs" / "start")
rank = int(os.environ["RANK"])
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=rank, world_size=2, timeout=timedelta(seconds=6))
model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
for layer in model:
    fully_shard(layer)
fully_shard(model)
x = torch.ones(4, 64, device="cuda")
model(x).sum().backward()
torch.cuda.synchronize()
if rank == 1:
    time.sleep(300)
model(x).sum().backward()
torch.cuda.synchronize()
"""


def test_the_waiting_rank_names_the_collective_and_both_leave_their_records(tmp_path):
    """torch's watchdog then ends the process; its flight recorder has written beside our records by then.

    From the start of the two to their end it takes 6 s of the timeout, 10 s for dumps, and their imports.
    """
    script = tmp_path / "stays_away.py"
    script.write_text(_SCRIPT)
    port = str(_free_port())
    ranks = []
    for rank in range(2):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        env["NCCL_HOSTID"] = f"rank{rank}"
        with open(tmp_path / f"rank{rank}.txt", "w") as log:
            command = [sys.executable, script, tmp_path / "run"]
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
    try:
        assert ranks[0].wait(timeout=60) != 0
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = (tmp_path / "rank0.txt").read_text()
    assert "rank 0: all-gather of group '0' (rank 0 of 2 of process group" in said, said[-3000:]
    assert "launched 3 s ago" in said or "launched 4 s ago" in said
    assert "gives up after 6 s" in said
    assert "all-gather of group '0': did not arrive: rank 1" in said
    hangs = tmp_path / "run" / "hangs"
    waits = [json.loads((hangs / f"start/rank-0000{rank}.json").read_text()) for rank in range(2)]
    assert waits[0] != waits[1]
    for rank in range(2):  # rank 1 is asleep, but not its watchdog
        with (hangs / f"nccl-rank-{rank}").open("rb") as file:
            entries = pickle.load(file)["entries"]
        assert any("all_gather" in entry["profiling_name"] for entry in entries)
        assert all(entry["state"] == "completed" for entry in entries) == (rank == 1)
