"""The folder of a run's checkpoints: which are complete, which is best, which may go.

A checkpoint appears under its name only when it is complete::

    .writing-step-00000200-1f2e being written, or left by a crash: never loaded, removed at the next start
    step-00000100/              complete: manifest.json lists every file with its size and CRC-32
    .dropped-step-00000000/     being deleted: renamed first, so that a crash leaves no half checkpoint
    best.json                   the step with the lowest evaluation loss

In an object store, where nothing can be renamed, each attempt to write a checkpoint has a folder of its own,
and it is complete when its manifest is there, which is written last::

    step-00000200-6a5e1f2e/     no manifest: being written, or left by a crash
    step-00000100-6a5e1f2e/     with a manifest: complete; of several of one step the last by name counts
    owner.json                  the run that writes here: there are no locks

Torch-free: it knows files, not tensors.
"""

import itertools
import json
import math
import os
import re
import shutil
import time
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragged_fsdp.checkpoint.place import AnyPath, ObjectPath, place

__all__ = [
    "MANIFEST",
    "CheckpointStore",
    "FileSum",
    "ObjectStore",
    "checksum",
    "damage",
    "is_plain_name",
    "open_store",
    "read_manifest",
]

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})$")
_OBJECT_NAME = re.compile(r"step-(\d{8,})(-[0-9a-f]+)?")  # without an attempt: copied from a folder
_OWNER = "owner.json"
_WRITING, _DROPPED = ".writing-", ".dropped-"
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileSum:
    """Size and CRC-32 of a file."""

    bytes: int
    crc32: int

    def __post_init__(self) -> None:
        if type(self.bytes) is not int or type(self.crc32) is not int or self.bytes < 0:
            raise ValueError(f"a file cannot have {self.bytes!r} bytes and the checksum {self.crc32!r}")


def checksum(path: AnyPath) -> FileSum:
    """Read a file once, in blocks."""
    crc = size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return FileSum(size, crc)


def read_manifest(path: AnyPath) -> dict[str, Any]:
    """The manifest of a checkpoint; raises ``ValueError`` if there is no readable one."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        info, files = manifest["info"], manifest["files"]
        if unknown := sorted(set(manifest) - {"info", "files", "crc32"}):
            raise ValueError(f"unknown key {unknown[0]!r}")
        if "crc32" in manifest and manifest["crc32"] != _own_sum(info, files):  # older ones have none
            raise ValueError("it has changed since it was written (checksum)")
        if unfit := [name for name in files if not is_plain_name(name)]:
            raise ValueError(f"{unfit[0]!r} is not the name of a file in this folder")
        return {"info": dict(info), "files": {name: FileSum(**given) for name, given in files.items()}}
    except FileNotFoundError:
        raise ValueError(f"{path} has no {MANIFEST}: it is not a complete checkpoint") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path / MANIFEST} is damaged: {error}") from error


def is_plain_name(name: object) -> bool:
    """Whether it is the name of a file in a folder, and no way out of it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _own_sum(info: Any, files: Any) -> int:
    """CRC-32 of what a manifest says, however it is laid out."""
    return zlib.crc32(json.dumps([info, files], sort_keys=True).encode())


def damage(path: AnyPath, files: Iterable[str] | None = None) -> list[str]:
    """What is wrong with a checkpoint, one sentence per file; ``files`` limits the check to some of them."""
    try:
        expected: dict[str, FileSum] = read_manifest(path)["files"]
    except ValueError as error:
        return [str(error)]
    problems = []
    for name in sorted(expected if files is None else files):
        file = path / name
        if not file.is_file():
            problems.append(f"{file} is missing")
        elif file.stat().st_size != expected[name].bytes:
            problems.append(f"{file} has {file.stat().st_size} bytes instead of {expected[name].bytes}")
        elif checksum(file) != expected[name]:
            problems.append(f"{file} has changed since it was written (checksum)")
    return problems


