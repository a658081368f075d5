"""What ``make package`` runs in a clean environment: the wheel has all it needs, outside of a checkout."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

import ragged_fsdp

CHECKOUT = Path(__file__).parents[1]


def main() -> None:
    """Shard, step, train with the command line, draw a report."""
    home = Path(ragged_fsdp.__file__)
    assert CHECKOUT / "src" not in home.parents, home
    assert version("ragged-fsdp") == ragged_fsdp.__version__ and (home.parent / "py.typed").exists()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    model = ragged_fsdp.fully_shard(torch.nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    ragged_fsdp.optim.AdamW8bit(model.parameters()).step()
    print(ragged_fsdp.describe(model))
    torch.distributed.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    command = str(Path(sys.executable).with_name("ragged-fsdp"))
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        flags = ["--model", "nano", "--steps", "2", "--warmup", "1", "--processes", "2", "--device", "cpu"]
        flags += ["--data", __file__, "--seq-len", "16", "--batch", "2", "--eval-sequences", "1"]
        subprocess.run([command, "train", "--run-dir", run, *flags], check=True, cwd=folder)
        subprocess.run([command, "report", run], check=True, cwd=folder)
        subprocess.run([command, "export", run, f"{folder}/export"], check=True, cwd=folder)


if __name__ == "__main__":
    main()
