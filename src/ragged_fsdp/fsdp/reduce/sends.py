"""How an exchange of gradients is cut into what each rank is sent, and in which steps that travels.

Gradients are cut where shards end. A shard that lies inside one tensor is a view of its gradient; one that
several tensors share is packed; where shards are small everything is packed as a whole.

Slots travel node by node, and large ones in parts, so that only two steps' rows need memory: one arrives
while the other is added. Node ``n`` begins with the slots of node ``n + 1`` and ends with its own: the sums
of a step go over the rail while the next step's rows arrive, and in each step every node sends to one node
and receives from one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from ragged_fsdp.fsdp.reduce.layout import GradLayout
from ragged_fsdp.layout import align_up
from ragged_fsdp.routes import Shared, shared_boxes
from ragged_fsdp.topology import LevelGroups, Levels

__all__ = [
    "GradExchangePlan",
    "SendPlan",
    "Step",
    "plan_grad_exchange",
    "plan_sends",
    "plan_steps",
    "rounds_of",
]

_STEPS = 4  # at least, where shards are large
_ROUND_NUMEL = 1 << 19  # a round has at least this many elements of each shard
_PACK_NUMEL = 1 << 19  # smaller shards are packed
_ALIGN_NUMEL = 16
_ALIGN_BYTES = 256


@dataclass(frozen=True)
class SendPlan:
    """How the gradients of a group are cut for the ranks and for the rounds."""

    rounds: int
    cuts: tuple[tuple[int, ...], ...]
    """Sizes of the consecutive pieces of each parameter's flat gradient."""
    views: Mapping[int, tuple[int, int]]
    """By rank: the parameter its shard lies in and the first of the pieces, one per round, it is sent."""
    packed: Mapping[int, Sequence[tuple[int, int, int]]]
    """By rank whose shard several share: (parameter, piece, start in the shard) of what it gets."""
    extents: tuple[tuple[int, int], ...]
    """Per rank: where in its shard the elements it gets start, and how many they are."""


def packs_all(device: torch.device, shard_numel: int) -> bool:
    """Whether everything is packed, instead of sending views of the gradients."""
    return device.type == "cpu" or shard_numel < _PACK_NUMEL


