"""Starting a run: checked here, then run by our own processes, torchrun's or SLURM's."""

import os
from typing import Any

import torch

from ragged_fsdp.checkpoint.store import open_store
from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.config_check import check, check_vocabulary
from ragged_fsdp.trainer.data import open_tokens
from ragged_fsdp.trainer.launch import RankFailure, launch
from ragged_fsdp.trainer.ranks import rank_variables
from ragged_fsdp.trainer.run_folder import how_to_go_on

__all__ = ["local_processes", "start"]


def local_processes(config: TrainConfig) -> int:
    """How many processes our launcher starts."""
    if config.sharding.processes:
        return config.sharding.processes
    if config.sharding.sharding == "none":
        return 1
    if config.sharding.device != "cpu" and torch.cuda.is_available():
        return torch.cuda.device_count()
    return min(4, os.cpu_count() or 1)


def start(config: TrainConfig) -> dict[str, Any]:
    """Train; returns what came of it.

    Settings that cannot work are refused before any process exists, or by all those that somebody else has
    started.
    """
    given = rank_variables()
    if given is None:
        processes = local_processes(config)
        source = check(config, processes)
        tokens = open_tokens(config.data, config.model.model)  # fills the cache before the ranks race
        check_vocabulary(source, tokens)
        try:
            return launch("ragged_fsdp.trainer.worker:run_rank", config, processes)
        except RankFailure as failure:
            raise RankFailure(f"{failure}\n{_what_is_left(config)}") from None
    os.environ.update(given)
    from ragged_fsdp.trainer.worker import run_rank

    return run_rank(config, None)


def _what_is_left(config: TrainConfig) -> str:
    """Where the run can go on after a failure, in words."""
    try:
        steps = open_store(config.checkpoint_place).steps()
    except Exception as error:  # of a store's library: it must not take the place of why the run failed
        return f"its checkpoints could not be listed: {error}"
    if not steps:
        return "there is no checkpoint yet: the same command begins at step 0"
    return f"the newest checkpoint is of step {steps[-1]}; {how_to_go_on(config)} goes on from there"
