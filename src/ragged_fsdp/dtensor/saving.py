"""How ragged tensors are saved, copied and loaded: checkpoints, pickles, full state dicts.

A distributed checkpoint knows boxes of the global tensor only, and a piece is a run of its flat order: at
most ``2 * ndim - 1`` boxes (more in the order of tiles), each of them a view of the local tensor. Each rank
writes and reads its own, without communication.

A DTensor that lies inside a larger buffer reports its local tensor's storage offset as its own, and torch
takes a tensor with a non-zero data pointer for one that owns memory. It is pickled and copied as its part
alone, which also keeps the rest of the buffer out of the file. An asynchronous checkpoint stages the buffer
once, for all.

Full state dicts (``set_model_state_dict`` and its relatives) are compared between the ranks before torch
broadcasts them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ragged_fsdp.agreement import compare
from ragged_fsdp.dtensor.construct import own_piece, wrap_local
from ragged_fsdp.dtensor.geometry import is_ragged, ragged_layout, with_placements
from ragged_fsdp.routes import Box
from ragged_fsdp.torch_internals import STOCK, local_of, raise_if_partial, spec_of

__all__ = [
    "BoxWriteItem",
    "claim",
    "create_chunk_list",
    "create_write_items",
    "deepcopy",
    "distribute_state_dict",
    "distribute_tensors",
    "get_tensor_shard",
    "offload_tensor",
    "reduce_ex",
    "split_by_storage_plan",
]


@dataclass(frozen=True)
class BoxWriteItem(WriteItem):
    """One box of a ragged piece; the safetensors writer tells it from what others write."""


def create_chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
    """``DTensor.__create_chunk_list__``: the boxes of a ragged piece."""
    if not is_ragged(self):
        return STOCK["DTensor.__create_chunk_list__"](self)
    raise_if_partial(self)
    return [
        ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
        for offsets, sizes in _boxes(self)
    ]


def _boxes(tensor: DTensor) -> list[Box]:
    """What this rank writes and reads; an empty tensor is one box, or no checkpoint would have its name."""
    if not tensor.numel():
        return [((0,) * tensor.ndim, tuple(tensor.shape))]
    return ragged_layout(tensor).boxes()


def create_write_items(self: DTensor, fqn: str, object: Any) -> list[WriteItem]:
    """``DTensor.__create_write_items__``: one item for each box of a ragged piece."""
    if not is_ragged(self):
        return STOCK["DTensor.__create_write_items__"](self, fqn, object)
    properties = TensorProperties.create_from_tensor(local_of(self))
    return [
        BoxWriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
        )
        for chunk in create_chunk_list(self)
    ]


def get_tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
    """``DTensor.__get_tensor_shard__``: a box of a ragged piece, as a view: loading writes through."""
    if not is_ragged(self):
        return STOCK["DTensor.__get_tensor_shard__"](self, index)
    flat, position = local_of(self).detach().view(-1), 0
    for offsets, sizes in _boxes(self):
        numel = math.prod(sizes)
        if index.offset is None or tuple(index.offset) == offsets:
            return flat[position : position + numel].view(sizes)
        position += numel
    raise ValueError(f"{index.fqn}: no box at offset {index.offset} in this rank's piece of {spec_of(self)}.")


def split_by_storage_plan(
    self: Any, storage_plan: dict[str, int] | None, items: list[WriteItem]
) -> dict[int, list[WriteItem]]:
    """Give each further box of a ragged tensor a safetensors file of its own: it holds one box per name."""
    buckets: dict[int, list[WriteItem]] = {}
    last_index = max(storage_plan.values()) if storage_plan else 1
    for file_index, bucket in STOCK["HuggingFaceStorageWriter._split_by_storage_plan"](
        self, storage_plan, items
    ).items():
        boxes: Counter[str] = Counter()
        for item in bucket:
            further = file_index + boxes[item.index.fqn] * last_index
            buckets.setdefault(further, []).append(item)
            boxes[item.index.fqn] += isinstance(item, BoxWriteItem)
    return buckets


def claim(storage: torch.UntypedStorage) -> None:
    """Note that ``storage`` is memory of ours, in which tensors with any placements lie side by side."""
    storage._of_ragged_fsdp = True  # type: ignore[attr-defined]


def reduce_ex(self: DTensor, proto: Any) -> Any:
    """``DTensor.__reduce_ex__``: pickling and ``torch.save``."""
    return STOCK["DTensor.__reduce_ex__"](_compact(self) if _lies_inside(self) else self, proto)


def deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    """``DTensor.__deepcopy__``."""
    if not _lies_inside(self):
        return STOCK["DTensor.__deepcopy__"](self, memo)
    if id(self) not in memo:
        compact = _compact(self)
        # kept as long as the memo: it is keyed by id, and a freed object's id comes back
        memo.setdefault(id(memo), []).append(compact)
        memo[id(self)] = STOCK["DTensor.__deepcopy__"](compact, memo)
    return memo[id(self)]


def offload_tensor(self: Any, x: Any, memo: dict[int, Any], non_blocking: bool = False) -> Any:
    """``StateDictStager._offload_tensor``: a tensor on the host for an asynchronous checkpoint."""
    if not isinstance(x, DTensor) or not _lies_inside(x):
        return STOCK["StateDictStager._offload_tensor"](self, x, memo, non_blocking=non_blocking)
    # the stager knows storages it has seen: the pieces of a buffer share one copy of it
    local = self.deepcopy_with_tensor_offload(local_of(x), memo, non_blocking=non_blocking)
    memo[id(x)] = staged = DTensor(local, spec_of(x), requires_grad=False)
    return staged


def _lies_inside(tensor: DTensor) -> bool:
    """Whether torch would misread it; ragged tensors are always compacted, for the size of the file."""
    local = local_of(tensor)
    if is_ragged(tensor):
        return local.untyped_storage().nbytes() != local.nbytes
    return bool(local.storage_offset()) and getattr(local.untyped_storage(), "_of_ragged_fsdp", False)


def _compact(tensor: DTensor) -> DTensor:
    """``tensor`` with its attributes and gradient, around a copy of its part."""
    local = local_of(tensor).detach().clone()
    compact = DTensor(local, spec_of(tensor), requires_grad=tensor.requires_grad)
    compact.__dict__.update(tensor.__dict__)
    if tensor.is_leaf:
        compact.grad = tensor.grad
    return compact


def distribute_state_dict(
    full_state_dict: dict[str, Any], local_state_dict: dict[str, Any], device: torch.device, pg: Any = None
) -> None:
    """Load a full state dict that every rank has; torch broadcasts each tensor from the first rank.

    The ranks first compare what they have: a broadcast between tensors of different sizes or dtypes ends the
    process, leaves garbage, or leaves other ranks waiting.
    """
    said: dict[DeviceMesh, list[str]] = {}
    for target in local_state_dict.values():
        if is_ragged(target):
            said.setdefault(target.device_mesh, [])
    pairs: list[Any] = [(key, value, local_state_dict.get(key)) for key, value in full_state_dict.items()]
    for key, value, target in pairs:
        if isinstance(target, DTensor) and target.device_mesh in said and torch.is_tensor(value):
            said[target.device_mesh].append(f"{key} {tuple(value.shape)} {value.dtype}")
    for mesh, lines in said.items():
        _check_same(mesh, lines)
    for key, value, target in pairs:
        if is_ragged(target) and torch.is_tensor(value):
            _check_shape(key, value, target)
    STOCK["_distribute_state_dict"](full_state_dict, local_state_dict, device, pg)


def _check_same(mesh: DeviceMesh, lines: Sequence[str]) -> None:
    """Raise on every rank of ``mesh``, naming the first difference, unless all have the same ``lines``."""
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    found = compare("\n".join(lines), groups, torch.device(mesh.device_type))
    if found is not None:
        raise ValueError(
            f"the ranks do not load the same full state dict, in the same order; {found.difference}."
        )


def _check_shape(key: str, full: torch.Tensor, local: DTensor) -> None:
    """Raise alike on every rank: one that owns nothing of the tensor would go on alone."""
    if full.shape != local.shape:
        raise ValueError(
            f"{key}: the state dict has shape {tuple(full.shape)}, expected {tuple(local.shape)}."
        )


def distribute_tensors(
    local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None
) -> None:
    """Replace each ``(local, full)`` pair by the local tensor holding its part of the full one."""
    others = []
    for key in keys:
        pair: Any = local_state_dict.get(key)
        if isinstance(pair, tuple) and is_ragged(pair[0]):
            local, full = pair
            _check_shape(key, full, local)
            piece = own_piece(full.contiguous(), spec_of(local))
            if local.is_meta:
                target = with_placements(spec_of(local), local.placements, dtype=piece.dtype)
                local_state_dict[key] = wrap_local(piece, target)
            else:
                local_of(local).detach().copy_(piece)
                local_state_dict[key] = local
        else:
            others.append(key)
    if others or not keys:
        STOCK["_distribute_tensors"](local_state_dict, others, device, pg)
