"""Reading jobs: runs of files in a few threads, straight into place or through a small buffer.

Memory beyond the targets is one buffer of :data:`CHUNK_BYTES` per thread, for elements that are cast on a
device what the copy takes there, and of an object store the bytes of one read per thread.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragged_fsdp.checkpoint.place import AnyPath
from ragged_fsdp.weights.spans import Job, StoredPiece

__all__ = ["CHUNK_BYTES", "Files", "Progress", "read_jobs"]

Progress = Callable[[int, int], None]
"""Is told how many bytes have been read, and how many there are."""

CHUNK_BYTES = 16 << 20
"""The longest read, and the size of a thread's buffer."""
_AHEAD_BYTES = 256 << 10
"""How much the kernel is told of at a time: of more it fetches only the first of its read-ahead, or what the
disk takes in one request, whichever is more; few disks take less than this."""
_OPEN_FILES = 64
"""Files that a rank has open at a time; systems allow a process 256 or more."""


class Files:
    """The files of a folder, each kept open: bytes of any place, from any thread, by ``pread``.

    A checkpoint of many ranks has more files than a process may open: those that were opened first are closed
    again, once no thread reads them.
    """

    def __init__(self, folder: AnyPath) -> None:
        self._folder = folder
        self._opened: dict[Path, int] = {}
        self._readers: Counter[Path] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._opened.values():
            os.close(handle)
        self._opened.clear()

    def read(self, file: str, begin: int, length: int) -> bytes:
        """A few bytes."""
        found = bytearray(length)
        self.read_into(file, begin, memoryview(found))
        return bytes(found)

    def read_into(self, file: str, begin: int, memory: memoryview) -> None:
        """Fill memory from a place of a file on; ``OSError`` if the file ends before."""
        done = 0
        while done < len(memory):
            got = self._read_some(file, begin + done, memory[done:])
            if not got:
                raise OSError(
                    f"{self._folder / file} ends at byte {begin + done}, before byte {begin + len(memory)}; "
                    "it has become shorter since its header or index was read"
                )
            done += got

    def _read_some(self, file: str, begin: int, memory: memoryview) -> int:
        if isinstance(self._folder, Path):
            with self._handle(self._folder / file) as handle:
                return os.preadv(handle, [memory], begin)
        path = self._folder / file
        found = path.fs.cat_file(path.url, start=begin, end=begin + len(memory))
        memory[: len(found)] = found
        return len(found)

    def will_read(self, file: str, begin: int, length: int) -> None:
        """Tell the kernel of a read to come, where it listens."""
        if isinstance(self._folder, Path):
            with self._handle(self._folder / file) as handle:
                for at in range(begin, begin + length, _AHEAD_BYTES):
                    _advise(handle, at, min(_AHEAD_BYTES, begin + length - at), "WILLNEED")

    @contextmanager
    def _handle(self, path: Path) -> Iterator[int]:
        """The file, open for as long as the caller reads."""
        with self._lock:
            if path not in self._opened:
                idle = (other for other in self._opened if not self._readers[other])
                if len(self._opened) >= _OPEN_FILES and (first := next(idle, None)) is not None:
                    os.close(self._opened.pop(first))
                self._opened[path] = os.open(path, os.O_RDONLY)
                # the kernel's guesses would read what other ranks hold
                _advise(self._opened[path], 0, 0, "RANDOM")
            handle = self._opened[path]
            self._readers[path] += 1
        try:
            yield handle
        finally:
            with self._lock:
                self._readers[path] -= 1


def _advise(handle: int, begin: int, length: int, what: str) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, begin, length, getattr(os, f"POSIX_FADV_{what}"))


def read_jobs(
    folder: AnyPath,
    jobs: Sequence[Job],
    targets: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    *,
    threads: int,
    progress: Callable[[int], None],
) -> int:
    """Fill the flat ``targets`` from the files of ``folder``; returns how many bytes were read.

    Args:
        targets: this rank's part of each tensor, contiguous and flat.
        dtypes: of the stored tensors that the pieces come from.
        progress: is told how many bytes have been read.
    """
    done = 0
    progress(done)
    if not jobs:
        return done
    pinned = any(target.device.type == "cuda" for target in targets)
    with ExitStack() as stack:
        files = stack.enter_context(Files(folder))
        worker = _Reads(files, targets, dtypes, pinned)
        threads = min(threads, len(jobs))
        for job in jobs[:threads]:
            files.will_read(job.file, job.begin, job.end - job.begin)
        pool = stack.enter_context(ThreadPoolExecutor(threads, "weights"))
        following = [*jobs[threads:], *[None] * threads]
        futures = {pool.submit(worker.run, job, then): job for job, then in zip(jobs, following)}
        try:
            for future in as_completed(futures):
                future.result()
                job = futures.pop(future)
                done += job.end - job.begin
                progress(done)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)  # before the files are closed below a read
            raise
    return done


class _Reads:
    """What the threads share; each has a buffer of its own."""

    def __init__(
        self,
        files: Files,
        targets: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        pinned: bool,
    ) -> None:
        self._files, self._targets, self._dtypes, self._pinned = files, targets, dtypes, pinned
        self._own = threading.local()

    @torch.no_grad()
    def run(self, job: Job, then: Job | None) -> None:
        """Read one run and put its pieces in place, while the disk fetches the one ``then``."""
        if then is not None:
            self._files.will_read(then.file, then.begin, then.end - then.begin)
        if len(job.pieces) == 1 and self._is_direct(job.pieces[0]):
            target, offset = self._targets[job.pieces[0].target], job.pieces[0].transfer.target_offset
            place = target.narrow(0, offset, job.pieces[0].transfer.numel).view(torch.uint8)
            self._read(job, place)
            return
        staged = self._buffer(job.end - job.begin)
        self._read(job, staged)
        for piece in job.pieces:
            self._put(piece, staged[piece.begin - job.begin : piece.end - job.begin])

    def _is_direct(self, piece: StoredPiece) -> bool:
        target = self._targets[piece.target]
        same = target.dtype == self._dtypes[piece.source]
        return same and target.device.type == "cpu" and piece.transfer.is_run

    def _buffer(self, nbytes: int) -> Tensor:
        buffer = getattr(self._own, "buffer", None)
        if buffer is None or buffer.numel() < nbytes:
            size = max(nbytes, CHUNK_BYTES)
            self._own.buffer = buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return buffer[:nbytes]

    def _read(self, job: Job, into: Tensor) -> None:
        self._files.read_into(job.file, job.begin, memoryview(into.numpy()).cast("B"))  # type: ignore[arg-type]

    def _put(self, piece: StoredPiece, raw: Tensor) -> None:
        dtype, transfer, target = self._dtypes[piece.source], piece.transfer, self._targets[piece.target]
        if raw.storage_offset() % dtype.itemsize:
            raw = raw.clone()  # a view of this type must begin at a multiple of its size
        typed = raw.view(dtype)
        source = typed.as_strided(transfer.sizes, transfer.source_strides, typed.storage_offset())
        place = target.as_strided(
            transfer.sizes, transfer.target_strides, target.storage_offset() + transfer.target_offset
        )
        # not asynchronously: the buffer is filled again by the next read
        place.copy_(source)
