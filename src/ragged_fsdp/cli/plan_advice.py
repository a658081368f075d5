"""Why a group is padded, and what to change: another FSDP size, a finer granularity, two buffers."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragged_fsdp.cli.plan_report import (
    GroupPlan,
    ModelPlan,
    PlanSettings,
    SpecGroup,
    merge_equal,
    plan_model,
    plan_spec_group,
    short_name,
)
from ragged_fsdp.layout import GroupLayout
from ragged_fsdp.planner import bound_group
from ragged_fsdp.policy import Rows

__all__ = ["Candidate", "PaddingWarning", "advise", "explain", "recommendation", "warnings_for"]

_CANDIDATES = 48
_TOLERABLE = 0.25
_AS_GOOD = 0.01  # padding beyond the least that a smaller group is worth


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

    def as_json(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "ranks": self.ranks,
            "padding_ratio": self.padding_ratio,
            "cause": self.cause,
            "advice": list(self.advice),
        }


def warnings_for(
    plan: ModelPlan, settings: PlanSettings, threshold: float, node: int
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


def explain(plan: GroupPlan) -> str:
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


def _advice(plan: GroupPlan, settings: PlanSettings, target: float, node: int) -> Iterator[str]:
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
) -> Iterator[ModelPlan]:
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

    plan: ModelPlan
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
    plans: Sequence[ModelPlan], gpus: int, state_bytes: float, memory_bytes: int | None
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
        return (
            f"No FSDP size fits: the least a rank needs is {least.state_bytes / 2**30:.1f} GiB, "
            f"at {least.plan.ranks} ranks. Use a finer granularity or more GPUs."
        )
    mesh = f"HSDP, {best.replicas} replicas" if best.replicas > 1 else "no replicas"
    return f"Recommended: FSDP over {best.plan.ranks} ranks ({mesh}), {best.plan.padding_ratio:.3%} padding."
