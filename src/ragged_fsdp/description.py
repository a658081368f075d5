"""``describe(model)``: what ``fully_shard`` made of a model, as text for a terminal and HTML for a notebook.

It reads the plans of the model's groups, which every rank has in full: nothing is sent, and any rank may
call it alone, at any moment, whether parameters are gathered or not.
"""

import html
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_fsdp.fsdp.runtime.state import states_below
from ragged_fsdp.weights.names import plain_name

__all__ = ["Description", "GroupLine", "TensorLine", "describe"]

_NUMBER = re.compile(r"\d+")
_COLUMNS = 80
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
_MOST_PARTS = 8  # ranks whose shares are listed one by one


@dataclass(frozen=True)
class TensorLine:
    """One parameter of a group."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Any, ...]
    block_numel: int
    """Elements that stay together on a rank."""
    parts: tuple[int, ...]
    """Elements on each rank of the shard group."""

    @property
    def stays_together(self) -> str:
        """What is never cut, in words."""
        row = self.shape[-1] if len(self.shape) > 1 else 1  # as ``Rows`` counts
        tile = next((p.tile for p in self.placements if getattr(p, "tile", None)), None)
        if tile is not None:
            return f"{tile[0]} x {tile[1]}"
        if self.block_numel == 1:
            return "-"
        if self.block_numel == sum(self.parts):
            return "whole"
        if self.block_numel % row == 0:
            return f"{self.block_numel // row} rows" if self.block_numel > row else "1 row"
        return f"{self.block_numel} elements"

    @property
    def shares(self) -> str:
        """How much of it each rank has, in percent; for many ranks the smallest and the largest share."""
        whole = max(1, sum(self.parts))
        shares = [round(100 * part / whole) for part in self.parts]
        if len(shares) > _MOST_PARTS:
            return f"{min(shares)} to {max(shares)}"
        return " ".join(map(str, shares))


@dataclass(frozen=True)
class GroupLine:
    """Parameters that are gathered and reduced together."""

    name: str
    ranks: int
    tensors: tuple[TensorLine, ...]
    whole_bytes: int
    """Bytes of the parameters on all ranks together, without padding."""
    rank_bytes: int
    """What this rank keeps of them."""
    gathered_bytes: int
    """The buffer that they are gathered into, in the dtype they are computed with."""
    padding_ratio: float
    """Padding of the gathered buffer, relative to the parameters."""


@dataclass(frozen=True)
class Description:
    """The groups of a model. ``str()`` has a table of them and one of their parameters, 80 columns wide."""

    groups: tuple[GroupLine, ...]
    others: tuple[tuple[str, int], ...]
    """Name and bytes on this rank of each parameter that is in no group."""

    @property
    def rank_bytes(self) -> int:
        """What this rank keeps of all groups."""
        return sum(group.rank_bytes for group in self.groups)

    @property
    def padding_ratio(self) -> float | None:
        """Padding of all groups relative to their parameters; None without groups."""
        whole = sum(group.whole_bytes for group in self.groups)
        padding = sum(group.padding_ratio * group.whole_bytes for group in self.groups)
        return padding / whole if whole else None

    def group_rows(self) -> list[tuple[str, ...]]:
        """Head, a row for each kind of group (equal ones of several layers are one), and a total."""
        head = ("group", "tensors", "whole", "per rank", "gathered", "padding", "ranks")
        alike: dict[tuple[Any, ...], list[GroupLine]] = {}
        for group in self.groups:
            kind = (_generic(group.name), group.ranks, group.rank_bytes, group.gathered_bytes)
            tensors = tuple((_generic(t.name), t.shape, t.dtype, t.block_numel) for t in group.tensors)
            alike.setdefault((*kind, tensors), []).append(group)
        rows = [_group_row(_numbered([g.name for g in same]), same[:1]) for same in alike.values()]
        return [head, *rows, _group_row("total", self.groups)] if rows else []

    def tensor_rows(self) -> list[tuple[str, ...]]:
        """Head and a row for each kind of parameter; those of several layers that are cut alike are one."""
        head = ("parameter", "shape", "dtype", "together", "% by rank")
        alike: dict[tuple[Any, ...], list[str]] = {}
        for tensor in (tensor for group in self.groups for tensor in group.tensors):
            shape = "x".join(map(str, tensor.shape))
            dtype = _SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
            cells = (shape, dtype, tensor.stays_together, tensor.shares)
            alike.setdefault((_generic(tensor.name), *cells), []).append(tensor.name)
        rows = [(_numbered(names), *cells) for (_, *cells), names in alike.items()]
        return [head, *rows] if rows else []

    def group_table(self) -> list[str]:
        """The lines of the table of groups."""
        return _table(self.group_rows(), left=(0,))

    def _rest(self) -> str:
        if not self.others:
            return ""
        count, size = len(self.others), sum(nbytes for _, nbytes in self.others)
        plural = "s are" if count > 1 else " is"
        return (
            f"{count} parameter{plural} in no group: {_size(size)} on this rank, such as {self.others[0][0]}"
        )

    def __str__(self) -> str:
        tables = [self.group_table(), _table(self.tensor_rows(), left=(0, 1, 2, 3))]
        rest = [self._rest()] if self.others else []
        parts = [*("\n".join(table) for table in tables if table), *rest]
        return "\n\n".join(parts) or "the model has no parameters"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        tables = "".join(_html_table(rows) for rows in (self.group_rows(), self.tensor_rows()) if rows)
        return f'<div style="overflow-x:auto">{tables}<p>{html.escape(self._rest())}</p></div>'


def describe(model: nn.Module) -> Description:
    """Groups, placements, padding and bytes per rank of a model that ``fully_shard`` was applied to.

    Print it, or let a notebook show it; the numbers are in its fields.

    Raises:
        TypeError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"describe: model must be an nn.Module, got {model!r}.")
    prefixes = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    managed: set[int] = set()
    groups = []
    for group in (group for state in states_below(model) for group in state.groups):
        groups.append(_group_line(group, prefixes))
        managed |= {id(p) for param in group.params for p in (param.sharded, param.unsharded)}
    others = [(plain_name(n), _local_bytes(p)) for n, p in model.named_parameters() if id(p) not in managed]
    return Description(tuple(groups), tuple(others))


