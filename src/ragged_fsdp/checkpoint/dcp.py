"""Writing and reading a sharded state with ``torch.distributed.checkpoint``.

``Saver`` copies the state (``staging.py``; training waits for nothing else), then writes in a thread of each
rank, over a process group of its own: its collectives must not mix with those of training, whose order
the thread does not know. The state is any tree of dicts whose leaves are tensors, DTensors (of any
placement, ours included) or picklable values.
"""

import copy
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ragged_fsdp.agreement import together
from ragged_fsdp.checkpoint import reading
from ragged_fsdp.checkpoint.object_files import ObjectWriter
from ragged_fsdp.checkpoint.place import AnyPath, ObjectPath
from ragged_fsdp.checkpoint.staging import HostStaging
from ragged_fsdp.checkpoint.store import CheckpointStore, FileSum, checksum, damage, read_manifest

__all__ = ["Saver", "load", "newest_good", "shared_damage", "stored_names"]


class Saver:
    """Writes checkpoints of one run, at most one at a time. Every rank calls every method."""

    def __init__(self, store: CheckpointStore, *, background: bool, timeout_s: float) -> None:
        self._background = background
        self._staging = HostStaging()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._pending: tuple[int, threading.Thread, Future[None]] | None = None
        store.attempt = together(lambda: _new_attempt(store), self._group)[0]
        self._store = copy.copy(store)
        self._store.root = store.root.absolute()  # else a change of directory would move a save under way

    def save(self, step: int, state: dict[str, Any], info: dict[str, Any]) -> None:
        """Start to save ``state`` as the checkpoint of ``step``.

        What is in host memory is copied when this returns. What is on a device may be read, but must not be
        changed before :meth:`before_update`.
        """
        self.wait()
        copied: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            copied = self._staging.copy(state) if self._background else state
        except Exception as error:  # the other ranks write already: their first exchange must hear of it
            failure = error
        self._pending = (step, *_in_thread(lambda: self._write(step, copied, info, failure)))
        if failure is not None or not self._background:
            self.wait()

    def before_update(self) -> None:
        """Call before tensors of a state on a device are changed: the stream waits for their copies."""
        self._staging.before_update()

    def wait(self) -> None:
        """Wait until the checkpoint that is being written, if any, is complete; raises what made it fail."""
        if self._pending is None:
            return
        step, thread, future = self._pending
        self._pending = None
        # Its end, not its result: a process that ends while the thread still frees tensors aborts, as torch
        # lets go of the interpreter's lock for each and does not get it back.
        thread.join()
        error = future.exception()
        if error is None:
            return
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, dcp.CheckpointException):  # its own text is the tracebacks of all ranks
            rank, (cause, _) = min(error.failures.items())
            reason = f"rank {rank} failed: {type(cause).__name__}: {cause}"
        raise RuntimeError(
            f"the checkpoint of step {step} could not be written to {self._store.root}{self._store.room()}: "
            f"{reason}"
        ) from error

    def _write(
        self, step: int, state: dict[str, Any], info: dict[str, Any], failure: Exception | None
    ) -> None:
        rank = dist.get_rank()
        path = self._store.writing_path(step)
        writer = ObjectWriter(path) if isinstance(path, ObjectPath) else dcp.FileSystemWriter(path)

        def begin() -> None:
            if failure is not None:
                raise failure
            self._staging.wait()
            if rank == 0:
                self._store.begin(step)

        def own_files() -> dict[str, FileSum]:
            if isinstance(writer, ObjectWriter):
                return writer.fs.sums
            own = [p for p in path.iterdir() if p.name.startswith(f"__{rank}_")]
            if rank == 0:
                own.append(path / ".metadata")
            return {p.name: checksum(p) for p in own}

        together(begin, self._group)
        dcp.save(state, storage_writer=writer, process_group=self._group)
        sums = together(own_files, self._group)
        files = {name: file_sum for part in sums for name, file_sum in part.items()}
        together(lambda: self._store.commit(step, files, info) if rank == 0 else None, self._group)


def _new_attempt(store: CheckpointStore) -> str:
    """The name of a start: it sorts behind all that are in the store, whatever this host's clock says.

    Rank 0's counts, and it alone lists what there is.
    """
    if dist.get_rank() != 0:
        return ""
    return f"-{max(int(time.time()), store.last_attempt() + 1):08x}{secrets.token_hex(4)}"


def _in_thread(work: Callable[[], None]) -> tuple[threading.Thread, Future[None]]:
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    # A daemon: a rank that must end at once does not wait for its disk; the half checkpoint has no name yet.
    thread = threading.Thread(target=run, name="checkpoint", daemon=True)
    thread.start()
    return thread, future


def load(state: dict[str, Any], path: AnyPath, group: dist.ProcessGroup | None = None) -> None:
    """Fill the tensors of ``state`` in place, each rank reading the parts that its own shards need."""
    reading.load(state, reading.CheckedReader(path), group)


def stored_names(path: AnyPath) -> set[str]:
    """The names of everything a checkpoint holds, read from its metadata alone."""
    return set(reading.CheckedReader(path).read_metadata().state_dict_metadata)


def newest_good(
    store: CheckpointStore, group: dist.ProcessGroup | None, warn: Callable[[str], None]
) -> AnyPath | None:
    """The newest checkpoint that is whole; ranks check the files between them, then agree.

    Rank 0 alone lists what there is: an object store may show each rank something else.
    ``warn`` is told what is wrong with each checkpoint that is passed over.
    """
    found = together(
        lambda: [store.path(step).name for step in store.steps()] if dist.get_rank() == 0 else [], group
    )[0]
    for name in reversed(found):
        problems = shared_damage(store.root / name, group)
        if not problems:
            path: AnyPath = store.root / name
            return path
        for problem in problems:
            warn(problem)
    return None


def shared_damage(path: AnyPath, group: dist.ProcessGroup | None) -> list[str]:
    """What is wrong with a checkpoint, the same on every rank; each checks its share of the files."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def own_damage() -> list[str]:
        try:
            mine = sorted(read_manifest(path)["files"])[rank::world]
        except ValueError:
            mine = []  # damage() says what is wrong with the manifest
        return damage(path, mine)

    return sorted({problem for part in together(own_damage, group) for problem in part})
