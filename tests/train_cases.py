"""Small training runs for tests: a few steps of a tiny model on a few kilobytes of text."""

from pathlib import Path
from typing import Any

from ragged_fsdp.trainer.config_file import from_values
from ragged_fsdp.trainer.start import start
from rank_pool import DEVICE

__all__ = ["settings", "tensors", "train", "train_on_pool"]


def settings(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a run in ``run_dir`` that takes a second or two."""
    return {
        "run_dir": str(run_dir),
        "data": [str(Path(__file__))],
        "model": "nano",
        "seq_len": 32,
        "batch": 12,
        "steps": 8,
        "warmup": 2,
        "lr": 1e-2,
        "eval_every": 4,
        "eval_sequences": 3,
        "eval_fraction": 0.1,
        "checkpoint_every": 0,
        "tensorboard": False,
        "log_every": 1000,
        "processes": 2,
        "device": DEVICE,
        "precision": "fp32",
        "timeout": 60.0,
        **changes,
    }


def train(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Train on processes of its own; returns the outcome."""
    return start(from_values(settings(run_dir, **changes)))


def train_on_pool(run_dir: Path, **changes: Any) -> dict[str, Any]:
    """Train on the ranks of a test's pool, all of which call this."""
    import torch
    import torch.distributed as dist

    from ragged_fsdp.trainer.config_check import check
    from ragged_fsdp.trainer.job import TrainingJob
    from ragged_fsdp.trainer.ranks import lay_out
    from ragged_fsdp.trainer.stop import StopRequest

    config = from_values(settings(run_dir, **changes))
    check(config, dist.get_world_size())
    device = torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
    outcome = TrainingJob(config, lay_out(config.sharding, device), StopRequest(0.0)).run()
    dist.barrier()  # what rank 0 wrote is there for all
    return outcome


def tensors(checkpoint: Path) -> dict[str, Any]:
    """Model and optimizer in a checkpoint, whole."""
    from ragged_fsdp.checkpoint.contents import CheckpointReader

    reader = CheckpointReader(checkpoint)
    return {t.name: reader.load(t) for t in reader.tensors() if not t.name.startswith("rng")}
