"""torch's checkpoint writer and reader on an object store; sums are taken of what is written, on its way."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemBase

from ragged_fsdp.checkpoint.place import ObjectPath
from ragged_fsdp.checkpoint.store import FileSum

__all__ = ["ObjectFiles", "ObjectWriter"]


class ObjectFiles(FileSystemBase):
    """The files of one checkpoint, as torch's writer and reader ask for them."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}
        """Sums of the objects that were written through this, by name."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """An object as a file."""
        with path.open(mode) as file:
            if "w" not in mode:
                yield file
                return
            summed = _Summed(file)
            yield summed
        self.sums[path.name] = summed.sum

    def concat_path(self, path: Any, suffix: str) -> Any:
        """An object of the checkpoint."""
        return path / suffix

    def init_path(self, path: Any) -> Any:
        """The checkpoint itself."""
        return path

    def rename(self, path: Any, new_path: Any) -> None:
        """Copy and delete. Who reads does not look here before the manifest is there."""
        path.fs.mv(path.url, new_path.url)
        self.sums[new_path.name] = self.sums.pop(path.name)

    def mkdir(self, path: Any) -> None:
        """Nothing: objects need no folder."""

    def exists(self, path: Any) -> bool:
        """Whether an object is there."""
        return bool(path.exists())

    def rm_file(self, path: Any) -> None:
        """Delete an object."""
        path.fs.rm_file(path.url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether this can read and write it."""
        return isinstance(checkpoint_id, ObjectPath)


class ObjectWriter(dcp.FileSystemWriter):
    """torch's writer of a folder, into an object store."""

    def __init__(self, path: ObjectPath) -> None:
        super().__init__(path.url, sync_files=False)  # an object that was closed is durable
        self.fs: Any = ObjectFiles()
        self.path: Any = path

    @property
    def checkpoint_id(self) -> str:
        """What the index says of its place: the URL, and not how it is opened."""
        return str(self.path)


class _Summed:
    """A file that is written once from its beginning to its end."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.sum = FileSum(0, 0)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.sum = FileSum(self.sum.bytes + len(view), zlib.crc32(view, self.sum.crc32))
        return len(view)

    def tell(self) -> int:
        return self.sum.bytes

    def flush(self) -> None:
        """Nothing: what is written is on its way, and an object is complete when it is closed."""

    def close(self) -> None:
        self._file.close()
