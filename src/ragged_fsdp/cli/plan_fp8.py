"""``plan --fp8``: which weights would compute in FP8, and what gathering their codes costs, beside bf16.

Three ways are planned at each FSDP size: everything in bf16, element by element; codes in bands of 128 rows,
as ``train --fp8`` has them by itself; and codes in tiles of 128 x 128. Codes are a buffer of their own in
each group, one byte per element and an fp32 scale per block; what does not compute in FP8 is gathered in bf16
beside it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from ragged_fsdp.cli.plan_costs import PlannedModel, PlanSettings, merge_equal, plan_model, short_name
from ragged_fsdp.cli.plan_display import Column, bytes_text, fitted_table
from ragged_fsdp.cli.plan_inputs import Group, ModelShapes, TensorShape, wrap_groups
from ragged_fsdp.policy import Rows, Tiles

__all__ = ["Fp8Plan", "Way", "plan_fp8"]

_BLOCK = 128
_SCALE_BYTES = 4
_BF16_BYTES = 2
_NAMES = {
    "bf16": "bf16",
    "bands": f"FP8, bands of {_BLOCK} rows",
    "tiles": f"FP8, tiles of {_BLOCK} x {_BLOCK}",
}


@dataclass(frozen=True)
class Way:
    """One way of gathering the model at one FSDP size."""

    coded: PlannedModel
    """What is gathered as codes; it has no group where everything is in bf16."""
    plain: PlannedModel
    scales: int
    """Blocks of all codes."""

    @property
    def numel(self) -> int:
        return self.coded.numel + self.plain.numel

    @property
    def padding_ratio(self) -> float:
        return (self.coded.buffer_numel + self.plain.buffer_numel) / self.numel - 1

    @property
    def coded_bytes(self) -> int:
        """Codes and scales as they lie in memory."""
        return self.coded.buffer_numel + _SCALE_BYTES * self.scales

    @property
    def gathered_bytes(self) -> int:
        """All groups, gathered once."""
        return self.coded_bytes + _BF16_BYTES * self.plain.buffer_numel

    def as_json(self) -> dict[str, Any]:
        return {
            "coded_numel": self.coded.numel,
            "padding_ratio": self.padding_ratio,
            "coded_padding_ratio": self.coded.padding_ratio,
            "gathered_bytes": self.gathered_bytes,
            "bytes_per_element": self.gathered_bytes / self.numel,
            "bytes_per_coded_element": self.coded_bytes / self.coded.numel if self.coded.numel else None,
        }


@dataclass(frozen=True)
class Fp8Plan:
    """The three ways at every size, and the rule of each parameter that none of them codes."""

    title: str
    left_out: Mapping[str, Mapping[str, str]]
    """For bands and for tiles: which parameters stay in bf16, and why."""
    numel: Mapping[str, int]
    sizes: Mapping[int, Mapping[str, Way]]
    """By FSDP size: ``bf16``, ``bands``, ``tiles``."""

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.title,
            "left_out": {way: dict(rules) for way, rules in self.left_out.items()},
            "sizes": [
                {"ranks": ranks, **{name: way.as_json() for name, way in ways.items()}}
                for ranks, ways in self.sizes.items()
            ],
        }

    def print(self, console: Console) -> None:
        """Who computes in FP8 and who does not by which rule; then a row per FSDP size."""
        console.print(self._rules_table(console.width))
        console.print(self._size_table(console.width))
        console.print(
            "Backward also turns the codes of one weight at a time, a byte each. Tiles are chosen by "
            "train --fp8 --granularity '*_proj*=tiles:128x128', or fp8.orig_param_policy.",
            style="dim",
            highlight=False,
        )

    def _rules_table(self, width: int) -> Table:
        """Parameters that differ only in the number of a layer or an expert share a row."""
        rows: dict[tuple[str, str], int] = {}
        for name, numel in self.numel.items():
            in_tiles, in_bands = (self.left_out[way].get(name) for way in ("tiles", "bands"))
            said = f"bf16: {in_tiles}" if in_tiles else "FP8"
            if in_bands and not in_tiles:
                said = f"FP8 in tiles; bf16 in bands, which need multiples of {_BLOCK}"
            rows[short_name(name), said] = rows.get((short_name(name), said), 0) + numel
        columns = Column("parameter", text=True), Column("elements"), Column("computes in", text=True)
        cells = [((name, f"{numel:,}", said), None) for (name, said), numel in rows.items()]
        return fitted_table(f"{self.title}: products in FP8", columns, cells, width)

    def _size_table(self, width: int) -> Table:
        columns = (
            Column("ranks"),
            Column("", text=True),
            Column("padding"),
            Column("gathered"),
            Column("bytes per element"),
            Column("of what is coded"),
        )
        rows: list[tuple[Sequence[str], str | None]] = []
        for ranks, ways in self.sizes.items():
            for number, (name, way) in enumerate(ways.items()):
                coded = f"{way.coded_bytes / way.coded.numel:.3f}" if way.coded.numel else "-"
                each = f"{way.gathered_bytes / way.numel:.3f}"
                first = "" if number else str(ranks)
                size = bytes_text(way.gathered_bytes)
                rows.append(((first, _NAMES[name], f"{way.padding_ratio:.3%}", size, each, coded), None))
            rows.append((("---",), None))
        return fitted_table("gathered, all groups once, by FSDP size", columns, rows, width)


def plan_fp8(
    shapes: ModelShapes, wraps: Sequence[str], sizes: Sequence[int], settings: PlanSettings
) -> Fp8Plan:
    """Plan all three ways at all sizes."""
    if shapes.model is None:
        raise ValueError(
            f"--fp8: {shapes.title} is a list of tensors; name a model: its layers say what computes in FP8."
        )
    from ragged_fsdp.fp8 import left_out

    rules = {"bands": left_out(shapes.model), "tiles": left_out(shapes.model, tiles=True)}
    coded = {way: {t.name for t in shapes.tensors} - found.keys() for way, found in rules.items()}
    groups = wrap_groups(shapes.tensors, wraps)
    cut = {
        "bf16": (_without(groups, set()), []),
        "bands": (_without(groups, coded["bands"]), _only(groups, coded["bands"], Rows(_BLOCK))),
        "tiles": (_without(groups, coded["tiles"]), _only(groups, coded["tiles"], Tiles(_BLOCK, _BLOCK))),
    }
    planned: dict[int, dict[str, Way]] = {}
    for ranks in sizes:
        planned[ranks] = {}
        for way, (plain, codes) in cut.items():
            scales = sum(_blocks(tensor) for group in codes for tensor in group.tensors)
            coded_plan, plain_plan = (
                plan_model(merge_equal(parts, settings), ranks, replace(settings, element_bytes=size))
                for parts, size in ((codes, 1), (plain, _BF16_BYTES))
            )
            planned[ranks][way] = Way(coded_plan, plain_plan, scales)
    return Fp8Plan(shapes.title, rules, {t.name: t.numel for t in shapes.tensors}, planned)


def _without(groups: Sequence[Group], coded: set[str]) -> list[Group]:
    parts = [Group(g.name, tuple(t for t in g.tensors if t.name not in coded)) for g in groups]
    return [part for part in parts if part.tensors]


def _only(groups: Sequence[Group], coded: set[str], granularity: Rows | Tiles) -> list[Group]:
    """The tensors of each group that are coded, each with its own granularity."""
    parts = [
        Group(g.name, tuple(replace(t, granularity=granularity) for t in g.tensors if t.name in coded))
        for g in groups
    ]
    return [part for part in parts if part.tensors]


def _blocks(tensor: TensorShape) -> int:
    *matrices, rows, columns = tensor.shape
    return math.prod(matrices) * math.ceil(rows / _BLOCK) * math.ceil(columns / _BLOCK)