class CheckpointStore:
    """The checkpoints of one run. Everything that changes the folder is called on one rank only."""

    def __init__(self, root: AnyPath, *, keep_last: int = 0, keep_best: bool = True) -> None:
        self.root: Any = root
        """A ``Path``; of an ``ObjectStore`` an ``ObjectPath``."""
        self.attempt = ""
        """Set by who writes, the same on all ranks and another after each restart: a rank of before that is
        cut off from the others may still write, and must not do it into the files of now."""
        self._keep_last = keep_last
        self._keep_best = keep_best

    def last_attempt(self) -> int:
        """The number with which the latest attempt in the store begins; 0 where names do not have it."""
        return 0

    def path(self, step: int) -> Any:
        """The folder of a complete checkpoint."""
        return self.final_path(step)

    def final_path(self, step: int) -> Any:
        """The folder that a checkpoint of this attempt has once it is complete."""
        return self.root / f"step-{step:08d}"

    def writing_path(self, step: int) -> Any:
        """The folder in which a checkpoint is written before it has its name."""
        return self.root / f"{_WRITING}step-{step:08d}{self.attempt}"

    def steps(self) -> list[int]:
        """Steps that have a checkpoint under its final name, oldest first; it may still be damaged."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(p.name) for p in self.root.iterdir() if p.is_dir())
        return sorted(int(m.group(1)) for m in matches if m)

    def move_aside(self, after: int = -1) -> Path | None:
        """Move checkpoints of later steps than ``after`` into a new folder beside this one.

        A run that begins at ``after`` would else take them for its own, and keep them instead of its newest.
        Returns the new folder, None if there is nothing to move.
        """
        later = [step for step in self.steps() if step > after]
        if not later:
            return None
        names = (self.root.with_name(f"{self.root.name}-{number}") for number in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        aside.mkdir()
        for step in later:
            os.rename(self.path(step), aside / self.path(step).name)
        if (best := self._read_best()) and best["step"] in later:
            os.rename(self.root / "best.json", aside / "best.json")
        return aside

    def room(self) -> str:
        """How much there is left, for who could not write."""
        root = self.root.absolute()
        there = next(path for path in (root, *root.parents) if path.exists())
        return f", where {shutil.disk_usage(there).free / 2**20:,.1f} MiB are free"

    def begin(self, step: int) -> Any:
        """An empty folder to write the checkpoint of ``step`` into."""
        path = self.writing_path(step)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def commit(self, step: int, files: dict[str, FileSum], info: dict[str, Any]) -> None:
        """Give a completely written checkpoint its name. After a crash it is there or it is not."""
        sums = {name: vars(s) for name, s in sorted(files.items())}
        info = json.loads(json.dumps(info))  # keys as texts, tuples as lists: as they will be read
        manifest = {"info": info, "files": sums, "crc32": _own_sum(info, sums)}
        self._complete(step, files, json.dumps(manifest, indent=1))
        self._note_best(step, info.get("eval_loss"))
        self._prune(step)

    def _complete(self, step: int, files: dict[str, FileSum], manifest: str) -> None:
        writing, final = self.writing_path(step), self.path(step)
        _write_durably(writing / MANIFEST, manifest)
        _sync_folder(writing)
        doomed = self._set_aside(final) if final.exists() else None  # the same step again, after a resume
        os.rename(writing, final)
        _sync_folder(self.root)
        if doomed is not None:  # only now: to delete takes long, and a crash meanwhile would leave neither
            shutil.rmtree(doomed, ignore_errors=True)

    def best_step(self) -> int | None:
        """The step with the lowest evaluation loss among those that were saved."""
        best = self._read_best()
        return best["step"] if best and best["step"] in self.steps() else None

    def remove_leftovers(self) -> list[Any]:
        """Delete what crashed writes and deletions left behind."""
        if not self.root.is_dir():
            return []
        left = [p for p in self.root.iterdir() if p.name.startswith((_WRITING, _DROPPED))]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        return left

    def _note_best(self, step: int, eval_loss: float | None) -> None:
        noted = best = self._read_best()
        if best and (best["step"] == step or best["step"] not in self.steps()):
            best = None  # what had that loss is gone
        known = eval_loss is not None and math.isfinite(eval_loss)
        if known and (best is None or eval_loss < best["eval_loss"]):
            best = {"step": step, "eval_loss": eval_loss}
        if best != noted:
            self._put("best.json", json.dumps(best))

    def _put(self, name: str, text: str) -> None:
        _write_durably(self.root / name, text)

    def _read_best(self) -> dict[str, Any] | None:
        try:
            best = json.loads((self.root / "best.json").read_text())
            is_usable = isinstance(best["step"], int) and isinstance(best["eval_loss"], int | float)
            return best if is_usable and math.isfinite(best["eval_loss"]) else None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None  # damaged: no reason for saves to fail from then on

    def _prune(self, newest: int) -> None:
        """Delete old ones. Later steps than ``newest`` are damaged ones that a run has passed over: if they
        counted, what it has just saved would be the oldest."""
        if not self._keep_last:
            return
        steps = [step for step in self.steps() if step <= newest]
        kept = set(steps[-self._keep_last :])
        if self._keep_best and (best := self.best_step()) is not None:
            kept.add(best)
        for step in steps:
            if step not in kept:
                self._drop(self.path(step))

    def _drop(self, path: Any) -> None:
        shutil.rmtree(self._set_aside(path), ignore_errors=True)

    def _set_aside(self, path: Any) -> Any:
        doomed = path.with_name(f"{_DROPPED}{path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        return doomed


class ObjectStore(CheckpointStore):
    """The checkpoints of one run in an object store: a manifest that is written last stands for a rename."""

    _claimed = ""
    """What this object has written to say who writes here."""

    def last_attempt(self) -> int:
        """The number with which the latest attempt begins, complete or not; 0 if there is none."""
        matches = (_OBJECT_NAME.fullmatch(path.name) for path in self.root.iterdir())
        return max((int(m.group(2)[1:9], 16) for m in matches if m and m.group(2)), default=0)

    def path(self, step: int) -> Any:
        """The folder of a complete checkpoint: of several attempts, the last."""
        return self._complete_ones().get(step, [self.final_path(step)])[-1]

    def final_path(self, step: int) -> Any:
        """The folder that a checkpoint of this attempt has from its beginning."""
        return self.root / f"step-{step:08d}{self.attempt}"

    def writing_path(self, step: int) -> Any:
        """The folder to write to, the final one: it is the manifest that makes a checkpoint complete."""
        return self.final_path(step)

    def steps(self) -> list[int]:
        """Steps that have a folder with a manifest, oldest first; it may still be damaged."""
        return sorted(self._complete_ones())

    def claim(self, owner: str) -> bool:
        """Note who writes here; ``ValueError`` if that is another. Shows early whether it can be written.

        Two runs in one place would take each other's unfinished checkpoints for left over. Returns whether
        nobody had claimed it.
        """
        noted = None
        try:
            noted = json.loads((self.root / _OWNER).read_text())["owner"]
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.root / _OWNER} is damaged: {error}") from error
        if noted not in (None, owner):
            raise ValueError(
                f"it belongs to the run in {noted}; use another, or remove {self.root / _OWNER} if that run "
                "has ended for good"
            )
        self._claimed = json.dumps({"owner": owner, "time": time.time(), "claim": uuid.uuid4().hex})
        self._put(_OWNER, self._claimed)
        return noted is None

    def disclaim(self) -> None:
        """Take :meth:`claim` back, unless another has claimed it since: the same run, started elsewhere."""
        owner = self.root / _OWNER
        if owner.exists() and owner.read_text() == self._claimed:
            owner.remove()

    def move_aside(self, after: int = -1) -> None:
        """Refused: it would be a copy of everything."""
        if any(step > after for step in self.steps()):
            later = f"checkpoints of later steps than {after}" if after >= 0 else "checkpoints"
            raise ValueError(f"{self.root} holds {later}, and an object store cannot rename; use another")

    def room(self) -> str:
        """Nothing: an object store does not say."""
        return ""

    def begin(self, step: int) -> Any:
        """The folder to write the checkpoint of ``step`` into, with nothing in it."""
        path = self.writing_path(step)
        path.remove()
        return path

    def remove_leftovers(self) -> list[Any]:
        """Delete what has no manifest."""
        found = [path for path in self.root.iterdir() if _OBJECT_NAME.fullmatch(path.name)]
        left = [path for path in found if not (path / MANIFEST).is_file()]
        for path in left:
            path.remove()
        return left

    def _complete_ones(self) -> dict[int, list[Any]]:
        """Folders with a manifest, by step, those of one step by name: later attempts sort behind.

        One that was copied from a folder has no attempt, and counts as the first.
        """
        found: dict[int, list[Any]] = {}
        for path in sorted(self.root.iterdir(), key=str):
            match = _OBJECT_NAME.fullmatch(path.name)
            if match and (path / MANIFEST).is_file():
                found.setdefault(int(match.group(1)), []).append(path)
        return found

    def _complete(self, step: int, files: dict[str, FileSum], manifest: str) -> None:
        path = self.final_path(step)
        for name, file_sum in files.items():  # another run may have taken them for left over
            if not (path / name).is_file() or (path / name).stat().st_size != file_sum.bytes:
                raise OSError(f"{path / name} is not there with {file_sum.bytes} bytes, as it was written")
        (path / MANIFEST).write_text(manifest)
        for other in self._complete_ones().get(step, []):  # after a resume from an older checkpoint
            if other.name != path.name:
                self._drop_one(other)

    def _put(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def _drop(self, path: Any) -> None:
        match = _OBJECT_NAME.fullmatch(path.name)
        for each in self._complete_ones().get(int(match.group(1)), []) if match else ():
            self._drop_one(each)

    def _drop_one(self, path: Any) -> None:
        (path / MANIFEST).remove()  # first: what a crash leaves then is not taken for complete
        path.remove()


def open_store(where: str, *, keep_last: int = 0, keep_best: bool = True) -> CheckpointStore:
    """The checkpoints at a folder or a URL; ``ValueError`` if the URL cannot be opened."""
    root = place(where)
    kind = ObjectStore if isinstance(root, ObjectPath) else CheckpointStore
    return kind(root, keep_last=keep_last, keep_best=keep_best)


def _write_durably(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _sync_folder(path: Path) -> None:
    """Make the names in a folder durable; a rename alone may be lost by a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
