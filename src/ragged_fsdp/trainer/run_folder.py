"""The folder of a run: one run at a time, and where in it a run begins."""

import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ragged_fsdp.checkpoint import dcp
from ragged_fsdp.checkpoint.contents import CheckpointReader
from ragged_fsdp.checkpoint.place import AnyPath, place
from ragged_fsdp.checkpoint.store import MANIFEST, CheckpointStore, ObjectStore
from ragged_fsdp.trainer.config import RunConfig, TrainConfig
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.data import Tokens
from ragged_fsdp.trainer.metrics import losses_by_step
from ragged_fsdp.trainer.ranks import Ranks, on_every_rank, on_first_rank

__all__ = [
    "Identity",
    "Places",
    "RunLock",
    "StartingPoint",
    "how_to_go_on",
    "identity_of",
    "refuse_unshared",
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

_LOCK = ".lock"

_SEEN_WITHIN_S = 60.0
"""How long a node may not know of a file that another has made: NFS clients remember what was not there."""


class RunLock:
    """Held while a run uses its folder; the system lets go of it when the process ends, however it ends.

    Two runs in one folder would delete each other's half-written checkpoints. ``wait_s`` is how long to wait
    for another to let go: after a restart on other nodes the rank 0 of before may still be in a collective
    that has to time out.
    """

    def __init__(self, run_dir: Path, wait_s: float = 0.0, setting: str = "run_dir") -> None:
        self._path = run_dir / _LOCK
        self._made: list[Path] = []
        """What was not there before, innermost first."""
        self.words = f"process {os.getpid()} on {socket.gethostname()}"
        """Who holds it, as the file says."""
        until = time.monotonic() + wait_s
        try:
            while not self._taken():
                if time.monotonic() >= until:
                    self.file.seek(0)
                    holder = self.file.read().decode().strip() or "another process"
                    self.file.close()
                    raise ConfigError(f"{setting} = {str(run_dir)!r} is in use by {holder}; use another one")
                self.file.close()
                time.sleep(0.2)
            try:
                self.file.truncate(0)
                self.file.write(self.words.encode())
                os.fsync(self.file.fileno())  # NFS would else show it to other nodes when the file is closed
            except OSError:  # a full disk says so at the first byte, or at the last of these
                self.undo()  # or the error would hold the lock for as long as somebody holds the error
                raise
        except OSError as error:
            self._remove_made()
            raise ConfigError(f"{setting} = {str(run_dir)!r} cannot be used: {error.strerror}") from error

    def _taken(self) -> bool:
        """Lock the file under its name. One that :meth:`undo` of another run has removed meanwhile is opened
        again: a lock on it would keep nobody out."""
        folder = self._path.parent
        while True:
            self._made = [path for path in (self._path, folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            # without a buffer: what cannot be written is lost when the file is closed
            self.file = self._path.open("a+b", buffering=0)
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self.file.fileno()), self._path.stat()):
                    return True
            self.file.close()

    def release(self) -> None:
        """Let the next run have the folder."""
        self.file.close()

    def undo(self) -> None:
        """Let go, and remove what was made to take it, unless something else is in there by now."""
        self._remove_made()
        self.file.close()  # after it: who takes the lock then sees that the file has lost its name

    def _remove_made(self) -> None:
        made, self._made = self._made, []  # once: what has these names later is another run's
        for path in made:
            with suppress(OSError):
                path.unlink() if path == self._path else path.rmdir()


@dataclass(frozen=True)
class Places:
    """The folders that a run has to itself, and the object store that is told whose it is."""

    locks: list[RunLock]
    claimed: ObjectStore | None
    """Set if nobody had claimed it before."""

    def release(self) -> None:
        """Let the next run have them."""
        for lock in self.locks:
            lock.release()

    def undo(self) -> None:
        """Leave them as they were: the run is refused."""
        with suppress(Exception):  # of the store's library: it must not hide why the start failed
            if self.claimed is not None:
                self.claimed.disclaim()
        for lock in reversed(self.locks):
            lock.undo()


def take_places(config: TrainConfig, store: CheckpointStore, wait_s: float) -> Places:
    """Locks on the run's folder and on that of its checkpoints; an object store is told whose it is.

    The first rank's part. That way two runs that write into one object store are found by the name of the
    run's folder, which one run alone can have locked. A refusal leaves nothing behind.
    """
    run_dir = Path(config.run.run_dir)
    locks = [RunLock(run_dir, wait_s)]
    try:
        if isinstance(store, ObjectStore):
            is_new = _claim(store, run_dir)
            return Places(locks, store if is_new else None)
        if config.checkpoint.checkpoint_dir and store.root.resolve() != run_dir.resolve():
            locks.append(RunLock(store.root, wait_s, "checkpoint_dir"))
        return Places(locks, None)
    except ConfigError:
        locks[0].undo()
        raise


def refuse_unshared(config: TrainConfig, store: CheckpointStore, places: Places | None, ranks: Ranks) -> None:
    """Raise ``ConfigError`` on every rank if one does not see the folder into which all write checkpoints.

    ``places`` are those that rank 0 has taken, None on the others. A run that saves nothing needs no folder
    that all see.
    """
    saving = config.checkpoint
    saves = saving.checkpoint_every or saving.save_at_end or saving.save_on_interrupt
    if isinstance(store, ObjectStore) or not saves:
        return
    setting = "checkpoint_dir" if saving.checkpoint_dir else "run_dir"
    folder = Path(saving.checkpoint_dir or config.run.run_dir).absolute()
    words = [places.locks[-1].words if places is not None else ""]
    dist.broadcast_object_list(words, src=0, group=ranks.control)

    def look() -> None:
        until = time.monotonic() + min(_SEEN_WITHIN_S, config.sharding.timeout / 2)
        while _words_in(folder) != words[0]:
            if time.monotonic() >= until:
                raise ConfigError(
                    f"{setting} = {str(folder)!r} is on {socket.gethostname()} another folder than the one "
                    f"that {words[0]} has taken; expected one that all nodes share"
                )
            time.sleep(0.2)

    on_every_rank("use the run's folder", look, ranks.control)


def _words_in(folder: Path) -> str | None:
    """Who holds the lock on ``folder``; None if nobody ever did, as far as this node knows."""
    with suppress(OSError):
        there = next(path for path in (folder, *folder.parents) if path.is_dir())
        os.scandir(there).close()  # NFS asks the server anew about a folder that is opened
    with suppress(OSError):
        return (folder / _LOCK).read_text()
    return None


def _claim(store: ObjectStore, run_dir: Path) -> bool:
    try:
        return store.claim(str(run_dir.absolute()))
    except Exception as error:  # of the store's library: a name, an account, a network
        raise ConfigError(f"checkpoint_dir = {str(store.root)!r} cannot be used: {error}") from error


@dataclass(frozen=True)
class StartingPoint:
    """Where a run begins: at a checkpoint with the values of its manifest, or (None) at the first step."""

    path: AnyPath | None
    info: dict[str, Any]
    notes: list[str]
    """Lines for the user: damaged checkpoints that were passed over, settings that were changed."""
    last_kept: int | None = None
    """Checkpoints of later steps are to be moved aside, once nothing can refuse the run; None: none are."""

    def move_aside(self, store: CheckpointStore) -> list[str]:
        """The first rank's part, before the run writes; returns what to tell the user."""
        aside = store.move_aside(after=self.last_kept) if self.last_kept is not None else None
        if aside is None:
            return []
        which = "" if self.path is None else f"of later steps than {self.last_kept} "
        return [f"the checkpoints {which}that were there are in {aside}"]


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

    def lines(self) -> str:
        """What ranks must have alike of the model, one statement a line; a folder may lie elsewhere."""
        settings = {key: value for key, value in self.model_settings.items() if key != "_name_or_path"}
        tensors = (f"{name} {shape} {dtype}" for name, (shape, dtype) in self.tensors.items())
        return "\n".join([*(f"{key} = {value!r}" for key, value in settings.items()), *tensors])


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
        return StartingPoint(None, {}, notes, last_kept=-1 if config.run.resume == "restart" else None)
    try:
        reader = CheckpointReader(path)
    except ValueError as error:  # of another tool: ours were compared with their manifest
        raise ConfigError(f"resume: {error}") from error
    changed_model = _changed_model(reader.info.get("model", {}), identity.model_settings)
    _check_weights(reader, identity, changed_model)
    reasons = _changed_dtypes(reader, identity) + _changed_data(reader.info.get("data", {}), identity.data)
    if reasons and not config.run.resume_changed:
        raise ConfigError(f"resume: {path}: {'; '.join(reasons)}; --resume-changed goes on all the same")
    notes += reasons
    if changed_model:
        notes.append(f"the weights fit, but the model's config is another: {', '.join(changed_model)}")
    notes += _changed_settings(reader.info.get("config", {}), config)
    if _goes_on(config):
        return StartingPoint(path, reader.info, notes)
    step = reader.info.get("step", 0)
    if isinstance(store, ObjectStore):
        on_first_rank(lambda: _refuse_later(store, step), ranks)
    return StartingPoint(path, reader.info, notes, last_kept=step)


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


def _refuse_later(store: ObjectStore, step: int) -> None:
    try:
        store.move_aside(after=step)
    except ValueError as error:
        raise ConfigError(f"checkpoint_dir: {error}") from error


def _find(
    run: RunConfig, store: CheckpointStore, ranks: Ranks, warn: Callable[[str], None]
) -> AnyPath | None:
    mode = run.resume
    if mode == "never":
        on_first_rank(lambda: _refuse_used(Path(run.run_dir), store), ranks)  # others may see no folder
        return None
    if mode == "restart":
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
    on_every_rank("read the checkpoint", lambda: path, ranks.control, _content)
    if (path / MANIFEST).exists() and (problems := dcp.shared_damage(path, ranks.control)):
        raise ConfigError(f"resume: {problems[0]}")
    return path


def _content(path: AnyPath) -> str:
    """Which checkpoint it is, wherever a node has it."""
    index = path / ".metadata"
    if not index.exists():
        raise ConfigError(f"resume: {path} is not a checkpoint folder")
    told = path / MANIFEST if (path / MANIFEST).exists() else index
    with told.open("rb") as file:
        return f"{told.name} with digest {hashlib.sha256(file.read()).hexdigest()[:24]}"


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
