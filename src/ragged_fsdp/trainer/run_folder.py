"""The folder of a run: one run at a time, and where in it a run begins."""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_fsdp.checkpoint import dcp
from ragged_fsdp.checkpoint.contents import CheckpointReader
from ragged_fsdp.checkpoint.place import Place, place
from ragged_fsdp.checkpoint.store import MANIFEST, CheckpointStore, ObjectStore
from ragged_fsdp.trainer.config import RunConfig, TrainConfig
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.data import Tokens
from ragged_fsdp.trainer.metrics import losses_by_step
from ragged_fsdp.trainer.ranks import Ranks, on_first_rank

__all__ = [
    "Identity",
    "RunLock",
    "StartingPoint",
    "how_to_go_on",
    "identity_of",
    "starting_point",
    "take_places",
]

_SHOWN = {
    "run": ("steps", "seed"),
    "model": ("freeze",),
    "data": None,
    "optimizer": None,
    "sharding": ("precision", "fp8", "gather_codes", "internode_dtype"),
}
"""Settings that decide the course of training, by section; None is all of them."""


class RunLock:
    """Held while a run uses its folder; the system lets go of it when the process ends, however it ends.

    Two runs in one folder would delete each other's half-written checkpoints. ``wait_s`` is how long to wait
    for another to let go: after a restart on other nodes the rank 0 of before may still be in a collective
    that has to time out.
    """

    def __init__(self, run_dir: Path, wait_s: float = 0.0, setting: str = "run_dir") -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self.file = (run_dir / ".lock").open("a+")
        except OSError as error:
            raise ConfigError(f"{setting} = {str(run_dir)!r} cannot be used: {error.strerror}") from error
        until = time.monotonic() + wait_s
        while not self._taken():
            if time.monotonic() >= until:
                self.file.seek(0)
                holder = self.file.read().strip() or "another process"
                self.file.close()
                raise ConfigError(f"{setting} = {str(run_dir)!r} is in use by {holder}; use another one")
            time.sleep(0.2)
        self.file.truncate(0)
        self.file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self.file.flush()

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def release(self) -> None:
        """Let the next run have the folder."""
        self.file.close()


def take_places(config: TrainConfig, store: CheckpointStore, wait_s: float) -> list[RunLock]:
    """Locks on the run's folder and on that of its checkpoints; an object store is told whose it is.

    The first rank's part. That way two runs that write into one object store are found by the name of the
    run's folder, which one run alone can have locked.
    """
    locks = [RunLock(Path(config.run.run_dir), wait_s)]
    if isinstance(store, ObjectStore):
        try:
            store.claim(str(Path(config.run.run_dir).absolute()))
        except Exception as error:  # of the store's library: a name, an account, a network
            raise ConfigError(f"checkpoint_dir = {str(store.root)!r} cannot be used: {error}") from error
    elif config.checkpoint.checkpoint_dir:
        locks.append(RunLock(store.root, wait_s, "checkpoint_dir"))
    return locks


@dataclass(frozen=True)
class StartingPoint:
    """Where a run begins: at a checkpoint with the values of its manifest, or (None) at the first step."""

    path: Place | None
    info: dict[str, Any]
    notes: list[str]
    """Lines for the user: damaged checkpoints that were passed over, settings that were changed."""


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must share with a run that goes on from it."""

    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of each tensor of the model, by name; of tied ones, by each of their names."""
    tied: dict[str, set[str]]
    """Names of one tensor, by each of them: a checkpoint may hold it under one alone."""
    model_settings: dict[str, Any]
    data: dict[str, Any]
    """What decides which tokens sample n has, and with which tokenizer they were made."""


def identity_of(
    model: nn.Module, model_settings: dict[str, Any], tokens: Tokens, config: TrainConfig
) -> Identity:
    """The identity of a run of ``model``, which may be on the meta device."""
    held = model.state_dict(keep_vars=True)
    by_tensor: dict[int, set[str]] = {}
    for name, tensor in held.items():
        by_tensor.setdefault(id(tensor), set()).add(name)
    data = {
        "tokenizer": tokens.tokenizer.digest,
        "tokens": tokens.digest,
        "seq_len": config.data.seq_len,
        "seed": config.run.seed,
    }
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
    tied = {name: by_tensor[id(tensor)] for name, tensor in held.items()}
    return Identity(shapes, tied, model_settings, data)


def starting_point(
    config: TrainConfig, store: CheckpointStore, identity: Identity, ranks: Ranks
) -> StartingPoint:
    """The checkpoint that ``--resume`` means, if any; refuses one that does not fit this run.

    What decides is whether the weights fit, and whether the tokens are the same in the same order. A config
    that changed otherwise (another release of transformers, a new field, a folder that moved) is told.
    """
    notes: list[str] = []
    path = _find(config.run, store, ranks, notes.append)
    dist.barrier(group=ranks.control)  # nobody writes before all have looked
    if path is None:
        return StartingPoint(None, {}, notes)
    reader = CheckpointReader(path)
    changed_model = _changed_model(reader.info.get("model", {}), identity.model_settings)
    _check_weights(reader, identity, changed_model)
    reasons = _changed_dtypes(reader, identity) + _changed_data(reader.info.get("data", {}), identity.data)
    if reasons and not config.run.resume_changed:
        raise ConfigError(f"resume: {path}: {'; '.join(reasons)}; --resume-changed goes on all the same")
    notes += reasons
    if changed_model:
        notes.append(f"the weights fit, but the model's config is another: {', '.join(changed_model)}")
    notes += _changed_settings(reader.info.get("config", {}), config)
    if not _goes_on(config):
        step = reader.info.get("step", 0)
        aside = on_first_rank(lambda: _without_later(store, step), ranks)
        if aside is not None:
            notes.append(f"checkpoints of later steps than {step} that were there are in {aside}")
    return StartingPoint(path, reader.info, notes)


