"""Which reads give each tensor of a model the elements that this rank holds, and who sends what to whom.

A stored tensor lies in files in boxes: one in safetensors, one for each rank that wrote it in a checkpoint of
``torch.distributed``. What a rank needs of a box are runs of bytes (``spans``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ragged_fsdp.checkpoint.place import AnyPath
from ragged_fsdp.dbuffer.checks import device_of
from ragged_fsdp.routes import Region, contiguous_stride
from ragged_fsdp.torch_internals import storage_id
from ragged_fsdp.weights.dcp_folder import elements_of
from ragged_fsdp.weights.files import StoredBox, StoredEntry
from ragged_fsdp.weights.names import Naming, OutsidePart, View, parts_of
from ragged_fsdp.weights.reading import CHUNK_BYTES, Files, Progress, read_jobs
from ragged_fsdp.weights.spans import StoredPiece, Transfer, jobs_of, transfers
from ragged_fsdp.weights.targets import Target, local_flat, region_of, replicate_dims

__all__ = ["Plan", "keep_part"]

_ITEMS_AT_A_TIME = 8


@dataclass(frozen=True)
class _Want:
    """A box of a stored tensor of which this rank needs elements."""

    shape: tuple[int, ...]
    region: Region
    """What this rank holds of a tensor of this shape."""
    model: View
    """Where the elements of the box lie in that tensor."""
    stored: str
    entry: StoredEntry
    box: StoredBox
    index: Any
    """Which elements of the box, as indexing gives them."""

    def transfers(self, elements: View) -> list[Transfer]:
        """What to copy if the box has its elements there; ``ValueError`` if that is no strided view."""
        model = (self.model.offset, self.model.sizes, self.model.strides)
        if self.index != ():
            whole = torch.empty_strided(elements.sizes, elements.strides, device="meta")
            probe = whole[self.index]
            # a list of rows makes a copy, whose strides are not the file's; inference mode knows no base
            if storage_id(probe.untyped_storage()) != storage_id(whole.untyped_storage()):
                raise ValueError(f"{self.stored}[{self.index!r}] is no view")
            elements = View(elements.offset + int(probe.storage_offset()), tuple(probe.shape), probe.stride())
        return list(transfers(self.shape, self.region, model, (elements.offset, elements.strides)))

    def pieces(self, files: Files, target: int, source: int) -> list[StoredPiece]:
        """The runs of bytes to read for a target, by their numbers."""
        begin, elements = self.box.begin, _row_major(self.box.sizes)
        if self.box.item_bytes is not None:
            begin, elements = elements_of(self.stored, self.entry, self.box, files)
        item = self.entry.dtype.itemsize
        return [StoredPiece(self.box.file, begin, item, target, source, t) for t in self.transfers(elements)]


def _row_major(sizes: tuple[int, ...]) -> View:
    """All of a contiguous tensor; without torch, since a checkpoint of many ranks has many boxes."""
    return View(0, sizes, contiguous_stride(sizes))


def _wants(
    shape: tuple[int, ...], region: Region, view: View, stored: str, entry: StoredEntry, index: Any = ()
) -> list[_Want]:
    """The boxes of a stored tensor with elements that this rank needs; ``ValueError`` as of ``transfers``.

    ``view`` is where the indexed elements lie in the model's tensor of ``shape``. An index is for tensors
    that are stored in one box.
    """
    found = []
    for box in entry.boxes:
        model = view
        if index == ():
            first = view.offset + sum(at * step for at, step in zip(box.offsets, view.strides))
            model = View(first, box.sizes, view.strides)
        found.append(_Want(shape, region, model, stored, entry, box, index))
    return [want for want in found if want.transfers(_row_major(want.box.sizes))]


@dataclass(frozen=True)
class _Computed:
    """A target whose stored parts are no views of it: all of them are read, and this rank's part is kept."""

    name: str
    """The name by which its naming is asked."""
    parts: list[OutsidePart]
    pieces: list[StoredPiece]
    """Reads of all parts, each into a tensor of its own."""


