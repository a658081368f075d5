"""Reading jobs: runs of files by ``pread`` in a few threads, straight into place or through a small buffer.

Memory beyond the targets is one buffer of :data:`CHUNK_BYTES` per thread, and for elements that are cast on a
device what the copy takes there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from ragged_fsdp.weights.spans import Job, Piece

__all__ = ["CHUNK_BYTES", "read_jobs"]

CHUNK_BYTES = 16 << 20
"""The longest read, and the size of a thread's buffer."""
_READ_AGAIN = 64  # times in a row that a read may return nothing new before it counts as failed


def read_jobs(
    folder: Path,
    jobs: Sequence[Job],
    targets: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    *,
    threads: int,
    progress: Callable[[int, int], None],
) -> int:
    """Fill the flat ``targets`` from the files of ``folder``; returns how many bytes were read.

    Args:
        targets: this rank's part of each tensor, contiguous and flat.
        dtypes: of the stored tensors that the pieces come from.
        progress: is told of bytes that are read, and of all there are.
    """
    total, done = sum(job.end - job.begin for job in jobs), 0
    progress(0, total)
    if not jobs:
        return 0
    pinned = any(target.device.type == "cuda" for target in targets)
    with ExitStack() as stack:
        files = {}
        for name in sorted({job.file for job in jobs}):
            files[name] = os.open(folder / name, os.O_RDONLY)
            stack.callback(os.close, files[name])
            _advise(files[name], 0, 0, "RANDOM")  # the kernel's guesses would read what other ranks hold
        worker = _Worker(files, targets, dtypes, pinned)
        threads = max(1, min(threads, len(jobs)))
        pool = stack.enter_context(ThreadPoolExecutor(threads, "weights"))
        following = [*jobs[threads:], *[None] * threads]
        futures = {pool.submit(worker.run, job, then): job for job, then in zip(jobs, following)}
        try:
            for future in as_completed(futures):
                future.result()
                job = futures.pop(future)
                done += job.end - job.begin
                progress(done, total)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)  # before the files are closed below a read
            raise
    return total


def _advise(file: int, begin: int, length: int, what: str) -> None:
    """Tell the kernel of reads to come, where it listens."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, begin, length, getattr(os, f"POSIX_FADV_{what}"))


class _Worker:
    """What the threads share; each has a buffer of its own."""

    def __init__(
        self,
        files: dict[str, int],
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
            _advise(self._files[then.file], then.begin, then.end - then.begin, "WILLNEED")
        if len(job.pieces) == 1 and self._is_direct(job.pieces[0]):
            target, offset = self._targets[job.pieces[0].target], job.pieces[0].transfer.target_offset
            place = target.narrow(0, offset, job.pieces[0].transfer.numel).view(torch.uint8)
            self._read(job, place)
            return
        staged = self._buffer(job.end - job.begin)
        self._read(job, staged)
        for piece in job.pieces:
            self._put(piece, staged[piece.begin - job.begin : piece.end - job.begin])

    def _is_direct(self, piece: Piece) -> bool:
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
        memory = memoryview(into.numpy()).cast("B")  # type: ignore[arg-type]
        position, retries = 0, 0
        while position < len(memory):
            got = os.preadv(self._files[job.file], [memory[position:]], job.begin + position)
            retries = 0 if got else retries + 1
            if retries > _READ_AGAIN:
                raise OSError(
                    f"{job.file}: the file ends at byte {job.begin + position}, before byte {job.end}; "
                    "it has become shorter since it was opened"
                )
            position += got

    def _put(self, piece: Piece, raw: Tensor) -> None:
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
