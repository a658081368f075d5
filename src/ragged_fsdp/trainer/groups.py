"""The groups that a model was sharded into: what each rank holds, and how much of it is padding."""

import itertools
import re
from dataclasses import astuple, dataclass

from torch import nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.dbuffer import DBuffer
from ragged_fsdp.models.names import plain_name

__all__ = ["GroupSummary", "group_table", "padding_ratio", "summarize_groups"]

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class GroupSummary:
    """One communication buffer; ``padding_bytes`` are those of all ranks together."""

    name: str
    tensors: int
    tensor_bytes: int
    shard_bytes: int
    padding_bytes: int


def summarize_groups(model: nn.Module) -> list[GroupSummary]:
    """The buffers behind the model's ragged parameters, in the order of the parameters."""
    members: dict[DBuffer, list[tuple[str, DTensor]]] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found = DBuffer.of(parameter)
            if found is not None:
                members.setdefault(found[0], []).append((plain_name(name), parameter))
    summaries = []
    for buffer, inside in members.items():
        shard_bytes = buffer.flat.nbytes
        tensor_bytes = sum(p.numel() * p.element_size() for _, p in inside)
        # Of tensors that are split before they are sharded, there is one such buffer per part.
        parts = max(1, round(tensor_bytes / (buffer.layout.tensor_numel * buffer.cell_bytes)))
        padding = parts * shard_bytes * buffer.ranks - tensor_bytes
        name = _common_name([n for n, _ in inside])
        summaries.append(GroupSummary(name, len(inside), tensor_bytes, shard_bytes, padding))
    return summaries


def padding_ratio(groups: list[GroupSummary]) -> float | None:
    """Padding of all groups as a share of their tensors; None without ragged groups."""
    tensor_bytes = sum(group.tensor_bytes for group in groups)
    return sum(group.padding_bytes for group in groups) / tensor_bytes if tensor_bytes else None


def group_table(groups: list[GroupSummary]) -> list[str]:
    """Lines for people; equal groups of several layers are one line."""
    lines = [f"{'group':<22}{'tensors':>8}{'KiB in all':>13}{'KiB per rank':>14}{'padding':>10}"]
    alike: dict[tuple[object, ...], list[GroupSummary]] = {}
    for group in groups:
        kind = (_NUMBER.sub("#", group.name, count=1), *astuple(group)[1:])
        alike.setdefault(kind, []).append(group)
    for same in alike.values():
        lines.append(_row(_numbered([group.name for group in same]), same[0]))
    total = GroupSummary(
        "total",
        sum(g.tensors for g in groups),
        sum(g.tensor_bytes for g in groups),
        sum(g.shard_bytes for g in groups),
        sum(g.padding_bytes for g in groups),
    )
    return [*lines, _row("total", total)]


def _row(name: str, group: GroupSummary) -> str:
    in_all, shard = group.tensor_bytes / 2**10, group.shard_bytes / 2**10
    share = group.padding_bytes / group.tensor_bytes
    return f"{name:<22}{group.tensors:>8}{in_all:>13,.1f}{shard:>14,.1f}{share:>10.2%}"


def _numbered(names: list[str]) -> str:
    """One name for names that differ in their first number: ``layers.0 .. 3.experts``."""
    if len(names) == 1:
        return names[0]
    numbers = [int(found.group()) for name in names if (found := _NUMBER.search(name))]
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = [f"{r[0]} .. {r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges]
    return _NUMBER.sub(", ".join(texts), names[0], count=1)


def _common_name(names: list[str]) -> str:
    """What the names of a group share, up to a dot; ``(root)`` if they share nothing."""
    levels = zip(*(name.split(".")[:-1] for name in names))
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, levels)
    return ".".join(parts[0] for parts in shared) or "(root)"
