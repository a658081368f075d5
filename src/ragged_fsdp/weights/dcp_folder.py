"""What a checkpoint of ``torch.distributed.checkpoint`` holds, and where: its index, and the items it names.

A tensor is stored in boxes, one for each rank that held a part of it. Each is an item: a zip file as
``torch.save`` writes it, one behind the other in a file of the checkpoint::

    item    | data.pkl: type, shape, strides | ... | data/0: the elements, uncompressed | ... | directory |
              head, read                             bytes of it are read                       tail, read

The two ends of an item say where its elements begin. So a rank reads the elements that it needs, where
torch's own reader would read every item whole that has one of them.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ragged_fsdp.checkpoint.place import AnyPath
from ragged_fsdp.checkpoint.reading import CheckedReader
from ragged_fsdp.weights.files import StoredBox, StoredEntry
from ragged_fsdp.weights.names import Naming, Stored, View, parts_of
from ragged_fsdp.weights.reading import Files
from ragged_fsdp.weights.targets import Target

__all__ = ["elements_of", "of_run", "read_index"]

_PREFIX = "model."
_END_BYTES = 4096
"""Bytes read of each end of an item; torch's own records take less than half, unless aligned to more."""
_MOST_BYTES = 1 << 16
"""The most of a read between the ends, and of a record but its elements; fill to an alignment is less."""
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Types that ``torch.save`` writes as the class of their storage; others have an untyped one."""
_LOCAL_HEADER = struct.Struct("<26xHH")
"""How a record of a zip file begins: the lengths of its name and of what fills up to its elements."""


def read_index(folder: AnyPath) -> tuple[dict[str, StoredEntry], bool]:
    """The tensors of a checkpoint by name, and whether it holds an optimizer too; its files are checked."""
    metadata = CheckedReader(folder).read_metadata()
    entries = {}
    for name, given in metadata.state_dict_metadata.items():
        if isinstance(given, TensorStorageMetadata):
            boxes = []
            for chunk in given.chunks:
                place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]  # type: ignore[index]
                offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
                boxes.append(StoredBox(place.relative_path, place.offset, offsets, sizes, place.length))
            entries[name] = StoredEntry(given.properties.dtype, tuple(given.size), tuple(boxes))
    return entries, any(name.startswith("optim.") for name in metadata.state_dict_metadata)


def of_run(
    naming: Naming, targets: Sequence[Target], entries: Mapping[str, StoredEntry], *, has_optimizer: bool
) -> tuple[Naming, Mapping[str, StoredEntry]]:
    """The naming, with ``model.`` before all names if the model is stored so, and the entries of the model.

    A model may itself have names that begin with ``model.``: of the two ways to read the folder, the one that
    finds more of its tensors counts, and for all of them.
    """
    held = [(name, target.tensor) for target in targets for name in target.names]
    wanted = {part.stored for name, t in held for part in parts_of(naming, name, tuple(t.shape), t.dtype)}
    plain = entries.keys() & wanted
    found = entries.keys() & {_PREFIX + name for name in wanted}
    if len(found) > len(plain):
        naming = _prefixed(naming)
    else:
        found = plain
    if has_optimizer and found and all(name.startswith(_PREFIX) for name in found):
        entries = {name: entry for name, entry in entries.items() if name.startswith(_PREFIX)}
    return naming, entries


def _prefixed(naming: Naming) -> Naming:
    def prefixed(name: str, tensor: Tensor) -> str | Mapping[Any, Tensor]:
        given = naming(name, tensor)
        if isinstance(given, str):
            return _PREFIX + given
        return {
            Stored(_PREFIX + key.name, key.index) if isinstance(key, Stored) else _PREFIX + key: value
            for key, value in given.items()
        }

    return prefixed


def elements_of(name: str, entry: StoredEntry, box: StoredBox, files: Files) -> tuple[int, View]:
    """The byte of a file at which the storage of an item begins, and where in it the elements lie.

    Raises:
        ValueError: if the item is damaged, or is not the tensor that the index tells of.
    """
    item = _TwoEnds(box, files)
    try:
        begin, dtype, view = _look_into(item)
        if (dtype, view.sizes) != (entry.dtype, box.sizes):
            raise ValueError(f"it has {dtype} of shape {view.sizes}, not {entry.dtype} of shape {box.sizes}")
    except Exception as error:  # damaged bytes can make an unpickler raise anything
        raise ValueError(f"{box.file}: {name} at {box.offsets} is damaged: {error}") from error
    return begin, view


class _TwoEnds(io.RawIOBase):
    """An item as a file of which the two ends are read at once, and little else can be."""

    def __init__(self, box: StoredBox, files: Files) -> None:
        assert box.item_bytes is not None
        self._file, self._files = box.file, files
        self._begin, self.length, self._at = box.begin, box.item_bytes, 0
        self._head = files.read(box.file, box.begin, min(_END_BYTES, self.length))
        self._tail_at = max(len(self._head), self.length - _END_BYTES)
        self._tail = files.read(box.file, box.begin + self._tail_at, self.length - self._tail_at)

    def place(self, at: int) -> int:
        """The byte of the file at which a byte of the item is."""
        return self._begin + at

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self.length if size is None or size < 0 else min(self._at + size, self.length)
        if end <= len(self._head):
            found = self._head[self._at : end]
        elif self._at >= self._tail_at:
            found = self._tail[self._at - self._tail_at : end - self._tail_at]
        elif self._tail_at == len(self._head):
            found = (self._head + self._tail)[self._at : end]
        else:
            if end - self._at > _MOST_BYTES:
                raise ValueError(f"byte {self._at} begins no short record, as torch.save has before elements")
            found = self._files.read(self._file, self.place(self._at), end - self._at)
        self._at = end
        return found


def _look_into(item: _TwoEnds) -> tuple[int, torch.dtype, View]:
    with zipfile.ZipFile(item) as archive:
        stem = next(name for name in archive.namelist() if name.endswith("data.pkl"))[: -len("data.pkl")]
        for short in ("data.pkl", "byteorder"):
            if (unpacked := archive.getinfo(stem + short).file_size) > _MOST_BYTES:
                raise ValueError(f"its {short} has {unpacked} bytes, too many for one tensor")
        found = _TensorUnpickler(io.BytesIO(archive.read(f"{stem}data.pkl"))).load()
        if not isinstance(found, _Tensor):
            raise ValueError("it is no plain tensor")
        if (order := archive.read(f"{stem}byteorder").decode()) != sys.byteorder:
            raise ValueError(f"its elements are {order}-endian")
        record = archive.getinfo(f"{stem}data/{found.key}")
        with archive.open(record):  # its header must be where the directory says, and be of this record
            pass
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its elements are compressed")
    view, steps = found.view, zip(found.view.sizes, found.view.strides)
    last = view.offset + sum((size - 1) * stride for size, stride in steps)
    is_empty = 0 in view.sizes
    if not is_empty and not 0 <= view.offset <= last < record.file_size // found.dtype.itemsize:
        raise ValueError(f"its elements end behind its {record.file_size} bytes")
    if any(stride <= 0 for size, stride in zip(view.sizes, view.strides) if size > 1):
        raise ValueError(f"its strides are {view.strides}")
    item.seek(record.header_offset)
    begin = record.header_offset + 30 + sum(_LOCAL_HEADER.unpack(item.read(_LOCAL_HEADER.size)))
    if begin + record.file_size > item.length:
        raise ValueError(f"{record.file_size} bytes at {begin} do not lie in its {item.length}")
    return item.place(begin), found.dtype, view


class _Tensor:
    """What ``torch.save`` says of a tensor: the record and type of its storage, and its place there."""

    def __init__(
        self, storage: tuple[str, Any], offset: int, sizes: Any, strides: Any, marks: Any = None
    ) -> None:
        self.key, dtype = storage
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"it has the type {dtype!r}")
        self.dtype = dtype
        self.view = View(offset, tuple(sizes), tuple(strides))
        if not all(type(n) is int for n in (offset, *self.view.sizes, *self.view.strides)):
            raise ValueError(f"it has {self.view}")
        if marks:  # a lazy conjugate or negative: the elements are not the values
            raise ValueError(
                f"its elements are stored as {marks}; save it after resolve_conj().resolve_neg()"
            )


class _TensorUnpickler(pickle.Unpickler):
    """Builds nothing but the description of one plain tensor."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, offset, sizes, strides, _, __, marks=None: _Tensor(
                storage, offset, sizes, strides, marks
            )
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):  # of dtypes without a storage class
            return lambda storage, offset, sizes, strides, _, __, dtype, marks=None: _Tensor(
                (storage[0], dtype), offset, sizes, strides, marks
            )
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("torch.storage", "UntypedStorage") or (module == "torch" and name in _STORAGES):
            return name
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        _, storage, key, *_ = pid
        return key, _STORAGES.get(storage)
