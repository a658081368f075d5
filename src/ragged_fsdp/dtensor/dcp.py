"""Distributed checkpoints: each rank writes and reads its own piece, without communication.

A checkpoint knows boxes of the global tensor only, and a piece is a run of its flat order: at most
``2 * ndim - 1`` boxes, each of them a view of the local tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.geometry import is_ragged, ragged_layout
from ragged_fsdp.torch_internals import local_of, raise_if_partial, spec_of, stock

__all__ = [
    "BoxWriteItem",
    "create_chunk_list",
    "create_write_items",
    "get_tensor_shard",
    "split_by_storage_plan",
]


# Captured before patches.py replaces the names.
_stock_write_items: Any = stock("DTensor.__create_write_items__")
_stock_chunk_list: Any = stock("DTensor.__create_chunk_list__")
_stock_tensor_shard: Any = stock("DTensor.__get_tensor_shard__")
_stock_split: Any = stock("HuggingFaceStorageWriter._split_by_storage_plan")


@dataclass(frozen=True)
class BoxWriteItem(WriteItem):
    """One box of a ragged piece; the safetensors writer tells it from what others write."""


def create_write_items(self: DTensor, fqn: str, object: Any) -> list[WriteItem]:
    """``DTensor.__create_write_items__``: one item for each box of a ragged piece."""
    return _write_items(self, fqn) if is_ragged(spec_of(self)) else _stock_write_items(self, fqn, object)


def create_chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
    """``DTensor.__create_chunk_list__``: the boxes of a ragged piece."""
    return _chunks(self) if is_ragged(spec_of(self)) else _stock_chunk_list(self)


def get_tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
    """``DTensor.__get_tensor_shard__``: one box of a ragged piece, as a view."""
    return _shard_at(self, index) if is_ragged(spec_of(self)) else _stock_tensor_shard(self, index)


def split_by_storage_plan(
    self: Any, storage_plan: dict[str, int] | None, items: list[WriteItem]
) -> dict[int, list[WriteItem]]:
    """Give each further box of a ragged tensor a safetensors file of its own: it holds one box per name."""
    buckets: dict[int, list[WriteItem]] = {}
    last_index = max(storage_plan.values()) if storage_plan else 1
    for file_index, bucket in _stock_split(self, storage_plan, items).items():
        boxes: Counter[str] = Counter()
        for item in bucket:
            further = file_index + boxes[item.index.fqn] * last_index
            buckets.setdefault(further, []).append(item)
            boxes[item.index.fqn] += isinstance(item, BoxWriteItem)
    return buckets


def _chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    raise_if_partial(tensor)
    return [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        for offsets, sizes in ragged_layout(tensor).boxes()
    ]


def _write_items(tensor: DTensor, fqn: str) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(local_of(tensor))
    return [
        BoxWriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in _chunks(tensor)
    ]


def _shard_at(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The box at ``index.offset`` as a view of the local tensor, so that loading writes through."""
    flat, position = local_of(tensor).detach().view(-1), 0
    for offsets, sizes in ragged_layout(tensor).boxes():
        numel = math.prod(sizes)
        if index.offset is None or tuple(index.offset) == offsets:
            return flat[position : position + numel].view(sizes)
        position += numel
    raise ValueError(
        f"{index.fqn}: no box at offset {index.offset} in this rank's piece of {spec_of(tensor)}."
    )