def _refuse_used(run_dir: Path, store: CheckpointStore) -> None:
    if store.steps():
        raise ConfigError(f"resume = never: {store.root} already holds checkpoints; use another run_dir")
    if losses_by_step(run_dir):  # they would be written over
        raise ConfigError(
            f"resume = never: {run_dir} already holds the metrics of a run; use another run_dir"
        )


def _goes_on(config: TrainConfig) -> bool:
    """Whether the same command, given again, goes on from the newest checkpoint of the run."""
    return config.run.resume in ("auto", "must")


def how_to_go_on(config: TrainConfig) -> str:
    """What goes on from the newest checkpoint of the run, in words."""
    return "the same command" if _goes_on(config) else "--resume auto"


def _without_later(store: CheckpointStore, step: int) -> Path | None:
    try:
        return store.move_aside(after=step)
    except ValueError as error:  # of an object store
        raise ConfigError(f"checkpoint_dir: {error}") from error


def _find(run: RunConfig, store: CheckpointStore, ranks: Ranks, warn: Callable[[str], None]) -> Place | None:
    mode = run.resume
    if mode == "never":
        on_first_rank(lambda: _refuse_used(Path(run.run_dir), store), ranks)  # others may see no folder
        return None
    if mode == "restart":
        aside = on_first_rank(store.move_aside, ranks)
        if aside is not None:
            warn(f"the checkpoints that were there are in {aside}")
        return None
    if mode in ("auto", "must"):
        damaged: list[str] = []
        found = dcp.newest_good(store, ranks.control, damaged.append)
        if found is None and damaged:  # to begin again here would overwrite what may still be rescued
            anew = "--resume restart moves them aside and begins at step 0"
            if isinstance(store, ObjectStore):  # where nothing can be renamed
                anew = "another checkpoint_dir begins at step 0"
            raise ConfigError(
                f"resume = {mode}: {store.root} holds only damaged checkpoints ({damaged[0]}); restore one, "
                f"or {anew}"
            )
        if found is None and mode == "must":
            raise ConfigError(f"resume = must: {store.root} holds no complete checkpoint")
        for problem in damaged:
            warn(f"passing over a damaged checkpoint: {problem}")
        return found
    path = place(mode)
    if not (path / ".metadata").exists():
        raise ConfigError(f"resume: {path} is not a checkpoint folder")
    if (path / MANIFEST).exists() and (problems := dcp.shared_damage(path, ranks.control)):
        raise ConfigError(f"resume: {problems[0]}")
    return path


def _check_weights(reader: CheckpointReader, identity: Identity, changed: list[str]) -> None:
    """Raise ``ConfigError`` unless the checkpoint has the model's tensors, in their shapes, and no others."""
    stored = {t.name.removeprefix("model."): t.shape for t in reader.tensors("model.")}
    if not stored:
        raise ConfigError(f"resume: {reader.path} holds no 'model.*' tensors, so it is not of a model")
    why = f" ({', '.join(changed)})" if changed else ""
    for name, (shape, _) in identity.tensors.items():
        if name in stored and stored[name] != shape:
            raise ConfigError(
                f"resume: {reader.path} has {name} of shape {stored[name]}, this run's model has {shape}{why}"
            )
        if not stored.keys() & identity.tied[name]:
            raise ConfigError(f"resume: {reader.path} has no {name}, which this run's model has{why}")
    if unknown := sorted(stored.keys() - identity.tensors.keys()):
        raise ConfigError(f"resume: {reader.path} has {unknown[0]}, which this run's model has not{why}")


def _changed_dtypes(reader: CheckpointReader, identity: Identity) -> list[str]:
    for stored in reader.tensors("model."):
        _, dtype = identity.tensors[stored.name.removeprefix("model.")]
        if stored.dtype != dtype:
            return [f"{stored.name} is stored in {stored.dtype}, this run has it in {dtype}"]
    return []


def _changed_data(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Lines for what makes sample n another one; nothing for checkpoints from before it was written down."""
    told = {"tokenizer": "the tokenizer is another", "tokens": "the tokens are others"}
    changed = [key for key in now if key in stored and stored[key] != now[key]]
    return [told.get(key, f"{key} is {now[key]}, was {stored[key]}") for key in changed]


def _changed_model(stored: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Each field of the model's config that is not as it was; none where the checkpoint has no config."""
    keys = sorted(stored.keys() | now.keys()) if stored else []
    return [
        f"{key} is {now.get(key)}, was {stored.get(key)}" for key in keys if stored.get(key) != now.get(key)
    ]


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
