"""The trainer as the loop of a Ray ``TorchTrainer``: Ray places and restarts workers and keeps checkpoints.

::

    trainer = TorchTrainer(
        ray_train_loop,
        train_loop_config={"model": "nano", "run_dir": "/shared/runs/one", "checkpoint_every": 100},
        scaling_config=ScalingConfig(num_workers=4),
        run_config=RunConfig(storage_path="/shared/ray", failure_config=FailureConfig(max_failures=3)),
    )

Ray makes the process group. After a worker or a node has died it starts all workers again and says which
checkpoint was the last that they reported; on another number of workers it is resharded.
"""

from dataclasses import replace
from typing import Any

import ray.train
import ray.train.torch

from ragged_fsdp.checkpoint.place import is_url
from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.config_file import from_values
from ragged_fsdp.trainer.job import TrainingJob
from ragged_fsdp.trainer.stop import StopRequest

__all__ = ["ray_train_loop"]


class _ReportingJob(TrainingJob):
    """Hands every checkpoint to Ray. All workers report, as Ray wants it; the first one has the folder."""

    def _save(self) -> None:
        super()._save()
        folder = self._store.path(self._counters.step)
        checkpoint = ray.train.Checkpoint.from_directory(folder) if self.ranks.rank == 0 else None
        ray.train.report(self._counters.to_info(), checkpoint=checkpoint, checkpoint_dir_name=folder.name)


def ray_train_loop(settings: dict[str, Any]) -> None:
    """What a ``TorchTrainer`` runs on each worker.

    Args:
        settings: those of ``ragged-fsdp train``, by name. ``run_dir`` must be a folder that all workers see:
            each writes its own part of a checkpoint there, and Ray copies what is complete to its storage. A
            checkpoint is complete before the next step, so ``async_checkpoint`` is off.
    """
    config = _as_ray_says(from_values(settings, {}))
    if is_url(config.checkpoint_place):
        raise ValueError(
            "checkpoint_dir must be a folder that all workers see: Ray copies from it to its storage_path; "
            f"got {config.checkpoint_place}."
        )
    _ReportingJob(config, ray.train.torch.get_device(), StopRequest(config.run.minutes)).run()


def _as_ray_says(config: TrainConfig) -> TrainConfig:
    """The last checkpoint is the one that Ray knows; without one the run begins as its settings say."""
    config = replace(config, checkpoint=replace(config.checkpoint, async_checkpoint=False))
    last = ray.train.get_checkpoint()
    if last is None:
        return config
    if last.filesystem.type_name != "local":
        raise ValueError(
            f"storage_path must be a folder that all workers see: checkpoints are read there; got {last}."
        )
    return replace(config, run=replace(config.run, resume=last.path))