def _group_line(group: Any, prefixes: dict[int, str]) -> GroupLine:
    plan = group.plan
    tensors = []
    for index, param in enumerate(group.params):
        place = param.places[0]
        name = plain_name(f"{prefixes.get(id(place.module), '')}.{place.attribute}".lstrip("."))
        layout = plan.tensor_layout(index)
        parts, block = layout.local_numels(0), layout.specs[0].block_numel
        shape, placements = tuple(param.global_shape), tuple(param.spec.placements)
        tensors.append(TensorLine(name, shape, param.dtype, placements, block, parts))
    return GroupLine(
        name=_common_name([tensor.name for tensor in tensors]),
        ranks=plan.layout.ranks,
        tensors=tuple(tensors),
        whole_bytes=sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors),
        rank_bytes=group.main.nbytes,
        gathered_bytes=plan.layout.buffer_numel * plan.cell_bytes,
        padding_ratio=plan.layout.padding_ratio,
    )


def _local_bytes(parameter: nn.Parameter) -> int:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.numel() * local.element_size()


def _group_row(name: str, groups: Sequence[GroupLine]) -> tuple[str, ...]:
    whole = sum(group.whole_bytes for group in groups)
    padding = sum(group.padding_ratio * group.whole_bytes for group in groups)
    return (
        name,
        str(sum(len(group.tensors) for group in groups)),
        _size(whole),
        _size(sum(group.rank_bytes for group in groups)),
        _size(sum(group.gathered_bytes for group in groups)),
        f"{padding / whole:.2%}" if whole else "",
        " ".join(map(str, sorted({group.ranks for group in groups}))),
    )


def _size(count: float) -> str:
    """Bytes in the unit that people would say."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} TiB"


def _table(rows: list[tuple[str, ...]], left: Iterable[int]) -> list[str]:
    """Columns as wide as they need to be; the first gives way where a line would be longer than 80."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = max(12, min(widths[0], _COLUMNS - sum(width + 2 for width in widths[1:])))
    lines = []
    for row in rows:
        name = row[0] if len(row[0]) <= widths[0] else "…" + row[0][1 - widths[0] :]
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip((name, *row[1:]), widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _html_table(rows: list[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...], tag: str) -> str:
        return "".join(
            f'<{tag} style="text-align:{"right" if column else "left"}">{html.escape(cell)}</{tag}>'
            for column, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows[1:])
    return f"<table><thead><tr>{line(rows[0], 'th')}</tr></thead><tbody>{body}</tbody></table>"


def _generic(name: str) -> str:
    return _NUMBER.sub("#", name, count=1)


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
