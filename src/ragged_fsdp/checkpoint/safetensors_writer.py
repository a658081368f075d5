"""Safetensors files written tensor by tensor, so that memory holds one tensor at a time.

A safetensors file is eight bytes with the length of its header, a JSON header with the type, shape and
place of every tensor, and then the tensors. Types and shapes are known beforehand, so the header can be
written first and the values streamed after it.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["TYPE_NAMES", "TensorToWrite", "write_safetensors"]

TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorToWrite:
    """One tensor of the output; ``group`` names what it is read from."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: str

    @property
    def byte_count(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    folder: Path,
    tensors: Iterable[TensorToWrite],
    read_group: Callable[[str], dict[str, Tensor]],
    *,
    max_file_bytes: int,
) -> list[Path]:
    """Write ``model.safetensors``, or several files and an index if one would be too large.

    ``read_group`` returns all tensors of a group; groups are asked for once each, in order, and never two
    at a time. Files appear under their names when complete.
    """
    tensors = list(tensors)
    counts = Counter(["__metadata__", *(tensor.name for tensor in tensors)])  # the header has a place for it
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"two tensors would have the name {twice[0]!r} in {folder}")
    files = _cut(tensors, max_file_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    names = [_file_name(index, len(files)) for index in range(len(files))]
    for name, content in zip(names, files, strict=True):
        _write_file(folder / name, content, read_group)
    if len(files) > 1:
        placed = {t.name: name for name, content in zip(names, files, strict=True) for t in content}
        total = sum(t.byte_count for content in files for t in content)
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return [folder / name for name in names]


def _cut(tensors: list[TensorToWrite], max_file_bytes: int) -> list[list[TensorToWrite]]:
    """Files of at most ``max_file_bytes``; a group stays together, and one that is larger is a file alone."""
    by_group: dict[str, list[TensorToWrite]] = {}
    for tensor in tensors:
        by_group.setdefault(tensor.group, []).append(tensor)
    files: list[list[TensorToWrite]] = [[]]
    filled = 0
    for members in by_group.values():
        size = sum(t.byte_count for t in members)
        if files[-1] and filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].extend(members)
        filled += size
    return files


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_file(
    path: Path, tensors: list[TensorToWrite], read_group: Callable[[str], dict[str, Tensor]]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        if tensor.dtype not in TYPE_NAMES:
            raise ValueError(f"{tensor.name}: safetensors cannot hold {tensor.dtype}")
        end = start + tensor.byte_count
        place = {
            "dtype": TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        header[tensor.name] = place
        start = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        group: str | None = None
        values: dict[str, Tensor] = {}
        for tensor in tensors:
            if tensor.group != group:
                values = {}  # free the last group before the next is read
                group, values = tensor.group, read_group(tensor.group)
            out.write(_raw_bytes(values.pop(tensor.name), tensor))
    os.replace(temporary, path)


def _raw_bytes(value: Tensor, expected: TensorToWrite) -> bytes:
    if tuple(value.shape) != expected.shape or value.dtype != expected.dtype:
        raise ValueError(
            f"{expected.name}: read {value.dtype} {tuple(value.shape)}, expected {expected.dtype} "
            f"{expected.shape}"
        )
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