def rounds_of(numel: int, rounds: int) -> list[int]:
    """``numel`` elements in ``rounds`` parts that start at aligned places; the last ones may be empty."""
    part = align_up(-(-numel // rounds), _ALIGN_NUMEL)
    return [max(0, min(part, numel - i * part)) for i in range(rounds)]


def plan_sends(layout: GradLayout, ranks: int, *, rounds: int = 1) -> SendPlan:
    """Cut every gradient where the shards end, and the shards into rounds."""
    parts = list(_parts(layout, ranks))
    shares = Counter(rank for _, rank, _ in parts)
    cuts: list[list[int]] = [[] for _ in layout.runs]
    views: dict[int, tuple[int, int]] = {}
    packed: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in range(ranks) if shares[rank] > 1}
    extents = [(0, layout.layout.shard_numel if shares[rank] else 0) for rank in range(ranks)]
    for index, rank, part in parts:
        position, start, numel = len(cuts[index]), part.target.run_start or 0, part.target.numel
        if rank in packed:
            packed[rank].append((index, position, start))
            cuts[index].append(numel)
        else:
            views[rank] = (index, position)
            extents[rank] = (start, numel)
            cuts[index] += rounds_of(numel, rounds)
    return SendPlan(rounds, tuple(map(tuple, cuts)), views, packed, tuple(extents))


def _parts(layout: GradLayout, ranks: int) -> Iterator[tuple[int, int, Shared]]:
    """What each parameter's gradient and each rank's shard have in common, in the order of the gradients."""
    shard = layout.layout.shard_numel
    for index, runs in enumerate(layout.runs):
        for run in runs:
            start = layout.layout.offsets[run.index]
            gradient = (((start,), (run.numel,)),)
            for rank in range(start // shard, min(ranks, -(-(start + run.numel) // shard))):
                for part in shared_boxes(gradient, (((rank * shard,), (shard,)),)):
                    yield index, rank, part


class Step(NamedTuple):
    """One part of the slots of one node: what the ranks of this rank's node send each other at a time."""

    slots: tuple[int, ...]
    """The ranks of the node that is served, by place; a rank's slot has its number."""
    round: int
    """Which part of them."""
    start: int
    """Where in the extent of the slot in this rank's rail the part starts, and how long it is."""
    numel: int
    position: int
    """Where the slot of this rank's rail stands in the rail."""
    source: int
    """From which position of the rail a sum of this rank's own slot comes in return."""
    part: tuple[int, int]
    """Start and length of what it brings, in the extent of this rank's own slot."""


def plan_steps(sends: SendPlan, levels: Levels, rank: int) -> Iterator[Step]:
    """What ``rank`` does, from the slots of the node after its own to those of its own, part by part.

    In each step what a node sends along its rails is what another one receives in the same step: NCCL runs
    the exchanges of a rail one after the other, and would wait for ever for a message of a later one.
    """
    node, place = levels.find(rank)
    nodes, rail = len(levels.nodes), levels.rails[place]
    own = rounds_of(sends.extents[rank][1], sends.rounds)
    for ahead in (*range(1, nodes), 0):
        slots = levels.nodes[(node + ahead) % nodes]
        source = rail.index(levels.nodes[(node - ahead) % nodes][place])
        parts = rounds_of(sends.extents[slots[place]][1], sends.rounds)
        for part, numel in enumerate(parts):
            arrives = (sum(own[:part]), own[part])
            yield Step(slots, part, sum(parts[:part]), numel, rail.index(slots[place]), source, arrives)


@dataclass(frozen=True)
class GradExchangePlan:
    """All of an exchange that follows from the layout of its gradients."""

    layout: GradLayout
    wire: torch.dtype
    """The dtype of the gradients."""
    between: torch.dtype
    """The dtype of the sums that travel between nodes."""
    sends: SendPlan | None
    """How the gradients are cut; None if they are packed as a whole."""
    extent: tuple[int, int]
    """Where in this rank's shard the elements it gets start, and how many they are."""
    rows: tuple[int, int, int]
    """Steps under way together, ranks of a node, elements from each of them in one step."""
    sums: tuple[int, int] = (0, 0)
    """Nodes and elements of the sums that are sent along the rail."""
    arrivals: tuple[int, int] = (0, 0)
    """Nodes and elements of those that come in return."""
    steps: tuple[Step, ...] = ()

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where packed gradients, those sorted by place, rows, sums and arrivals start, and the end."""
        packed = 0 if self.sends is not None else self.layout.layout.buffer_numel * self.wire.itemsize
        rail = [math.prod(shape) * self.between.itemsize for shape in (self.sums, self.arrivals)]
        by_place = packed if rail[0] else 0
        sizes = (packed, by_place, math.prod(self.rows) * self.wire.itemsize, *rail)
        return tuple(accumulate((align_up(size, _ALIGN_BYTES) for size in sizes), initial=0))


def plan_grad_exchange(
    layout: GradLayout, over: LevelGroups, device: torch.device, wire: torch.dtype, between: torch.dtype
) -> GradExchangePlan:
    """What this rank sends and receives of gradients in dtype ``wire``, whose sums travel in ``between``."""
    nodes, places, shard_numel = len(over.levels.nodes), over.levels.ranks_per_node, layout.layout.shard_numel
    if packs_all(device, shard_numel):
        rail = (nodes, shard_numel) if nodes > 1 else (0, 0)
        rows = (1, places, nodes * shard_numel)
        return GradExchangePlan(layout, wire, between, None, (0, shard_numel), rows, rail, rail)
    sends = plan_sends(layout, layout.layout.ranks, rounds=_rounds(device, shard_numel, nodes))
    steps = tuple(plan_steps(sends, over.levels, over.rank))
    numel = max(step.numel for step in steps)
    rows = (min(2, len(steps)), places, align_up(numel, _ALIGN_NUMEL))
    extent, sums, arrivals = sends.extents[over.rank], (0, 0), (0, 0)
    if nodes > 1:
        longest = max(sends.extents[slot][1] for slot in over.levels.rails[over.place])
        sums, arrivals = (nodes, longest), (nodes, extent[1])
    return GradExchangePlan(layout, wire, between, sends, extent, rows, sums, arrivals, steps)


def _rounds(device: torch.device, shard_numel: int, nodes: int) -> int:
    """In how many parts the slots of one node travel."""
    if device.type == "cpu":
        return 1
    return max(1, min(-(-_STEPS // nodes), shard_numel // _ROUND_NUMEL))
