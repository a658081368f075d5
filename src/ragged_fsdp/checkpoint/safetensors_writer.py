"""Safetensors files written tensor by tensor, so that memory holds one tensor at a time.

A safetensors file is eight bytes with the length of its header, a JSON header with the type, shape and
place of every tensor, and then the tensors. Types and shapes are known beforehand, so the header can be
written first and the values streamed after it.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
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
    """One tensor of the output."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def byte_count(self) -> int:
        """Bytes of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    folder: Path,
    tensors: Iterable[TensorToWrite],
    values: Iterator[tuple[str, Tensor]],
    *,
    max_file_bytes: int,
) -> list[Path]:
    """Write ``model.safetensors``, or several files and an index if one would be too large.

    ``values`` are the tensors in their order, each asked for when the one before has been written. Files
    appear under their names when complete.
    """
    tensors = list(tensors)
    counts = Counter(["__metadata__", *(tensor.name for tensor in tensors)])  # the header has a place for it
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"two tensors would have the name {twice[0]!r} in {folder}")
    files = _cut(tensors, max_file_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    names = [_file_name(index, len(files)) for index in range(len(files))]
    for name, content in zip(names, files, strict=True):
        _write_file(folder / name, content, values)
    if more := next(values, None):
        raise ValueError(f"{more[0]}: one tensor more than the {len(tensors)} that were to be written")
    if len(files) > 1:
        placed = {t.name: name for name, content in zip(names, files, strict=True) for t in content}
        total = sum(t.byte_count for content in files for t in content)
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return [folder / name for name in names]


def _cut(tensors: list[TensorToWrite], max_file_bytes: int) -> list[list[TensorToWrite]]:
    """Files of at most ``max_file_bytes``; a tensor that is larger is a file alone."""
    files: list[list[TensorToWrite]] = [[]]
    filled = 0
    for tensor in tensors:
        if files[-1] and filled + tensor.byte_count > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += tensor.byte_count
    return files


def _file_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _write_file(path: Path, tensors: list[TensorToWrite], values: Iterator[tuple[str, Tensor]]) -> None:
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
        for tensor in tensors:
            found = next(values, None)
            if found is None:
                raise ValueError(f"{tensor.name}: it was to be written, and there are no more values")
            out.write(_raw_bytes(*found, tensor))
    os.replace(temporary, path)


def _raw_bytes(name: str, value: Tensor, expected: TensorToWrite) -> bytes:
    found = TensorToWrite(name, tuple(value.shape), value.dtype)
    if found != expected:
        raise ValueError(f"{expected.name}: read {found}, expected {expected}")
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
