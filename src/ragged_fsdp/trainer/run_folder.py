"""The folder of a run: one run at a time, and where in it a run begins."""

import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ragged_fsdp.checkpoint import dcp
from ragged_fsdp.checkpoint.store import MANIFEST, CheckpointStore, read_manifest
from ragged_fsdp.trainer.config import TrainConfig
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.ranks import Ranks

__all__ = ["RunLock", "StartingPoint", "starting_point"]

_SHOWN = {
    "run": ("steps", "seed"),
    "data": None,
    "optimizer": None,
    "sharding": ("precision", "gather_codes", "internode_dtype"),
}
"""Settings that decide the course of training, by section; None is all of them."""


class RunLock:
    """Held while a run uses its folder; the system lets go of it when the process ends, however it ends.

    Two runs in one folder would delete each other's half-written checkpoints.
    """

    def __init__(self, run_dir: Path) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self.file = (run_dir / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(f"run_dir = {str(run_dir)!r} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.file.seek(0)
            holder = self.file.read().strip() or "another process"
            self.file.close()
            raise ConfigError(f"run_dir = {str(run_dir)!r} is in use by {holder}; use another one") from None
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self.file.flush()

    def release(self) -> None:
        """Let the next run have the folder."""
        self.file.close()


@dataclass(frozen=True)
class StartingPoint:
    """Where a run begins: at a checkpoint with the values of its manifest, or (None) at the first step."""

    path: Path | None
    info: dict[str, Any]
    notes: list[str]
    """Lines for the user: damaged checkpoints that were passed over, settings that were changed."""


def starting_point(
    config: TrainConfig, store: CheckpointStore, model_settings: dict[str, Any], ranks: Ranks
) -> StartingPoint:
    """The checkpoint that ``--resume`` means, if any; refuses one that does not fit this run."""
    notes: list[str] = []
    path = _find(config.run.resume, store, ranks, notes.append)
    dist.barrier(group=ranks.control)  # nobody writes before all have looked
    if path is None:
        return StartingPoint(None, {}, notes)
    info = read_manifest(path)["info"] if (path / MANIFEST).exists() else {}  # none if of another tool
    stored = info.get("model", model_settings)
    for key, value in model_settings.items():
        if stored.get(key) != value:
            raise ConfigError(f"resume: {path} has model {key} = {stored.get(key)}, this run has {value}")
    return StartingPoint(path, info, notes + _changed_settings(info.get("config", {}), config))


def _find(mode: str, store: CheckpointStore, ranks: Ranks, warn: Callable[[str], None]) -> Path | None:
    if mode == "never":
        if store.steps():
            raise ConfigError(f"resume = never: {store.root} already holds checkpoints; use another run_dir")
        return None
    if mode in ("auto", "must"):
        step = dcp.first_good_step(store, ranks.control, warn)
        if step is None and mode == "must":
            raise ConfigError(f"resume = must: {store.root} holds no complete checkpoint")
        return None if step is None else store.path(step)
    path = Path(mode)
    if not (path / ".metadata").exists():
        raise ConfigError(f"resume: {path} is not a checkpoint folder")
    if (path / MANIFEST).exists() and (problems := dcp.shared_damage(path, ranks.control)):
        raise ConfigError(f"resume: {problems[0]}")
    return path


def _changed_settings(stored: dict[str, Any], config: TrainConfig) -> list[str]:
    """A line for each setting that decides the course of training and is not as in the checkpoint.

    Raises ``ConfigError`` for another optimizer, whose state could not be read.
    """
    now = asdict(config)
    before = stored.get("optimizer", {}).get("optimizer", config.optimizer.optimizer)
    if before != config.optimizer.optimizer:
        raise ConfigError(
            f"resume: the checkpoint was trained with optimizer = {before}, this run has "
            f"{config.optimizer.optimizer}; use another run_dir"
        )
    keys = [(section, key) for section, chosen in _SHOWN.items() for key in chosen or now[section]]
    return [
        f"{key} is {now[section][key]}, was {stored[section][key]} when the checkpoint was written"
        for section, key in keys
        if key in stored.get(section, {}) and stored[section][key] != now[section][key]
    ]
