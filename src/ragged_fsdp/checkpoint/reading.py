"""Reading checkpoints of ``torch.distributed.checkpoint`` that nobody vouches for.

Its index, ``.metadata``, is a pickle, and so are the values that are no tensors: whoever can write a file of
a checkpoint could run code in each process that loads it. Here the index may build nothing but the records
that torch puts into it, values are loaded with ``weights_only=True``, and before anything is read the whole
index is compared with the files: names that lead out of the folder, places behind the end of a file, pieces
that do not lie in their tensor or do not fill it are refused, each by name.
"""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.futures import Future

from ragged_fsdp.checkpoint.object_files import ObjectFiles
from ragged_fsdp.checkpoint.place import AnyPath, ObjectPath
from ragged_fsdp.checkpoint.store import is_plain_name

__all__ = ["CheckedReader", "load"]

Lengths = tuple[int, ...]

_RECORDS = {
    "torch": {"Size", "strided"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}
"""What an index may build, by module; and the dtypes of torch. None of it acts."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of an index")


class CheckedReader(dcp.FileSystemReader):
    """torch's reader of a folder, or of objects, with an index that is checked, and parsed once."""

    def __init__(self, path: AnyPath) -> None:
        super().__init__(str(path))
        if isinstance(path, ObjectPath):
            self.fs: Any = ObjectFiles()
            self.path: Any = path
        self._folder = path
        self._parsed: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; ``ValueError`` names what is wrong with it."""
        if self._parsed is None:
            file = self._folder / ".metadata"
            if not file.is_file():
                raise ValueError(f"{self._folder} is not a checkpoint: it has no .metadata file")
            try:
                with file.open("rb") as opened:
                    metadata = _IndexUnpickler(opened).load()
                _check_index(self._folder, metadata)
            except Exception as error:  # damaged bytes can make an unpickler raise anything
                raise ValueError(f"{file} is damaged or no index of a checkpoint: {error}") from error
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            self._parsed = metadata
        assert self._parsed.storage_meta is not None
        self._parsed.storage_meta.load_id = self.load_id
        return self._parsed

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """What the plan asks for, file by file; an error names the file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            try:
                super().read_data(replace(plan, items=items), planner)
            except Exception as error:
                raise ValueError(f"{self._folder / name} is damaged: {error}") from error
        done: Future[None] = Future()
        done.set_result(None)
        return done


class _PlainValues(dcp.DefaultLoadPlanner):
    """torch's planner, with values that are numbers, texts and the like: no pickle of theirs is run."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        copied = io.BytesIO()
        torch.save(plain, copied)  # the base class unpickles: what it gets is ours
        copied.seek(0)
        super().load_bytes(read_item, copied)


def load(
    state: dict[str, Any],
    reader: CheckedReader,
    group: dist.ProcessGroup | None = None,
    *,
    alone: bool = False,
) -> None:
    """Fill the tensors of ``state`` in place, each rank reading the parts that its own shards need.

    ``alone`` is for one process that reads for itself. ``ValueError`` on every rank if one cannot read; what
    was read until then has been filled in.
    """
    try:
        dcp.load(state, storage_reader=reader, planner=_PlainValues(), process_group=group, no_dist=alone)
    except dcp.CheckpointException as error:
        failed = sorted(error.failures.items())
        rank, (cause, _) = failed[0]
        where = "" if alone else f" (rank {rank})"
        raise ValueError(f"{cause}{where}") from error


def _check_index(folder: AnyPath, metadata: Any) -> None:
    """Raise unless an index is made as torch makes it, and all it points at is there."""
    if type(metadata) is not Metadata or type(metadata.state_dict_metadata) is not dict:
        raise ValueError("it is no Metadata with entries")
    if not isinstance(metadata.storage_meta, StorageMeta | None):
        raise ValueError(f"storage_meta is {metadata.storage_meta!r}")
    places = metadata.storage_data
    if type(places) is not dict:
        raise ValueError("it does not say where its entries are stored")
    sizes: dict[str, int] = {}
    for index, place in places.items():
        if type(index) is not MetadataIndex or type(index.fqn) is not str:
            raise ValueError(f"{index!r} is no name of an entry")
        _check_place(folder, index.fqn, place, sizes)
    for name, entry in metadata.state_dict_metadata.items():
        if type(name) is not str:
            raise ValueError(f"{name!r} is no name of an entry")
        if type(entry) is TensorStorageMetadata:
            _check_tensor(name, entry, places)
        elif type(entry) is not BytesStorageMetadata:
            raise ValueError(f"{name} is {type(entry).__name__}, neither a tensor nor a value")
        elif MetadataIndex(name) not in places:
            raise ValueError(f"{name} is stored nowhere")


def _check_place(folder: AnyPath, entry: str, place: Any, sizes: dict[str, int]) -> None:
    name, offset, length = (getattr(place, key, None) for key in ("relative_path", "offset", "length"))
    if not is_plain_name(name):
        raise ValueError(f"{entry} is in {name!r}, which is not the name of a file in this folder")
    assert isinstance(name, str)
    if getattr(place, "transform_descriptors", None):
        raise ValueError(f"{entry} is stored through an extension: {place.transform_descriptors!r}")
    if name not in sizes:
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{folder} lacks {name}, which its .metadata names")
        if file.resolve().parent != folder.resolve():
            raise ValueError(f"{file} is a link to {file.resolve()}, out of this folder")
        sizes[name] = file.stat().st_size
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise ValueError(f"{entry} is at {offset!r}, {length!r} bytes long")
    if offset + length > sizes[name]:
        end = offset + length
        raise ValueError(f"{folder / name} is truncated: {sizes[name]} bytes, the metadata tells of {end}")


def _check_tensor(name: str, entry: Any, places: dict[Any, Any]) -> None:
    shape = _lengths(entry.size)
    if shape is None or not isinstance(getattr(entry.properties, "dtype", None), torch.dtype):
        raise ValueError(f"{name} has no valid shape or dtype")
    if type(entry.chunks) is not list:
        raise ValueError(f"{name} has no list of pieces")
    for piece in entry.chunks:
        offsets = _lengths(getattr(piece, "offsets", None))
        sizes = _lengths(getattr(piece, "sizes", None))
        if offsets is None or sizes is None or not len(shape) == len(offsets) == len(sizes):
            raise ValueError(f"{name} of shape {shape} has a piece of {sizes} at {offsets}")
        if any(start + size > end for start, size, end in zip(offsets, sizes, shape)):
            raise ValueError(f"{name} of shape {shape} has a piece of {sizes} at {offsets}, outside of it")
        if MetadataIndex(name, offsets) not in places:
            raise ValueError(f"{name}: its piece at {offsets} is stored nowhere")
    pieces = {(tuple(piece.offsets), tuple(piece.sizes)) for piece in entry.chunks if math.prod(piece.sizes)}
    if twice := _overlap(pieces):  # what lies in two may be missing elsewhere
        raise ValueError(f"{name} of shape {shape} has pieces at {twice[0]} and {twice[1]} that overlap")
    held = sum(math.prod(sizes) for _, sizes in pieces)
    if held < math.prod(shape):  # as of one rank that saved its shards alone
        raise ValueError(f"{name} of shape {shape} has pieces of {held} elements, not of all")


def _overlap(pieces: set[tuple[Lengths, Lengths]]) -> tuple[Lengths, Lengths] | None:
    """The offsets of two pieces that have elements in common, None if no two have.

    Along the dim with the most cuts a piece meets few others: a thousand ranks write a thousand pieces.
    """
    offsets = [at for at, _ in pieces]
    dims = range(len(offsets[0]) if offsets else 0)
    if not dims:
        return None
    dim = max(dims, key=lambda d: len({at[d] for at in offsets}))
    before: list[tuple[Lengths, Lengths]] = []
    for at, sizes in sorted(pieces, key=lambda piece: piece[0][dim]):
        before = [(other, its) for other, its in before if other[dim] + its[dim] > at[dim]]
        for other, its in before:
            if all(a < b + m and b < a + n for a, n, b, m in zip(at, sizes, other, its)):
                return other, at
        before.append((at, sizes))
    return None


def _lengths(given: Any) -> Lengths | None:
    """``given`` as lengths, None if it is something else."""
    if not isinstance(given, torch.Size | tuple | list):
        return None
    return tuple(given) if all(type(length) is int and length >= 0 for length in given) else None
