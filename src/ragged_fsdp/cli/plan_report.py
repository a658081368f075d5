"""Plans all groups of a model at one FSDP size and adds up what users ask about: padding and bytes."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ragged_fsdp.cli.plan_rules import GranularityRule, Group, spec_of
from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.planner import plan_buffers, plan_group

__all__ = [
    "GroupPlan",
    "ModelPlan",
    "PlanSettings",
    "SpecGroup",
    "merge_equal",
    "plan_model",
    "plan_spec_group",
    "short_name",
]


@dataclass(frozen=True)
class PlanSettings:
    """What applies to every group: rules, the size of an element, and the planner's options."""

    rules: tuple[GranularityRule, ...] = ()
    nearest: bool = False
    unit: int = 128
    align: int = 1
    element_bytes: int = 2
    max_buffers: int = 1
    order: str = "best"


@dataclass(frozen=True)
class SpecGroup:
    """Groups of a model that are equal but for their names: planned once, counted ``len(names)`` times."""

    names: tuple[str, ...]
    specs: tuple[TensorSpec, ...]
    source: Group

    @property
    def title(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{_common(self.names)} (x{len(self.names)})"


@dataclass(frozen=True)
class GroupPlan:
    """The buffers of one group (and of those equal to it) at one FSDP size."""

    group: SpecGroup
    layouts: tuple[GroupLayout, ...]
    element_bytes: int

    @property
    def count(self) -> int:
        return len(self.group.names)

    @property
    def numel(self) -> int:
        return sum(layout.tensor_numel for layout in self.layouts)

    @property
    def shard_numel(self) -> int:
        return sum(layout.shard_numel for layout in self.layouts)

    @property
    def buffer_numel(self) -> int:
        return sum(layout.buffer_numel for layout in self.layouts)

    @property
    def bound_numel(self) -> int:
        return sum(layout.lower_bound * layout.ranks for layout in self.layouts)

    @property
    def padding_ratio(self) -> float:
        return self.buffer_numel / self.numel - 1 if self.numel else 0.0

    @property
    def bound_ratio(self) -> float:
        """The padding no layout in as many buffers can go under."""
        return self.bound_numel / self.numel - 1 if self.numel else 0.0

    @property
    def proven(self) -> bool:
        return all(layout.proven_optimal for layout in self.layouts)

    @cached_property
    def alignment_bytes(self) -> int:
        """The largest power of two that divides every tensor's address in every shard, up to 4096."""
        offsets = [offset for layout in self.layouts for offset in (*layout.offsets, layout.shard_numel)]
        alignment = 4096
        while any(offset * self.element_bytes % alignment for offset in offsets):
            alignment //= 2
        return alignment

    def as_json(self) -> dict[str, Any]:
        return {
            "group": self.group.title,
            "modules": list(self.group.names),
            "tensors": len(self.group.specs),
            "numel": self.numel,
            "shard_numel": self.shard_numel,
            "buffer_numel": self.buffer_numel,
            "bytes_per_rank": self.shard_numel * self.element_bytes,
            "buffer_bytes": self.buffer_numel * self.element_bytes,
            "padding_ratio": self.padding_ratio,
            "lower_bound_ratio": self.bound_ratio,
            "proven_optimal": self.proven,
            "alignment_bytes": self.alignment_bytes,
            "buffers": [
                {
                    "shard_numel": layout.shard_numel,
                    "lower_bound": layout.lower_bound,
                    "tensors": len(layout.specs),
                    "digest": layout.digest,
                }
                for layout in self.layouts
            ],
        }


@dataclass(frozen=True)
class ModelPlan:
    """All groups at one FSDP size."""

    ranks: int
    groups: tuple[GroupPlan, ...]
    element_bytes: int

    def _total(self, per_group: Iterable[int]) -> int:
        return sum(value * plan.count for value, plan in zip(per_group, self.groups))

    @property
    def numel(self) -> int:
        return self._total(plan.numel for plan in self.groups)

    @property
    def buffer_numel(self) -> int:
        return self._total(plan.buffer_numel for plan in self.groups)

    @property
    def padding_ratio(self) -> float:
        return self.buffer_numel / self.numel - 1 if self.numel else 0.0

    @property
    def bound_ratio(self) -> float:
        return self._total(plan.bound_numel for plan in self.groups) / self.numel - 1 if self.numel else 0.0

    @property
    def proven(self) -> bool:
        return all(plan.proven for plan in self.groups)

    @property
    def bytes_per_rank(self) -> int:
        return self._total(plan.shard_numel for plan in self.groups) * self.element_bytes

    @property
    def largest_buffer_bytes(self) -> int:
        return max((plan.buffer_numel for plan in self.groups), default=0) * self.element_bytes

    @property
    def worst(self) -> GroupPlan | None:
        """The group that adds the most padding to the model."""
        padded = lambda plan: (plan.buffer_numel - plan.numel) * plan.count  # noqa: E731
        return max(self.groups, key=padded, default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "numel": self.numel,
            "buffer_numel": self.buffer_numel,
            "padding_ratio": self.padding_ratio,
            "lower_bound_ratio": self.bound_ratio,
            "proven_optimal": self.proven,
            "bytes_per_rank": self.bytes_per_rank,
            "largest_buffer_bytes": self.largest_buffer_bytes,
            "groups": [plan.as_json() for plan in self.groups],
        }


def merge_equal(groups: Sequence[Group], settings: PlanSettings) -> list[SpecGroup]:
    """Apply the granularity rules; groups that come out equal are merged, in order of appearance."""
    merged: dict[tuple[tuple[str, int, int], ...], SpecGroup] = {}
    for group in groups:
        specs = tuple(spec_of(tensor, settings.rules, settings.nearest) for tensor in group.tensors)
        inside = len(group.name) + 1 if group.name != "root" else 0
        specs = tuple(replace(spec, name=spec.name[inside:]) for spec in specs)
        key = tuple((spec.name, spec.numel, spec.block_numel) for spec in specs)
        held = merged.get(key)
        names = (*held.names, group.name) if held else (group.name,)
        merged[key] = SpecGroup(names, specs, held.source if held else group)
    return list(merged.values())


def plan_model(groups: Sequence[SpecGroup], ranks: int, settings: PlanSettings) -> ModelPlan:
    """The plan of every group at one FSDP size."""
    plans = tuple(plan_spec_group(group, ranks, settings) for group in groups)
    return ModelPlan(ranks, plans, settings.element_bytes)


def plan_spec_group(group: SpecGroup, ranks: int, settings: PlanSettings) -> GroupPlan:
    """The plan of one group, in as many buffers as the settings allow and pay."""
    options = {"unit": settings.unit, "align": settings.align}
    if settings.max_buffers > 1:
        layouts = plan_buffers(group.specs, ranks, max_buffers=settings.max_buffers, **options)
    else:
        layouts = (plan_group(group.specs, ranks, order=settings.order, **options),)
    return GroupPlan(group, layouts, settings.element_bytes)


def short_name(name: str) -> str:
    """A parameter's name with the numbers of layers and experts as stars."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _common(names: Sequence[str]) -> str:
    """``model.layers.3`` to ``model.layers.60`` as ``model.layers.3-60``; with gaps, ``model.layers.*``."""
    head, _, _ = names[0].rpartition(".")
    tails = [name.rpartition(".")[2] for name in names]
    if all(name.rpartition(".")[0] == head for name in names) and all(tail.isdigit() for tail in tails):
        numbers = [int(tail) for tail in tails]
        if numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"{head}.{numbers[0]}-{numbers[-1]}"
    return short_name(names[0])
