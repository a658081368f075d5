"""What the collectives of a step send over each of two links: inside a node, and over the card of each GPU.

Of N ranks in nodes of n, one slot of the buffer each, every rank sends so many slots::

    collective                inside its node                  over its card
    gather, reduce_scatter    N - 1 - (N - n) / n              (N - n) / n: all cards of a node share its part
    all_to_all                n - 1                            N - n
    two_level                 N - N / L, then n / L - 1        (N - n) / L

``two_level`` goes through parts of L ranks: whole nodes if they are equal. Where nodes differ, the numbers
are those of a rank on the smallest, whose card has most to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragged_fsdp.cli.plan_costs import PlannedModel

if TYPE_CHECKING:
    from ragged_fsdp.topology import Levels

__all__ = ["NetworkPlan", "PlannedTraffic", "network_of"]

_GRADIENTS = {"fp32": ("fp32", 4), "bf16": ("bf16", 2), "fp16": ("fp16", 2), "fp8": ("bf16", 2)}
"""Dtype and bytes of the gradients by the dtype of the buffers."""


@dataclass(frozen=True)
class PlannedTraffic:
    """Bytes that one GPU sends in a step, for all groups of a model together."""

    collective: str
    detail: str
    inside_bytes: int
    card_bytes: int


@dataclass(frozen=True)
class NetworkPlan:
    """The levels of an FSDP size, what each collective sends there, and what ``auto`` picks."""

    levels: Levels
    traffic: tuple[PlannedTraffic, ...]
    auto: str

    def as_json(self) -> dict[str, Any]:
        return {
            "nodes": len(self.levels.nodes),
            "ranks_per_node": self.levels.ranks_per_node,
            "largest_node": self.levels.largest_node,
            "auto": self.auto,
            "traffic": [vars(entry) for entry in self.traffic],
        }


def network_of(plan: PlannedModel, ranks_per_node: int, dtype: str) -> NetworkPlan:
    """The network of ``plan`` if so many consecutive ranks are a node; ``dtype`` is that of its buffers."""
    from ragged_fsdp.fsdp.construct.network import pick_reduction  # needs torch, which most plans do without
    from ragged_fsdp.topology import Levels

    ranks, slot_numel = plan.ranks, plan.bytes_per_rank // plan.element_bytes
    levels = Levels.of([rank // ranks_per_node for rank in range(ranks)])
    node = ranks % ranks_per_node or min(ranks, ranks_per_node)
    gradient, gradient_bytes = _GRADIENTS[dtype]

    def ring(collective: str, detail: str, slot_bytes: int) -> PlannedTraffic:
        card = -(-slot_bytes * (ranks - node) // node)
        return PlannedTraffic(collective, detail, slot_bytes * (ranks - 1) - card, card)

    def exchange(
        collective: str, detail: str, inside_slots: int, card_slots: int, size: int
    ) -> PlannedTraffic:
        first = len(levels.nodes) * (levels.ranks_per_node - 1) if collective == "two_level" else 0
        inside = first * gradient_bytes + inside_slots * size
        return PlannedTraffic(collective, detail, slot_numel * inside, slot_numel * card_slots * size)

    sent = f"{gradient} gradients"
    traffic = [
        ring("gather", f"{dtype}, before forward and before backward", 2 * plan.bytes_per_rank),
        ring("reduce_scatter", "fp32 sums", slot_numel * 4),
        ring("reduce_scatter", "bf16 sums", slot_numel * 2),
        exchange("all_to_all", sent, node - 1, ranks - node, gradient_bytes),
    ]
    if levels.has_two:
        part = levels.ranks_per_node
        rail = (node // part - 1, (ranks - node) // part)  # slots for other parts of its node, and of others
        between = {"bf16": 2, "fp32": 4} if gradient == "bf16" else {"fp32": 4}
        traffic += [
            exchange("two_level", f"{sent}, {name} between nodes", *rail, size)
            for name, size in between.items()
        ]
    return NetworkPlan(levels, tuple(traffic), pick_reduction("auto", levels, widens=gradient_bytes < 4))