@dataclass
class Plan:
    """What this rank reads, for each of its targets, and what it gets from other ranks."""

    folder: AnyPath
    entries: Mapping[str, StoredEntry]
    targets: Sequence[Target]
    naming: Naming
    broadcast: bool
    missing: list[str] = field(default_factory=list)
    found: int = 0

    def __post_init__(self) -> None:
        self._pieces: list[StoredPiece] = []
        self._dtypes: list[torch.dtype] = []
        """Dtypes of the stored tensors that pieces come from."""
        self._computed: dict[int, _Computed] = {}
        self._owners: dict[int, tuple[list[int], tuple[int, ...]]] = {}
        self._loads: dict[Any, list[int]] = {}
        self._wants: list[tuple[list[StoredPiece], _Want, int, int]] = []
        wanted: set[str] = set()
        lines = [f"broadcast {self.broadcast}"]
        for index, target in enumerate(self.targets):
            shape, dtype = tuple(target.tensor.shape), target.tensor.dtype
            options = {name: parts_of(self.naming, name, shape, dtype) for name in target.names}
            wanted.update(part.stored for parts in options.values() for part in parts)
            name = self._stored_name(options)
            if name is None:
                self.missing.append(target.name)
                continue
            self.found += 1
            for part in options[name]:
                self._check(name, target.tensor, part)
            given = sum(math.prod(part.shape) for part in options[name])
            if target.tensor.is_meta and given < target.tensor.numel():
                raise ValueError(
                    f"{name}: names= gives {given} of its {target.tensor.numel()} elements; the others would "
                    "have no values: on the meta device"
                )
            lines.append(f"{target.name} {shape} {dtype}")
            if self._reads(index, target.tensor):
                self._add(index, name, options[name])
        self._wants.sort(key=lambda want: want[1].box.file)  # or files would be opened again and again
        with Files(self.folder) as files, ThreadPoolExecutor(_ITEMS_AT_A_TIME, "weights") as pool:
            found = pool.map(lambda want: want[1].pieces(files, *want[2:]), self._wants)
            for (into, *_), pieces in zip(self._wants, found):
                into += pieces
        self.unexpected = sorted(self.entries.keys() - wanted)
        self.description = "\n".join(lines)

    def _stored_name(self, options: Mapping[str, list[OutsidePart]]) -> str | None:
        """The first of a target's names under which the folder has all its parts; None if it has none."""
        for name, parts in options.items():
            lacking = [part.stored for part in parts if part.stored not in self.entries]
            if not lacking:
                return name
            if len(lacking) < len(parts):
                raise ValueError(
                    f"{self.folder} has no tensor {lacking[0]!r}, needed for a part of the model's {name!r}"
                )
        return None

    def _check(self, name: str, tensor: Tensor, part: OutsidePart) -> None:
        entry = self.entries[part.stored]
        where = self.folder / entry.boxes[0].file if len(entry.boxes) == 1 else self.folder
        shape = entry.shape
        if part.index != ():
            shape = tuple(torch.empty(shape, device="meta")[part.index].shape)
        if shape != part.shape:
            raise ValueError(
                f"{where}: {part.stored} has shape {shape}; {part.shape} is expected for the model's {name}"
            )
        kinds = [dtype.is_floating_point and dtype.itemsize > 1 for dtype in (entry.dtype, tensor.dtype)]
        if entry.dtype != tensor.dtype and not all(kinds):
            raise ValueError(
                f"{where}: {part.stored} is stored as {entry.dtype}; the model's {name} is "
                f"{tensor.dtype}, which it cannot be cast to; codes need their scales: dequantise them first"
            )
        if part.index != () and len(entry.boxes) > 1:
            raise ValueError(
                f"{where}: {part.stored} is stored in {len(entry.boxes)} boxes, and names= takes a part of "
                f"it for the model's {name}; only of a tensor that is stored as one can parts be taken"
            )

    def _reads(self, index: int, tensor: Tensor) -> bool:
        """Whether this rank reads the target; of ranks that hold it alike, the one with least to do does."""
        dims = replicate_dims(tensor) if self.broadcast else []
        if not dims:
            return True
        mesh = tensor.device_mesh  # type: ignore[attr-defined]  # a DTensor
        sizes = [mesh.size(dim) for dim in dims]
        loads = self._loads.setdefault((mesh, tuple(dims)), [0] * math.prod(sizes))
        owner = loads.index(min(loads))
        loads[owner] += tensor.numel()  # of the whole tensor: all ranks must come to the same
        place: list[int] = []
        for size in reversed(sizes):
            owner, at = divmod(owner, size)
            place.insert(0, at)
        self._owners[index] = (dims, tuple(place))
        coordinate = mesh.get_coordinate()
        return all(coordinate[dim] == at for dim, at in zip(dims, place))

    def _add(self, index: int, name: str, parts: list[OutsidePart]) -> None:
        target = self.targets[index]
        region, shape = region_of(target.name, target.tensor), tuple(target.tensor.shape)
        local_flat(target.name, target.tensor)
        wants: list[_Want] = []
        for part in parts:
            try:
                if part.view is None:
                    raise ValueError("computed")
                entry = self.entries[part.stored]
                wants += _wants(shape, region, part.view, part.stored, entry, part.index)
            except ValueError:
                self._add_computed(index, name, parts)
                return
        for want in wants:
            self._wants.append((self._pieces, want, index, len(self._dtypes)))
            self._dtypes.append(want.entry.dtype)

    def _add_computed(self, index: int, name: str, parts: list[OutsidePart]) -> None:
        made = self._computed[index] = _Computed(name, parts, [])
        for number, part in enumerate(parts):
            entry = self.entries[part.stored]
            everything: Region = (((0,) * len(entry.shape), entry.shape),)
            for want in _wants(entry.shape, everything, _row_major(entry.shape), part.stored, entry):
                self._wants.append((made.pieces, want, number, number))

    def read(self, tensors: Sequence[Tensor], threads: int, progress: Progress) -> int:
        """Fill what this rank reads; returns the bytes."""
        flat = [local_flat(target.name, tensor) for target, tensor in zip(self.targets, tensors)]
        jobs = jobs_of(self._pieces, CHUNK_BYTES)
        more = {index: jobs_of(made.pieces, CHUNK_BYTES) for index, made in self._computed.items()}
        done, total = 0, sum(job.end - job.begin for each in (jobs, *more.values()) for job in each)

        def report(read: int) -> None:
            progress(done + read, total)

        done += read_jobs(self.folder, jobs, flat, self._dtypes, threads=threads, progress=report)
        for index, made in self._computed.items():
            entries = [self.entries[part.stored] for part in made.parts]
            stored = [torch.empty(math.prod(entry.shape), dtype=entry.dtype) for entry in entries]
            dtypes = [entry.dtype for entry in entries]
            done += read_jobs(self.folder, more[index], stored, dtypes, threads=threads, progress=report)
            whole = [tensor.view(entry.shape) for tensor, entry in zip(stored, entries)]
            self._compute(made, tensors[index], whole)
        return done

    def _compute(self, made: _Computed, tensor: Tensor, stored: Sequence[Tensor]) -> None:
        """Keep this rank's part of a target that is computed from its stored parts.

        Where each stored element belongs is what the naming makes of the numbers 0, 1, 2, ...
        """
        numbers = torch.arange(tensor.numel()).view(tensor.shape)
        places: Any = self.naming(made.name, numbers)
        full = torch.empty(tensor.numel(), dtype=tensor.dtype)
        for place, part, value in zip(places.values(), made.parts, stored):
            full[place.flatten()] = value[part.index].flatten().to(full.dtype)
        keep_part(made.name, tensor, full)

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Send what this rank read to those that hold the same; the order is that of the targets, on all."""
        for index, (dims, place) in self._owners.items():
            tensor: Any = tensors[index]
            mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
            local = local_flat(self.targets[index].name, tensor).view(torch.uint8)
            device = device_of(mesh)
            if not local.numel():
                continue
            for k, dim in enumerate(dims):
                if any(coordinate[d] != at for d, at in zip(dims[k + 1 :], place[k + 1 :])):
                    continue  # the later dims bring it here
                sent = local.to(device)  # offloaded weights lie where the group cannot send from
                dist.broadcast(sent, group=mesh.get_group(dim), group_src=place[k])
                if sent is not local:
                    local.copy_(sent)


def keep_part(name: str, tensor: Tensor, full: Tensor) -> None:
    """Write this rank's part of a whole tensor."""
    flat, start = local_flat(name, tensor), 0
    for offsets, sizes in region_of(name, tensor):
        box = full.view(tensor.shape)[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]
        flat.narrow(0, start, box.numel()).copy_(box.reshape(-1))
        start += box.numel()
