"""What one rank runs. Loaded by the fork server, so that its imports are paid for once."""

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.job import TrainingJob
from ragged_fsdp.trainer.ranks import has_agent, join, leave, recorder_variables
from ragged_fsdp.trainer.stop import StopRequest, end_with_parent

__all__ = ["run_rank"]


def run_rank(config: TrainConfig, channel: Connection | None) -> dict[str, Any]:
    """Train on this rank; ``channel`` leads to our launcher, or is None under torchrun and SLURM."""
    os.environ.update(recorder_variables(os.environ, config.run.run_dir))
    stop = StopRequest(config.run.minutes)
    if channel is not None:
        stop.listen_to_launcher(channel)
    else:
        if has_agent():
            end_with_parent()
        # Ranks that wait for one that never comes are inside torch, where no handler of ours would run.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stop.listen_to(signal.SIGUSR1)  # SLURM's, before a time limit
    job = TrainingJob(config, join(config), stop)
    if channel is None:
        stop.listen_to(signal.SIGINT, signal.SIGTERM)  # until here they end at once: there is nothing to save
    outcome = job.run()
    leave()
    return outcome
