"""Distributed checkpoints: each rank writes and reads its own piece, without communication.

A checkpoint knows boxes of the global tensor only, and a piece is a run of its flat order: at most
``2 * ndim - 1`` boxes, each of them a view of the local tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ragged_fsdp.dtensor.geometry import is_ragged, ragged_layout

__all__ = ["install"]


def install() -> None:
    """Teach DTensor's checkpoint protocol, and the safetensors writer, about ragged pieces."""
    _patch_protocol()
    _patch_safetensors_writer()


def _patch_protocol() -> None:
    write_items = DTensor.__create_write_items__
    chunk_list = DTensor.__create_chunk_list__
    tensor_shard = DTensor.__get_tensor_shard__

    def create_write_items(self: DTensor, fqn: str, object: Any) -> list[WriteItem]:
        return _write_items(self, fqn) if is_ragged(self._spec) else write_items(self, fqn, object)

    def create_chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
        return _chunks(self) if is_ragged(self._spec) else chunk_list(self)

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        return _shard_at(self, index) if is_ragged(self._spec) else tensor_shard(self, index)

    DTensor.__create_write_items__ = create_write_items  # type: ignore[method-assign]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[method-assign]


def _patch_safetensors_writer() -> None:
    """Give each further box of a tensor a file of its own: a file holds one box per name."""
    stock = HuggingFaceStorageWriter._split_by_storage_plan

    def split(
        self: HuggingFaceStorageWriter, storage_plan: dict[str, int] | None, items: list[WriteItem]
    ) -> dict[int, list[WriteItem]]:
        buckets: dict[int, list[WriteItem]] = {}
        last_index = max(storage_plan.values()) if storage_plan else 1
        for file_index, bucket in stock(self, storage_plan, items).items():
            seen: Counter[str] = Counter()
            for item in bucket:
                further = file_index + seen[item.index.fqn] * last_index
                buckets.setdefault(further, []).append(item)
                seen[item.index.fqn] += 1
        return buckets

    HuggingFaceStorageWriter._split_by_storage_plan = split  # type: ignore[method-assign]


def _chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    tensor._raise_if_contains_partial_placements()
    return [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        for offsets, sizes in ragged_layout(tensor).boxes()
    ]


def _write_items(tensor: DTensor, fqn: str) -> list[WriteItem]:
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
        )
        for chunk in _chunks(tensor)
    ]


def _shard_at(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The box at ``index.offset`` as a view of the local tensor, so that loading writes through."""
    flat, position = tensor._local_tensor.detach().view(-1), 0
    for offsets, sizes in ragged_layout(tensor).boxes():
        numel = math.prod(sizes)
        if index.offset is None or tuple(index.offset) == offsets:
            return flat[position : position + numel].view(sizes)
        position += numel
    raise ValueError(f"{index.fqn}: no box at offset {index.offset} in this rank's piece of {tensor._spec}.")
