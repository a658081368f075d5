"""What a plan costs and what would cost less: padding and bytes of all groups of a model at one FSDP size.

A group padded beyond a threshold is explained, with changes that lower it: another FSDP size, a finer
granularity, two buffers. ``advise`` compares the FSDP sizes that a number of GPUs allows.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ragged_fsdp.cli.plan_inputs import GranularityRule, Group, spec_of
from ragged_fsdp.layout import GroupLayout, TensorSpec
from ragged_fsdp.planner import bound_group, plan_buffers, plan_group
from ragged_fsdp.policy import Rows

__all__ = [
    "Candidate",
    "PaddingWarning",
    "PlanSettings",
    "PlannedGroup",
    "PlannedModel",
    "SpecGroup",
    "advise",
    "explain",
    "fsdp2_numel",
    "merge_equal",
    "plan_model",
    "plan_spec_group",
    "recommendation",
    "short_name",
    "warnings_for",
]

_CANDIDATES = 48
_TOLERABLE = 0.25
_AS_GOOD = 0.01  # padding beyond the least that a smaller group is worth


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
class PlannedGroup:
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

    @property
    def fsdp2_numel(self) -> int:
        """What FSDP2 would gather: the first dim of every tensor rounded up to a multiple of the ranks."""
        ranks = self.layouts[0].ranks
        return sum(fsdp2_numel(tensor.shape, ranks) for tensor in self.group.source.tensors)

    @property
    def fsdp2_ratio(self) -> float:
        """The padding of FSDP2."""
        return self.fsdp2_numel / self.numel - 1 if self.numel else 0.0

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
            "fsdp2_padding_ratio": self.fsdp2_ratio,
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
class PlannedModel:
    """All groups at one FSDP size."""

    ranks: int
    groups: tuple[PlannedGroup, ...]
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
    def fsdp2_ratio(self) -> float:
        """The padding of FSDP2 over as many ranks."""
        return self._total(plan.fsdp2_numel for plan in self.groups) / self.numel - 1 if self.numel else 0.0

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
    def worst(self) -> PlannedGroup | None:
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
            "fsdp2_padding_ratio": self.fsdp2_ratio,
            "proven_optimal": self.proven,
            "bytes_per_rank": self.bytes_per_rank,
            "largest_buffer_bytes": self.largest_buffer_bytes,
            "groups": [plan.as_json() for plan in self.groups],
        }


def fsdp2_numel(shape: Sequence[int], ranks: int) -> int:
    """Elements of a tensor after FSDP2 has padded its first dim for equal shards on ``ranks``."""
    first, *rest = shape or (1,)
    return -(-first // ranks) * ranks * math.prod(rest)


def merge_equal(groups: Sequence[Group], settings: PlanSettings) -> list[SpecGroup]:
    """Apply the granularity rules; groups that come out equal are merged, in order of appearance."""
    merged: dict[tuple[Any, ...], SpecGroup] = {}
    for group in groups:
        specs = tuple(spec_of(tensor, settings.rules, settings.nearest) for tensor in group.tensors)
        inside = len(group.name) + 1 if group.name != "root" else 0
        specs = tuple(replace(spec, name=spec.name[inside:]) for spec in specs)
        key = tuple((spec.name, spec.numel, spec.block_numel, spec.tile) for spec in specs)
        held = merged.get(key)
        names = (*held.names, group.name) if held else (group.name,)
        merged[key] = SpecGroup(names, specs, held.source if held else group)
    return list(merged.values())


def plan_model(groups: Sequence[SpecGroup], ranks: int, settings: PlanSettings) -> PlannedModel:
    """The plan of every group at one FSDP size."""
    plans = tuple(plan_spec_group(group, ranks, settings) for group in groups)
    return PlannedModel(ranks, plans, settings.element_bytes)


def plan_spec_group(group: SpecGroup, ranks: int, settings: PlanSettings) -> PlannedGroup:
    """The plan of one group, in as many buffers as the settings allow and pay.

    What lies in tiles is gathered in a buffer of its own, as ``fully_shard`` does it.
    """
    options = {"unit": settings.unit, "align": settings.align}
    tiled = tuple(spec for spec in group.specs if spec.tile is not None)
    others = tuple(spec for spec in group.specs if spec.tile is None)
    layouts: list[GroupLayout] = []
    for specs in (others, tiled) if others and tiled else (group.specs,):
        if settings.max_buffers > 1:
            layouts += plan_buffers(specs, ranks, max_buffers=settings.max_buffers, **options)
        else:
            layouts.append(plan_group(specs, ranks, order=settings.order, **options))
    return PlannedGroup(group, tuple(layouts), settings.element_bytes)


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


@dataclass(frozen=True)
class PaddingWarning:
    """One group whose padding is above the threshold: the cause, and changes that lower it."""

    group: str
    ranks: int
    padding_ratio: float
    cause: str
    advice: tuple[str, ...]

    @property
    def text(self) -> str:
        hint = f" Better: {'; '.join(self.advice)}." if self.advice else " No single change makes it small."
        return f"{self.group} at {self.ranks} ranks: {self.padding_ratio:.2%} padding. {self.cause}{hint}"


def warnings_for(
    plan: PlannedModel, settings: PlanSettings, threshold: float, node: int
) -> list[PaddingWarning]:
    """A warning for each group of ``plan`` padded by more than ``threshold``."""
    found = []
    for group_plan in plan.groups:
        if group_plan.padding_ratio > threshold:
            target = max(threshold, min(group_plan.padding_ratio / 2, _TOLERABLE))
            advice = tuple(_advice(group_plan, settings, target, node))
            ratio = group_plan.padding_ratio
            cause = explain(group_plan)
            found.append(PaddingWarning(group_plan.group.title, plan.ranks, ratio, cause, advice))
    return found


def explain(plan: PlannedGroup) -> str:
    """The reason for the padding, from the layout itself."""
    layout = max(plan.layouts, key=lambda layout: layout.padding_numel)
    share = layout.tensor_numel // layout.ranks
    largest = max(layout.specs, key=lambda spec: spec.block_numel)
    if largest.block_numel > share:
        return (
            f"One block of {short_name(largest.name)} has {largest.block_numel:,} elements, "
            f"more than a rank's share of {share:,}."
        )
    holders = [
        spec
        for index, spec in enumerate(layout.specs)
        if spec.block_numel > 1 and _holds_shard(layout, index)
    ]
    if holders:
        multiple = math.lcm(*(spec.block_numel for spec in holders))
        names = dict.fromkeys(short_name(spec.name) for spec in holders)
        return (
            f"LCM rounding: {', '.join(list(names)[:3])} hold whole shards, so a shard is a multiple of "
            f"{multiple:,} elements."
        )
    return (
        f"Blocks of up to {largest.block_numel:,} elements do not fill shards of "
        f"{layout.shard_numel:,} evenly."
    )


def _holds_shard(layout: GroupLayout, index: int) -> bool:
    start, end = layout.offsets[index], layout.offsets[index] + layout.specs[index].numel
    return -(-start // layout.shard_numel) + 1 <= end // layout.shard_numel


def _advice(plan: PlannedGroup, settings: PlanSettings, target: float, node: int) -> Iterator[str]:
    ranks = plan.layouts[0].ranks
    for size in _better_sizes(plan.group, ranks, settings, target, node):
        yield f"FSDP size {size.ranks} ({size.padding_ratio:.2%})"
    finer = _finer(plan.group, ranks, settings, target)
    if finer is not None:
        yield finer
    if settings.max_buffers == 1:
        split = plan_spec_group(plan.group, ranks, replace(settings, max_buffers=2))
        if split.padding_ratio <= max(target, plan.padding_ratio - 0.01) and len(split.layouts) > 1:
            yield f"--max-buffers 2 ({split.padding_ratio:.2%})"


def _better_sizes(
    group: SpecGroup, ranks: int, settings: PlanSettings, target: float, node: int
) -> Iterator[PlannedModel]:
    """The nearest smaller and the nearest larger size that reach ``target``; bounds sort out the rest."""
    step = node if ranks % node == 0 else 1
    below = range(ranks - step, max(0, ranks // 2 - 1), -step)[:_CANDIDATES]
    above = range(ranks + step, 2 * ranks + 1, step)[:_CANDIDATES]
    numel = sum(spec.numel for spec in group.specs)
    for sizes in (below, above):
        for size in sizes:
            bound = bound_group(group.specs, size, unit=settings.unit, align=settings.align)
            if bound * size > (1 + target) * numel:
                continue
            plan = plan_model([group], size, settings)
            if plan.padding_ratio <= target:
                yield plan
                break


def _finer(group: SpecGroup, ranks: int, settings: PlanSettings, target: float) -> str | None:
    """Half the rows, then a quarter, and so on, for all row rules together."""
    rules = settings.rules
    while any(isinstance(rule.granularity, Rows) and rule.granularity.count % 2 == 0 for rule in rules):
        rules = tuple(
            replace(rule, granularity=Rows(rule.granularity.count // 2))
            if isinstance(rule.granularity, Rows) and rule.granularity.count % 2 == 0
            else rule
            for rule in rules
        )
        finer = replace(settings, rules=rules)
        plan = plan_model(merge_equal([group.source], finer), ranks, finer)
        if plan.padding_ratio <= target:
            texts = [rule.text for rule in rules if isinstance(rule.granularity, Rows)]
            return f"{' '.join(texts)} ({plan.padding_ratio:.2%})"
    return None


@dataclass(frozen=True)
class Candidate:
    """One way to use all GPUs: FSDP groups of ``plan.ranks``, replicated ``replicas`` times."""

    plan: PlannedModel
    replicas: int
    state_bytes: int
    fits: bool
    recommended: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "fsdp": self.plan.ranks,
            "replicas": self.replicas,
            "padding_ratio": self.plan.padding_ratio,
            "lower_bound_ratio": self.plan.bound_ratio,
            "proven_optimal": self.plan.proven,
            "state_bytes_per_rank": self.state_bytes,
            "largest_buffer_bytes": self.plan.largest_buffer_bytes,
            "fits": self.fits,
            "recommended": self.recommended,
        }


def advise(
    plans: Sequence[PlannedModel], gpus: int, state_bytes: float, memory_bytes: int | None
) -> list[Candidate]:
    """Rank the FSDP sizes that divide ``gpus``: the smallest that fits, without much padding, is best.

    A smaller group gathers over fewer links and pads less; memory is what asks for a larger one. Among
    the sizes that fit, those within a percent of the least padding are recommended, smallest first.
    Without a memory limit every size fits, and the least padded sizes of one node or more are named.
    """
    candidates = []
    for plan in plans:
        shard_numel = plan.bytes_per_rank // plan.element_bytes
        held = int(shard_numel * state_bytes) + 2 * plan.largest_buffer_bytes
        fits = memory_bytes is None or held <= memory_bytes
        candidates.append(Candidate(plan, gpus // plan.ranks, held, fits))
    fitting = [candidate for candidate in candidates if candidate.fits]
    least = min((candidate.plan.padding_ratio for candidate in fitting), default=0.0)
    good = [c for c in fitting if c.plan.padding_ratio <= least + _AS_GOOD]
    best = min(good, key=lambda c: c.plan.ranks, default=None)
    return [replace(candidate, recommended=candidate is best) for candidate in candidates]


def recommendation(candidates: Sequence[Candidate]) -> str:
    """The verdict of ``advise`` in one sentence."""
    best = next((candidate for candidate in candidates if candidate.recommended), None)
    if best is None:
        least = min(candidates, key=lambda candidate: candidate.state_bytes)
        most = max(candidates, key=lambda candidate: candidate.plan.ranks)
        # padding can grow as fast as shards shrink: then no number of GPUs helps
        padded = least is not most or least.plan.padding_ratio > _TOLERABLE
        advice = (
            f"Padding is what fills it ({least.plan.padding_ratio:.0%}): use a finer granularity."
            if padded
            else "Use more GPUs, or fewer bytes of state per parameter."
        )
        return (
            f"No FSDP size fits: the least a rank needs is {least.state_bytes / 2**30:.1f} GiB, "
            f"at {least.plan.ranks} ranks. {advice}"
        )
    mesh = f"HSDP, {best.replicas} replicas" if best.replicas > 1 else "no replicas"
    return f"Recommended: FSDP over {best.plan.ranks} ranks ({mesh}), {best.plan.padding_ratio:.3%} padding."
