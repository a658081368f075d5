"""What the safetensors files of a folder hold, and where: from their headers, proven against their sizes.

A file is eight bytes with the length of its header, a JSON header with type, shape and place of every tensor,
then the tensors. A folder of several files has an index that says which file holds which tensor.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch

from ragged_fsdp.checkpoint.place import AnyPath
from ragged_fsdp.checkpoint.safetensors_writer import TYPE_NAMES
from ragged_fsdp.checkpoint.store import is_plain_name

__all__ = ["StoredBox", "StoredEntry", "read_header", "safetensors_files"]

_DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class StoredBox:
    """A rectangular part of a stored tensor that lies in one file."""

    file: str
    begin: int
    """The first byte in the file: of the elements, or of the item that holds them."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item_bytes: int | None = None
    """Bytes of an item of ``torch.distributed.checkpoint``; None where the elements themselves begin."""


@dataclass(frozen=True)
class StoredEntry:
    """A stored tensor: its type and shape, and the boxes of it that lie in files."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def safetensors_files(folder: AnyPath) -> dict[str, list[str] | None]:
    """File names, each with the tensors that the index wants of it; None without an index: all of them."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    names = sorted(path.name for path in folder.iterdir())
    indices = [folder / name for name in names if name.endswith(".safetensors.index.json")]
    if len(indices) > 1:
        raise ValueError(f"{folder} has several indices: {[path.name for path in indices]}; expected one")
    if not indices:
        found = [name for name in names if name.endswith(".safetensors")]
        if not found:
            raise ValueError(f"{folder} has no *.safetensors and is no distributed checkpoint (.metadata)")
        return dict.fromkeys(found)
    try:
        placed: dict[str, str] = json.loads(indices[0].read_text())["weight_map"]
        by_file: dict[str, list[str] | None] = {file: [] for file in sorted(set(placed.values()))}
        for name, file in placed.items():
            by_file[file].append(name)  # type: ignore[union-attr]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{indices[0]} is no index of safetensors: {error!r}") from error
    if outside := [file for file in by_file if not is_plain_name(file)]:
        raise ValueError(f"{indices[0]} names {outside[0]!r}, which is not the name of a file in this folder")
    missing = [file for file in by_file if file not in names]
    if missing:
        raise ValueError(
            f"{folder} lacks {missing[0]}, which {indices[0].name} names ({len(missing)} missing)"
        )
    return by_file


def read_header(folder: AnyPath, file: str, wanted: list[str] | None) -> dict[str, StoredEntry]:
    """The tensors of a file by name; ``ValueError`` if it is shorter than its header says, or damaged."""
    path = folder / file
    if not path.is_file():  # to open a pipe would wait for who writes into it
        raise ValueError(f"{path} is no file")
    size = path.stat().st_size
    with path.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if not 2 <= length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise ValueError(
                f"{path} is damaged or no safetensors file: a header of {length} of {size} bytes"
            )
        text = opened.read(length)
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is damaged: {error!r}") from error
    try:
        header.pop("__metadata__", None)
        entries = {name: _entry(path, name, given, _LENGTH_BYTES + length) for name, given in header.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: its header is damaged: {error!r}") from error
    ends = [entry.boxes[0].begin + entry.nbytes for entry in entries.values()]
    end = max(ends, default=_LENGTH_BYTES + length)
    if end > size:
        raise ValueError(f"{path} is truncated: {size} bytes, its header tells of {end}")
    if wanted is None:
        return entries
    for name in wanted:
        if name not in entries:
            raise ValueError(f"{path} has no tensor {name!r}, which the index says it holds")
    return {name: entries[name] for name in wanted}


def _entry(path: AnyPath, name: str, given: dict[str, Any], data: int) -> StoredEntry:
    numbers = (*given["shape"], *given["data_offsets"])
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{path}: {name} has a shape or place that is no whole number: {numbers}")
    if given["dtype"] not in _DTYPES:
        raise ValueError(f"{path}: {name} has the type {given['dtype']}; known are {sorted(_DTYPES)}")
    begin, end = given["data_offsets"]
    shape = tuple(given["shape"])
    whole = StoredBox(path.name, data + begin, (0,) * len(shape), shape)
    entry = StoredEntry(_DTYPES[given["dtype"]], shape, (whole,))
    if end - begin != entry.nbytes:
        raise ValueError(
            f"{path}: {name} has {end - begin} bytes; {entry.dtype} of shape {entry.shape} has {entry.nbytes}"
        )
    return entry
