"""Replicas that may die: each is a job of its own, torchft knows which of them live.

    torchft_lighthouse --min_replicas 1 --heartbeat_timeout_ms 1000 --quorum_tick_ms 50 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510 RAGGED_FSDP_REPLICA_TOKEN=$(openssl rand -hex 16)
    REPLICA=0 torchrun --nproc-per-node 2 --master-port 29601 --max-restarts 0 examples/replicas_torchft.py &
    REPLICA=1 torchrun --nproc-per-node 2 --master-port 29602 --max-restarts 0 examples/replicas_torchft.py

Kill one of them and start it again: the other goes on, and the one that is back begins where the other is.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

from ragged_fsdp import fully_shard
from ragged_fsdp.integrations.torchft import Replicas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    replica = int(os.environ["REPLICA"])
    dist.init_process_group()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    extra = {"scheduler": (scheduler.state_dict, scheduler.load_state_dict)}
    replicas = Replicas(model, optimizer, replica=replica, extra=extra)
    device = next(model.parameters()).device
    while replicas.step < given.steps:
        replicas.begin()
        seed = (replicas.step * 64 + replica) * 64 + dist.get_rank()  # what to read depends on nothing else
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(device)
        loss = (model(rows) - rows.roll(1, 1)).square().mean()
        loss.backward()
        averaged = replicas.average()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if dist.get_rank() == 0 and averaged.step % 10 == 0:
            print(f"step {averaged.step}  loss {loss.item():.4f}  replicas {averaged.replicas}", flush=True)
    replicas.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
