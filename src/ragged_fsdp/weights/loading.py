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
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ragged_fsdp.agreement import done_alike
from ragged_fsdp.checkpoint.place import AnyPath, place
from ragged_fsdp.fsdp.runtime.module import reshard_all
from ragged_fsdp.weights.adapters import Adapters, fresh
from ragged_fsdp.weights.dcp_folder import of_run, read_index
from ragged_fsdp.weights.files import StoredEntry, read_header, safetensors_files
from ragged_fsdp.weights.names import Naming, default_naming, ignored_unexpected
from ragged_fsdp.weights.planning import Plan, keep_part
from ragged_fsdp.weights.reading import Progress
from ragged_fsdp.weights.targets import (
    Target,
    materialize_meta,
    targets_of,
    uninitialised_buffers,
)

__all__ = ["LoadReport", "load"]

_READS_OF_A_MACHINE = 8
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

    ``folder`` may also be a URL that fsspec knows (``s3://bucket/weights``).

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
    ranks = _Ranks(group)
    where = ranks.done(lambda: _checked(folder, strict, device, threads))
    reshard_all(model)  # what is gathered would keep the old values
    adapters = ranks.done(lambda: Adapters(model, merging=False))
    init = init or getattr(adapters.base, "_init_weights", None)
    kind = ranks.first(lambda: _kind(where))
    has_optimizer = False
    if kind == "dcp":
        entries, has_optimizer = ranks.first(lambda: read_index(where))
    else:
        entries = _headers(where, ranks)

    def planned() -> Plan:
        if kind != "dcp":
            return Plan(where, entries, *_wanted(model, adapters, kind, names), broadcast)
        targets = targets_of(model)
        naming = default_naming(model, {} if names is None else names)  # a run stores the model's own names
        naming, of_model = of_run(naming, targets, entries, has_optimizer=has_optimizer)
        return Plan(where, of_model, targets, naming, broadcast)

    plan = ranks.done(planned, lambda plan: plan.description)
    ignored = (
        ignored_unexpected(adapters.base) if kind != "adapter" else (lambda name: ".base_layer." in name)
    )
    unexpected = tuple(name for name in plan.unexpected if not ignored(name))
    drawn = _drawn(model, plan.targets) if kind == "plain" else {}
    if kind == "adapter" and strict:
        ranks.refuse(_other_adapter(model, where, ranks.first(lambda: _adapter_config(where))))
    ranks.refuse(_complaint(where, plan, unexpected, strict, model, init, drawn))
    tensors = ranks.done(lambda: _with_memory(model, plan.targets, device, init, drawn))
    hosts = ranks.each(socket.gethostname)
    if threads is None:
        threads = max(2, _READS_OF_A_MACHINE // hosts.count(hosts[ranks.rank]))
    show = _bar(progress, ranks.rank)
    read = ranks.done(lambda: plan.read(tensors, threads, show))
    plan.share(tensors)
    return LoadReport(plan.found, read, time.perf_counter() - began, tuple(plan.missing), unexpected)


def _checked(folder: Any, strict: Any, device: Any, threads: Any) -> AnyPath:
    """The place of the weights; raises if an argument cannot be used."""
    if strict not in (True, False, "missing"):
        raise ValueError(f"load: strict must be True, False or 'missing', got {strict!r}")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ValueError(f"load: threads must be a positive number or None, got {threads!r}")
    if device is not None and torch.device(device).type == "meta":
        raise ValueError("load: device='meta' has no memory for weights")
    return place(folder) if isinstance(folder, str) else Path(folder)


def _with_memory(
    model: nn.Module,
    targets: Sequence[Target],
    device: torch.device | str | None,
    init: Callable[[nn.Module], Any] | None,
    drawn: Mapping[str, Tensor],
) -> list[Tensor]:
    """The tensors to read into, all with memory; adapters get their first values here."""
    materialize_meta(model, device, init)
    held = {target.name: target.tensor for target in targets_of(model)}
    for name, value in drawn.items():
        keep_part(name, held[name], value)
    return [held[target.name] for target in targets]


def _kind(folder: AnyPath) -> str:
    """What a folder holds: a distributed checkpoint, an adapter that PEFT wrote, or plain weights."""
    if (folder / ".metadata").is_file():
        return "dcp"
    return "adapter" if (folder / "adapter_config.json").is_file() else "plain"


def _adapter_config(folder: AnyPath) -> dict[str, Any]:
    """The settings of an adapter that PEFT wrote."""
    try:
        return dict(json.loads((folder / "adapter_config.json").read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / 'adapter_config.json'} is damaged: {error}") from error


def _other_adapter(model: Any, folder: AnyPath, stored: Mapping[str, Any]) -> str | None:
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
    model: nn.Module,
    adapters: Adapters,
    kind: str,
    names: Naming | Mapping[str, str] | None,
) -> tuple[list[Target], Naming]:
    """The tensors that a folder of safetensors has, and their names there."""
    targets = targets_of(model)
    if kind == "adapter":
        if names is not None:
            raise ValueError(
                "load: the folder is of an adapter, whose names are PEFT's; names= is for others"
            )
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


class _Ranks:
    """The ranks that load together; one rank alone needs no process group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        alone = not dist.is_initialized()
        self.group = None if alone else group or dist.group.WORLD
        self.rank, self.size = (
            (0, 1) if alone else (dist.get_rank(self.group), dist.get_world_size(self.group))
        )

    def each(self, action: Callable[[], Any]) -> list[Any]:
        """What ``action`` returned on every rank."""
        mine = self.done(action)
        said = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(said, mine, group=self.group)
        return said

    def first(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returned on the first rank."""
        return self.each(lambda: action() if self.rank == 0 else None)[0]

    def done(self, action: Callable[[], Any], describe: Callable[[Any], str] = lambda result: "") -> Any:
        """What ``action`` returned on this rank, once it has succeeded on all and is described alike."""
        device = torch.device("cpu") if self.group is None else _device_for(self.group)
        return done_alike("load", action, describe, [self.group], device)

    def refuse(self, complaint: str | None) -> None:
        """Raise on every rank if there is a complaint on one."""

        def complain() -> None:
            if complaint is not None:
                raise ValueError(complaint)

        self.done(complain)


def _device_for(group: dist.ProcessGroup) -> torch.device:
    """Where a tensor lies that the group's backend moves."""
    backend = dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def _headers(folder: AnyPath, ranks: _Ranks) -> dict[str, StoredEntry]:
    """Every stored tensor; each rank reads the headers of its share of the files."""
    files: dict[str, list[str] | None] = ranks.first(lambda: safetensors_files(folder))
    mine = list(files.items())[ranks.rank :: ranks.size]
    found = ranks.each(lambda: [read_header(folder, file, wanted) for file, wanted in mine])
    entries: dict[str, StoredEntry] = {}
    for header in (header for part in found for header in part):
        for name, entry in header.items():
            if name in entries:
                first, second = (of.boxes[0].file for of in (entries[name], entry))
                raise ValueError(f"{folder}: {first} and {second} both hold {name!r}")
            entries[name] = entry
    return entries


def _complaint(
    folder: AnyPath,
    plan: Plan,
    unexpected: Sequence[str],
    strict: bool | str,
    model: nn.Module,
    init: Callable[[nn.Module], Any] | None,
    drawn: Mapping[str, Tensor],
) -> str | None:
    """Why the model cannot take these weights, or None."""
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
