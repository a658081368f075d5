"""``load``: give a sharded model the weights of a folder, every rank reading only the bytes that it holds.

1. Rank by rank the headers of the files are read and checked, and every rank gets all of them.
2. Each rank plans: which stored tensors its own tensors are made of, which elements of these it holds, in
   which runs of bytes they lie. What is missing, unexpected or of another shape is found here.
3. The ranks compare. If one of them cannot go on, all raise, and nothing has changed.
4. Tensors on the meta device get memory; every rank reads.
5. What several ranks hold alike was read by one of them, another one for each tensor, and is broadcast.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from ragged_fsdp.agreement import compare, together
from ragged_fsdp.dbuffer.checks import device_of
from ragged_fsdp.weights import dcp_folder
from ragged_fsdp.weights.adapters import Adapters, fresh
from ragged_fsdp.weights.files import Entry, read_header, safetensors_files
from ragged_fsdp.weights.names import Naming, Part, View, default_naming, ignored_unexpected, parts_of
from ragged_fsdp.weights.reading import CHUNK_BYTES, read_jobs
from ragged_fsdp.weights.spans import Job, Piece, Transfer, jobs_of, transfers
from ragged_fsdp.weights.targets import (
    Target,
    local_flat,
    materialize_meta,
    region_of,
    replicate_dims,
    targets_of,
    uninitialised_buffers,
)

__all__ = ["LoadReport", "load"]

Progress = Callable[[int, int], None]
_COMPUTES = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "bias")
"""Settings of an adapter that say what is made of its tensors."""
_SHOWN = 5  # names of an error; the rest is counted


@dataclass(frozen=True)
class LoadReport:
    """What a load did on this rank."""

    tensors: int
    """Tensors of the model that have weights from the folder."""
    bytes_read: int
    """Bytes that this rank read of tensors; without headers."""
    seconds: float
    missing: tuple[str, ...]
    """Tensors of the model that the folder does not have; they are as they were."""
    unexpected: tuple[str, ...]
    """Tensors of the folder that the model does not have."""


def load(
    model: nn.Module,
    folder: str | Path,
    *,
    names: Naming | Mapping[str, str] | None = None,
    strict: bool | Literal["missing"] = True,
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], Any] | None = None,
    broadcast: bool = True,
    threads: int | None = None,
    progress: bool | Progress = False,
    group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Give ``model`` the weights in ``folder``: safetensors, or a checkpoint of ``torch.distributed``.

    All ranks of ``group`` call it with the same model, sharded in any way: each reads only what it holds.
    A model with PEFT's adapters takes folders of the plain model, and those that PEFT writes of an adapter.
    Elements are cast to the dtype of the parameter. Tied parameters are read once, under whichever of their
    names is stored. A model on the meta device gets memory first.

    Args:
        names: how the folder names the model's tensors, and cuts them (``docs/weights.md``); default is what
            transformers does for its models, and the model's own names for others.
        strict: False lets tensors be missing, which then keep their values, or be left over;
            ``"missing"`` lets them be left over only.
        device: where tensors of the meta device go; default is the device of their mesh.
        init: gives values to the buffers of a module on the meta device that no checkpoint holds; default is
            the model's own ``_init_weights`` if it has one.
        broadcast: whether what several ranks hold alike is read by one of them and sent to the others.
        threads: reads at a time on each rank; default is eight between the ranks of a machine, at least two.
        progress: True shows a bar on rank 0; a function is called with the bytes read so far and in all.
        group: the ranks that load; default is all. Stages of a pipeline pass their own, and ``"missing"``.

    Raises:
        ValueError: on every rank, before anything changes, if a tensor is missing, unexpected or of another
            shape or kind, or if a file is missing, truncated or damaged.
    """
    began = time.perf_counter()
    folder = Path(folder)
    ranks = _Ranks(group)
    for module in model.modules():
        if isinstance(module, TorchFSDPModule):
            module.reshard()  # what is gathered would keep the old values
    adapters = Adapters(model, merging=False)
    init = init or getattr(adapters.base, "_init_weights", None)
    kind = ranks.first(lambda: _kind(folder))
    targets, naming = _wanted(model, adapters, kind, names)
    plan: _Plan | dcp_folder.DcpPlan
    if kind == "dcp":
        stored = ranks.first(lambda: dcp_folder.read(folder))
        plan = ranks.agreed(lambda: dcp_folder.DcpPlan(folder, stored, targets, naming))
    else:
        entries = _headers(folder, ranks)
        plan = ranks.agreed(lambda: _Plan(folder, entries, targets, naming, broadcast))
    ignored = (
        ignored_unexpected(adapters.base) if kind != "adapter" else (lambda name: ".base_layer." in name)
    )
    unexpected = tuple(name for name in plan.unexpected if not ignored(name))
    drawn = _drawn(model, targets) if kind == "plain" else {}
    if kind == "adapter" and strict:
        ranks.refuse(_other_adapter(model, folder, ranks.first(lambda: _adapter_config(folder))))
    ranks.refuse(_complaint(folder, plan, unexpected, strict, model, init, drawn))
    materialize_meta(model, device, init)
    held = {target.name: target.tensor for target in targets_of(model)}
    for name, value in drawn.items():
        _keep_part(name, held[name], value)
    tensors = [held[target.name] for target in targets]
    if threads is None:
        hosts = ranks.each(socket.gethostname)
        threads = max(2, 8 // hosts.count(hosts[ranks.rank]))
    show = _bar(progress, ranks.rank)
    if isinstance(plan, dcp_folder.DcpPlan):
        read = plan.run(tensors, ranks.group)
    else:
        read = ranks.all_done(lambda: plan.read(tensors, threads, show))
        plan.share(tensors)
    return LoadReport(plan.found, read, time.perf_counter() - began, tuple(plan.missing), unexpected)


def _kind(folder: Path) -> str:
    """What a folder holds: a distributed checkpoint, an adapter that PEFT wrote, or plain weights."""
    if (folder / ".metadata").exists():
        return "dcp"
    return "adapter" if (folder / "adapter_config.json").exists() else "plain"


def _adapter_config(folder: Path) -> dict[str, Any]:
    """The settings of an adapter that PEFT wrote."""
    try:
        return dict(json.loads((folder / "adapter_config.json").read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'adapter_config.json'} is damaged: {error}") from error


def _other_adapter(model: Any, folder: Path, stored: Mapping[str, Any]) -> str | None:
    """Why the model's active adapter does not compute what the stored one does, or None."""
    active = getattr(model, "active_adapter", None)
    config = getattr(model, "peft_config", {}).get(active if isinstance(active, str) else None)
    for key in _COMPUTES if config is not None else ():
        if key in stored and hasattr(config, key) and (stored[key] or None) != (getattr(config, key) or None):
            return (
                f"{folder} is of an adapter with {key} = {stored[key]!r}; the model's {active!r} has "
                f"{getattr(config, key)!r}, and would compute something else with these weights"
            )
    return None


def _wanted(
    model: nn.Module, adapters: Adapters, kind: str, names: Naming | Mapping[str, str] | None
) -> tuple[list[Target], Naming]:
    """The tensors that such a folder has, and their names there."""
    targets = targets_of(model)
    if kind == "dcp":
        return targets, (lambda name, tensor: name) if names is None else default_naming(model, names)
    if kind == "adapter":
        held = [target for target in targets if adapters.in_adapter(target.name) is not None]
        return held or targets, lambda name, tensor: adapters.in_adapter(name) or name
    naming = default_naming(adapters.base, names)
    held = [target for target in targets if adapters.loaded(target.name) is not None]
    return held, lambda name, tensor: naming(adapters.loaded(name) or name, tensor)


def _drawn(model: nn.Module, loaded: Sequence[Target]) -> dict[str, Tensor]:
    """First values of adapters on the meta device, which a folder of the plain model does not have."""
    configs = getattr(model, "peft_config", {}).values()
    if any(getattr(config, "init_lora_weights", None) is not True for config in configs):
        return {}  # made from the weights
    names = {target.name for target in loaded}
    left = [t for t in targets_of(model) if t.name not in names and t.tensor.is_meta]
    values = {target.name: fresh(target.name, tuple(target.tensor.shape)) for target in left}
    return {name: value for name, value in values.items() if value is not None}


def _keep_part(name: str, tensor: Tensor, full: Tensor) -> None:
    """Write this rank's part of a whole tensor."""
    flat, start = local_flat(name, tensor), 0
    for offsets, sizes in region_of(name, tensor):
        box = full.view(tensor.shape)[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]
        flat.narrow(0, start, box.numel()).copy_(box.reshape(-1))
        start += box.numel()


class _Ranks:
    """The ranks that load together; one rank alone needs no process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = not dist.is_initialized()
        self.group = None if alone else group or dist.group.WORLD
        self.rank, self.size = (
            (0, 1) if alone else (dist.get_rank(self.group), dist.get_world_size(self.group))
        )

    def each(self, action: Callable[[], Any]) -> list[Any]:
        """What every rank's ``action`` returned; an error of one is raised on all."""
        return [action()] if self.size == 1 else together(action, self.group)

    def first(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returned on the first rank."""
        return self.each(lambda: action() if self.rank == 0 else None)[0]

    def agreed(self, make: Callable[[], Any]) -> Any:
        """The plan, of which every rank must make the same."""
        plan: Any = None
        failure: Exception | None = None
        try:
            plan = make()
        except Exception as error:
            failure = error
        self._compare(plan.description if plan is not None else "", failure)
        return plan

    def refuse(self, complaint: str | None) -> None:
        """Raise on every rank if there is a complaint on one."""
        self._compare("", ValueError(complaint) if complaint else None)

    def all_done(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returned on this rank, once it has succeeded on all."""
        result = None
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        self._compare("", failure)
        return result

    def _compare(self, text: str, failure: Exception | None) -> None:
        found = None
        if self.group is not None and self.size > 1:
            told = f"{type(failure).__name__}: {failure}" if failure is not None else None
            found = compare(text, [self.group], _device_for(self.group), failure=told)
        if failure is not None:
            raise failure
        if found is not None and found.failures:
            rank, told = found.failures[0]
            raise ValueError(f"rank {rank} cannot load: {told}")
        if found is not None:
            raise ValueError(f"the ranks do not load the same: {found.difference}")


def _device_for(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor lies that the group's backend moves."""
    backend = dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _headers(folder: Path, ranks: _Ranks) -> dict[str, Entry]:
    """Every stored tensor; each rank reads the headers of its share of the files."""
    files: dict[str, list[str] | None] = ranks.first(lambda: safetensors_files(folder))
    mine = list(files.items())[ranks.rank :: ranks.size]
    found = ranks.each(lambda: [read_header(folder, file, wanted) for file, wanted in mine])
    entries: dict[str, Entry] = {}
    for header in (header for part in found for header in part):
        for name, entry in header.items():
            if name in entries:
                raise ValueError(f"{folder}: {entries[name].file} and {entry.file} both hold {name!r}")
            entries[name] = entry
    return entries


@dataclass
class _Plan:
    """What this rank reads, for each of its targets, and what it gets from other ranks."""

    folder: Path
    entries: dict[str, Entry]
    targets: Sequence[Target]
    naming: Naming
    broadcast: bool
    missing: list[str] = field(default_factory=list)
    found: int = 0

    def __post_init__(self) -> None:
        self._pieces: list[Piece] = []
        self._sources: list[str] = []
        self._whole: dict[int, tuple[str, list[Part]]] = {}
        """Targets whose stored parts are no views of them, by index: the name there, and the parts."""
        self._owners: dict[int, tuple[list[int], tuple[int, ...]]] = {}
        self._loads: dict[Any, list[int]] = {}
        wanted: set[str] = set()
        lines = []
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
            lines.append(f"{target.name} {tuple(target.tensor.shape)} {target.tensor.dtype}")
            if self._reads(index, target.tensor):
                self._add(index, target, name, options[name])
        self.unexpected = sorted(self.entries.keys() - wanted)
        self.description = "\n".join(lines)

    def _stored_name(self, options: Mapping[str, list[Part]]) -> str | None:
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

    def _check(self, name: str, tensor: Tensor, part: Part) -> None:
        entry = self.entries[part.stored]
        shape = tuple(torch.empty(entry.shape, device="meta")[part.index].shape)
        if shape != part.shape:
            raise ValueError(
                f"{entry.file}: {part.stored} has shape {shape}; {part.shape} is expected "
                f"for the model's {name}"
            )
        kinds = [dtype.is_floating_point and dtype.itemsize > 1 for dtype in (entry.dtype, tensor.dtype)]
        if entry.dtype != tensor.dtype and not all(kinds):
            raise ValueError(
                f"{entry.file}: {part.stored} is stored as {entry.dtype}; the model's {name} is "
                f"{tensor.dtype}, which it cannot be cast to; codes need their scales: dequantise them first"
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

    def _add(self, index: int, target: Target, name: str, parts: list[Part]) -> None:
        tensor = target.tensor
        region, shape = region_of(target.name, tensor), tuple(tensor.shape)
        local_flat(target.name, tensor)
        pieces = []
        for part in parts:
            entry = self.entries[part.stored]
            indexed = View.of(torch.empty(entry.shape, device="meta")[part.index])
            try:
                if part.view is None:
                    raise ValueError("computed")
                view = part.view
                found = list(
                    transfers(
                        shape,
                        region,
                        (view.offset, view.sizes, view.strides),
                        (indexed.offset, indexed.strides),
                    )
                )
            except ValueError:
                self._whole[index] = (name, parts)
                return
            self._sources.append(part.stored)
            source, item = len(self._sources) - 1, entry.dtype.itemsize
            pieces += [Piece(entry.file, entry.start, item, index, source, transfer) for transfer in found]
        self._pieces += pieces

    def jobs(self) -> list[Job]:
        """The reads of this rank."""
        return jobs_of(self._pieces, CHUNK_BYTES)

    def read(self, tensors: Sequence[Tensor], threads: int, progress: Progress) -> int:
        """Fill what this rank reads; returns the bytes."""
        flat = [local_flat(target.name, tensor) for target, tensor in zip(self.targets, tensors)]
        dtypes = [self.entries[name].dtype for name in self._sources]
        jobs = self.jobs()
        read = read_jobs(self.folder, jobs, flat, dtypes, threads=threads, progress=progress)
        for index, (name, parts) in self._whole.items():
            read += self._read_whole(name, tensors[index], parts)
        return read

    def _read_whole(self, name: str, tensor: Tensor, parts: list[Part]) -> int:
        """A target that is computed from its stored parts: all of them are read, and this rank's part kept.

        Where each stored element belongs is what the naming makes of the numbers 0, 1, 2, ...
        """
        numbers = torch.arange(tensor.numel()).view(tensor.shape)
        places: Any = self.naming(name, numbers)
        full = torch.empty(tensor.numel(), dtype=tensor.dtype)
        read = 0
        for key, part in zip(places, parts):
            entry = self.entries[part.stored]
            stored = torch.empty(math.prod(entry.shape), dtype=entry.dtype)
            piece = Piece(entry.file, entry.start, entry.dtype.itemsize, 0, 0, Transfer.run(stored.numel()))
            read += read_jobs(
                self.folder,
                jobs_of([piece], CHUNK_BYTES),
                [stored],
                [entry.dtype],
                threads=1,
                progress=lambda done, total: None,
            )
            full[places[key].flatten()] = stored.view(entry.shape)[part.index].flatten().to(full.dtype)
        _keep_part(name, tensor, full)
        return read

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


def _complaint(
    folder: Path,
    plan: Any,
    unexpected: Sequence[str],
    strict: bool | str,
    model: nn.Module,
    init: Callable[[nn.Module], Any] | None,
    drawn: Mapping[str, Tensor],
) -> str | None:
    """Why the model cannot take these weights, or None."""
    if strict not in (True, False, "missing"):
        return f"strict must be True, False or 'missing', got {strict!r}"
    if strict and plan.missing:
        return f"{folder} has no tensor for {_some(plan.missing)} of the model"
    if strict is True and unexpected:
        return f"{folder} has {_some(unexpected)}, which the model does not have"
    filled = {target.name for target in plan.targets} - set(plan.missing) | drawn.keys()
    if left := [t.name for t in targets_of(model) if t.tensor.is_meta and t.name not in filled]:
        return f"{folder} has no tensor for {_some(left)}, which would have no values: on the meta device"
    if (without := uninitialised_buffers(model)) and init is None:
        return f"no checkpoint holds the buffer {_some(list(without))} on the meta device; pass init="
    return None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


def _bar(progress: bool | Progress, rank: int) -> Progress:
    if callable(progress):
        return progress
    if not progress or rank:
        return lambda done, total: None
    began, shown = time.perf_counter(), [-1]

    def show(done: int, total: int) -> None:
        percent = 100 * done // total if total else 100
        if percent == shown[0]:
            return
        shown[0] = percent
        rate = done / max(time.perf_counter() - began, 1e-9) / 2**30
        end = "\n" if done == total else "\r"
        filled = "#" * (percent * 30 // 100)
        text = f"loading weights [{filled:<30}] {percent:3d} % of {total / 2**30:.2f} GiB, {rate:.2f} GiB/s"
        print(text, end=end, file=sys.stderr, flush=True)

    return show
