"""The trainer under Ray Train: Ray places the workers, restarts them and keeps the checkpoints.

    python examples/ray_train.py --workers 2 --folder /tmp/ray-run

Kill a worker while it runs: Ray starts all of them again, from the last checkpoint that they reported.
"""

import argparse
from pathlib import Path

from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ragged_fsdp.trainer.ray import ray_train_loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="a GPU for each worker")
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"), help="must be seen by all workers")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    folder = given.folder.absolute()
    trainer = TorchTrainer(
        ray_train_loop,
        train_loop_config={
            "run_dir": str(folder / "run"),
            "model": "nano",
            "data": ["stdlib"],
            "steps": given.steps,
            "checkpoint_every": 20,
        },
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.gpus),
        run_config=RunConfig(
            name="example",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=3),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"step {result.metrics['step']}, loss {result.metrics['train_loss']:.4f}, {result.checkpoint}")


if __name__ == "__main__":
    main()
