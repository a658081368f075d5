"""``DataParallelMeshDims``: torch's class where it has one, an equal one where it does not yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed.fsdp as torch_fsdp

__all__ = ["DataParallelMeshDims"]


@dataclass
class _DataParallelMeshDims:
    """Names of the mesh dims that FSDP shards over and replicates over; several of a kind act as one."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The sharding dims, as a tuple."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The replicating dims, as a tuple."""
        return _names(self.replicate)


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


if TYPE_CHECKING:
    DataParallelMeshDims = _DataParallelMeshDims
else:
    DataParallelMeshDims = getattr(torch_fsdp, "DataParallelMeshDims", _DataParallelMeshDims)
