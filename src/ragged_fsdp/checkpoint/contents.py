"""What a checkpoint holds, without loading it; and one of its tensors at a time."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ragged_fsdp.checkpoint.place import AnyPath
from ragged_fsdp.checkpoint.reading import CheckedReader, load
from ragged_fsdp.checkpoint.store import MANIFEST, read_manifest

__all__ = ["CheckpointReader", "StoredTensor"]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint: ``pieces`` is how many shards it was saved as."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: int

    @property
    def byte_count(self) -> int:
        """Bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CheckpointReader:
    """Reads the metadata once; tensors only when asked for. Needs no process group."""

    def __init__(self, path: AnyPath) -> None:
        self.path = path
        self._reader = CheckedReader(path)
        self._reader.read_metadata()
        self.info: dict[str, Any] = read_manifest(path)["info"] if (path / MANIFEST).exists() else {}
        """The manifest's values; empty for a checkpoint of another tool."""

    def tensors(self, prefix: str = "") -> list[StoredTensor]:
        """All tensors whose names start with ``prefix``, by name."""
        entries = self._reader.read_metadata().state_dict_metadata
        return [
            StoredTensor(name, tuple(entry.size), entry.properties.dtype, len(entry.chunks))
            for name, entry in sorted(entries.items())
            if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
        ]

    def values(self) -> list[str]:
        """Names of what is stored besides tensors."""
        entries = self._reader.read_metadata().state_dict_metadata
        return sorted(name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata))

    def load(self, tensor: StoredTensor) -> Tensor:
        """The whole tensor, put together from its pieces."""
        full = torch.empty(tensor.shape, dtype=tensor.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
            load({tensor.name: full}, self._reader, alone=True)
        return full
