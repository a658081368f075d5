"""The seconds and bytes of a model's layers: from a card where it has them, else counted and modelled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ragged_fsdp.predict.books import LayerRun
from ragged_fsdp.predict.card import Card, Point
from ragged_fsdp.predict.costs import LayerCost, Roofline, count_costs
from ragged_fsdp.predict.parallel import ReplicaRanks, shared_point
from ragged_fsdp.predict.products import products_of
from ragged_fsdp.predict.workload import Workload

__all__ = ["Amount", "runs_of"]

_FUSED = 0.5
"""What a compiled layer still moves and launches of its operations bound by memory."""


@dataclass(frozen=True)
class Amount:
    """The tokens of one micro-batch of a GPU, or of the GPUs that share them."""

    tokens: int
    seq_len: int
    compiled: bool = False


def runs_of(
    workload: Workload, amount: Amount, ranks: ReplicaRanks, card: Card
) -> tuple[dict[tuple[str, bool], LayerRun], bool]:
    """By signature, and whether backward computes the forward again; and whether all was measured."""
    tokens, seq_len = amount.tokens, amount.seq_len
    cards = {
        kind.signature: None if amount.compiled else card.layer(kind.signature, seq_len)
        for kind in workload.kinds
    }
    runs: dict[tuple[str, bool], LayerRun] = {}
    measured = all(cards.values())
    counted = {} if measured else _counted(workload, tokens // seq_len, seq_len)
    for kind in workload.kinds:
        found = cards[kind.signature]
        operations = 0.0, 0.0
        if found is not None:
            point = found.at(tokens)
        else:
            fused = _FUSED if amount.compiled else 1.0
            cost = counted[kind.signature]
            point = _modelled(cost, kind.sort, tokens, card, fused)
            operations = cost.forward.launches(fused), cost.backward.launches(fused)
        point = shared_point(point, workload, kind, ranks, card)
        products = products_of(workload, kind, tokens, ranks, card)
        held = products.held(point)
        products_s = products.seconds if card.measured else 0.0
        runs[kind.signature, False] = LayerRun(
            point.forward_ms / 1e3,
            point.backward_ms / 1e3,
            int(point.saved_bytes),
            int(point.forward_peak_bytes),
            int(point.backward_peak_bytes),
            contention=point.contention,
            held=held,
            forward_products_s=products_s,
            backward_products_s=2 * products_s,
            forward_operations=operations[0],
            backward_operations=operations[1],
        )
        runs[kind.signature, True] = LayerRun(
            point.forward_ms / 1e3,
            (point.backward_ms + point.recompute_ms) / 1e3,
            int(point.recompute_saved_bytes),
            int(point.forward_peak_bytes),
            int(point.recompute_peak_bytes),
            contention=point.contention,
            held=held,
            forward_products_s=products_s,
            backward_products_s=3 * products_s,
            forward_operations=operations[0],
            backward_operations=sum(operations),
        )
    return runs, measured


@lru_cache(maxsize=64)
def _counted(workload: Workload, sequences: int, seq_len: int) -> dict[str, LayerCost]:
    """Costs on fake tensors. More than two sequences are a line through one and two: counting is slow."""
    if sequences <= 2:
        return count_costs(workload, sequences, seq_len)
    one, two = (_counted(workload, n, seq_len) for n in (1, 2))
    return {key: _line(one[key], two[key], sequences) for key in one}


def _line(one: LayerCost, two: LayerCost, at: int) -> LayerCost:
    def between(low: float, high: float) -> float:
        return low + (at - 1) * (high - low)

    phases = []
    for low, high in ((one.forward, two.forward), (one.backward, two.backward)):
        operations = [
            (kind, between(flops, more_flops), between(moved, more_moved))
            for (kind, flops, moved), (_, more_flops, more_moved) in zip(low.operations, high.operations)
        ]
        peak = int(between(low.peak_bytes, high.peak_bytes))
        left = int(between(low.left_bytes, high.left_bytes))
        phases.append(type(low)(operations, peak, left))
    return LayerCost(phases[0], phases[1], int(between(one.output_bytes, two.output_bytes)))


def _modelled(cost: LayerCost, sort: str, tokens: int, card: Card, fused: float) -> Point:
    """A layer that the card has not seen: a roofline, times what the card's own layers took over theirs."""
    roofline = Roofline(card.matmul_tflops, card.attention_tflops, card.memory_gb_s, card.kernel_us, fused)
    forward, backward = cost.forward.seconds(roofline) * 1e3, cost.backward.seconds(roofline) * 1e3
    return Point(
        tokens=tokens,
        forward_ms=forward * card.ratio("forward", sort),
        backward_ms=backward * card.ratio("backward", sort),
        recompute_ms=forward * card.ratio("forward", sort),
        saved_bytes=cost.saved_bytes,
        forward_peak_bytes=cost.forward.peak_bytes,
        backward_peak_bytes=cost.backward.peak_bytes,
        recompute_saved_bytes=cost.output_bytes,
        recompute_peak_bytes=cost.recompute_peak_bytes,
        roofline_forward_ms=forward,
        roofline_backward_ms=backward,
        contention=card.contention(),
    )
