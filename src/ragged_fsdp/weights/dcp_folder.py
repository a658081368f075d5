"""Weights of a checkpoint of ``torch.distributed.checkpoint``: checked first, then read by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ragged_fsdp.checkpoint.reading import CheckedReader, load
from ragged_fsdp.routes import region_numel
from ragged_fsdp.weights.names import Naming, parts_of
from ragged_fsdp.weights.targets import Target, region_of

__all__ = ["DcpPlan", "StoredShape", "read"]

_PREFIX = "model."


@dataclass(frozen=True)
class StoredShape:
    """A stored tensor: its shape, and the bytes of an element."""

    shape: tuple[int, ...]
    item_bytes: int


def read(folder: Path) -> dict[str, StoredShape]:
    """The tensors of a checkpoint by name, of its model alone where it holds more; its files are checked."""
    metadata = CheckedReader(folder).read_metadata()
    tensors = {
        name: StoredShape(tuple(entry.size), entry.properties.dtype.itemsize)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    of_model = {name: entry for name, entry in tensors.items() if name.startswith(_PREFIX)}
    is_run = of_model and any(name.startswith("optim.") for name in metadata.state_dict_metadata)
    return of_model if is_run else tensors


@dataclass
class DcpPlan:
    """Which stored tensor each target is filled from."""

    folder: Path
    stored: dict[str, StoredShape]
    targets: Sequence[Target]
    naming: Naming
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        prefix = _PREFIX if self.stored and all(name.startswith(_PREFIX) for name in self.stored) else ""
        if any(name.startswith(_PREFIX) for target in self.targets for name in target.names):
            known = any(name in self.stored for target in self.targets for name in target.names)
            prefix = "" if known else prefix
        self._sources: dict[int, str] = {}
        wanted: set[str] = set()
        lines = []
        for index, target in enumerate(self.targets):
            options = [prefix + self._outside(name, target.tensor) for name in target.names]
            wanted.update(options)
            name = next((option for option in options if option in self.stored), None)
            if name is None:
                self.missing.append(target.name)
                continue
            entry = self.stored[name]
            if entry.shape != tuple(target.tensor.shape):
                raise ValueError(
                    f"{self.folder}: {name} has shape {entry.shape}; {tuple(target.tensor.shape)} is "
                    f"expected for the model's {target.name}"
                )
            self._sources[index] = name
            lines.append(f"{target.name} {entry.shape}")
        self.found = len(self._sources)
        self.unexpected = sorted(self.stored.keys() - wanted)
        self.description = "\n".join(lines)

    def _outside(self, name: str, tensor: Tensor) -> str:
        parts = parts_of(self.naming, name, tuple(tensor.shape), tensor.dtype)
        if len(parts) != 1 or parts[0].shape != tuple(tensor.shape):
            raise ValueError(
                f"{name}: a distributed checkpoint is read tensor by tensor; names= cuts this one"
            )
        return parts[0].stored

    def run(self, tensors: Sequence[Tensor], group: dist.ProcessGroup | None) -> int:
        """Fill the targets in place, each rank its own part; returns the bytes of these parts as stored."""
        state = {name: tensors[index].detach() for index, name in self._sources.items()}
        load(state, CheckedReader(self.folder), group, alone=not dist.is_initialized())
        return sum(
            region_numel(region_of(name, tensors[index])) * self.stored[name].item_bytes
            for index, name in self._sources.items()
        )
