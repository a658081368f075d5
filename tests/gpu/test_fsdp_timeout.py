"""A rank that stays away from a gather over NCCL: the other says where it waits."""

import os
import subprocess
import sys
import time

import pytest
import torch

from rank_pool import _free_port

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
from ragged_fsdp import fully_shard

rank = int(os.environ["RANK"])
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=rank, world_size=2, timeout=timedelta(seconds=8))
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


def test_the_waiting_rank_names_the_collective(tmp_path):
    """What follows is NCCL's: it writes its own dump and ends the process."""
    script = tmp_path / "stays_away.py"
    script.write_text(_SCRIPT)
    port = str(_free_port())
    ranks = []
    for rank in range(2):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        env["NCCL_HOSTID"] = f"rank{rank}"
        with open(tmp_path / f"rank{rank}.txt", "w") as log:
            ranks.append(subprocess.Popen([sys.executable, script], env=env, stdout=log, stderr=log))
    said, deadline = "", time.monotonic() + 90
    while "gives up after 8 s" not in said and time.monotonic() < deadline:
        time.sleep(0.5)
        said = (tmp_path / "rank0.txt").read_text()
    for process in ranks:
        process.kill()
        process.wait()
    assert "rank 0: all-gather of group '0' (rank 0 of 2 of process group" in said, said[-3000:]
    assert "launched 4 s ago" in said or "launched 5 s ago" in said
