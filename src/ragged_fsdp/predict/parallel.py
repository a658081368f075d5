"""Which ranks share a layer's parameters, and what they send each other to compute with it.

=====================  ==========================  =============================================
parameters             sharded by FSDP over        computation waits for
=====================  ==========================  =============================================
all                    the ranks of a replica      nothing
experts, with ``ep``   those with the same         tokens to their experts, and back, a pass
                       experts, ``ep`` apart, or
                       neighbours, across nodes
split, with ``tp``     those with the same part,   two sums of activations a pass; once the
                       ``tp`` apart                logits
=====================  ==========================  =============================================

Tensor-parallel ranks share their tokens: ``tp`` times those of a GPU. What they split takes one ``tp``-th of
the time and memory; norms and residuals between the layers they compute alike. A rank with fewer experts
computes as many rows, but reads fewer weights and has fewer gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ragged_fsdp.models.splits import Split, refusal
from ragged_fsdp.predict.books import LayerRun
from ragged_fsdp.predict.card import Card, Point
from ragged_fsdp.predict.groups import Shapes
from ragged_fsdp.predict.network import Network, Place, Seconds, price
from ragged_fsdp.predict.workload import ROOT, LayerKind, Workload

__all__ = ["LayerPart", "ReplicaRanks", "exchanged", "parts_of", "refuse_without_experts", "shared_point"]

_BF16 = 2
_WHOLE_FORWARD, _WHOLE_BACKWARD, _WHOLE_SAVED = 10, 14, 4
"""Times that two norms and two residual sums of a layer read or write all tokens, and what they keep."""


@dataclass(frozen=True)
class ReplicaRanks:
    """The ranks of one replica and how they share layers."""

    count: int
    ep: int = 1
    tp: int = 1
    fsdp2: bool = False
    """FSDP2 shards what is not split over the ranks with the same part too."""
    ep_across_nodes: bool = False
    """Whether those that share experts lie as far apart as can be, and those with the same are neighbours."""

    @property
    def same_experts(self) -> int:
        """How many have the same experts."""
        return self.count // self.ep


@dataclass(frozen=True)
class LayerPart:
    """Parameters of a layer that the same ranks shard."""

    name: str
    shapes: Shapes
    ranks: int
    apart: int
    """How far apart in the order of ranks two neighbours of these are."""
    groups: int
    """How many groups of such ranks a replica has, each with a part of its own, or with all."""


def parts_of(workload: Workload, kind: LayerKind, ranks: ReplicaRanks) -> list[LayerPart]:
    """One part, or what every rank has and what it has a part of."""
    whole: list[tuple[str, tuple[int, ...]]] = []
    taken: list[tuple[str, tuple[int, ...]]] = []
    name, groups = ("split layer", ranks.tp) if ranks.tp > 1 else ("experts of layer", ranks.ep)
    for parameter, shape in kind.shapes:
        if groups == 1 or not _is_shared(workload, kind, ranks, parameter, shape):
            whole.append((parameter, shape))
            continue
        dim = next((dim for dim, length in enumerate(shape) if length % groups == 0), None)
        if dim is None or (ranks.ep > 1 and dim):
            what = (
                f"ep: {parameter} has {shape[0]} experts" if ranks.ep > 1 else f"tp: {parameter} is {shape}"
            )
            raise ValueError(f"{what}, which {groups} ranks cannot share evenly")
        taken.append((parameter, tuple(n // groups if d == dim else n for d, n in enumerate(shape))))
    over = ranks.count // groups if ranks.fsdp2 and ranks.tp > 1 else ranks.count
    others = ranks.count // over
    parts = [LayerPart(ROOT if kind.name == ROOT else "layer", tuple(whole), over, others, others)]
    if taken:
        apart = 1 if ranks.ep_across_nodes else groups
        parts.append(LayerPart(name, tuple(taken), ranks.count // groups, apart, groups))
    return [part for part in parts if part.shapes]


def refuse_without_experts(workload: Workload, ranks: ReplicaRanks) -> None:
    """``ValueError`` where ranks are to share experts that the model does not have."""
    names = [name for kind in workload.kinds for name, _ in kind.shapes]
    if ranks.ep > 1 and not any(".experts." in f".{name}" for name in names):
        raise ValueError(f"ep = {ranks.ep}: the model {workload.name!r} has no experts that can be spread")


def _is_shared(
    workload: Workload, kind: LayerKind, ranks: ReplicaRanks, name: str, shape: tuple[int, ...]
) -> bool:
    if ranks.ep > 1:
        return ".experts." in f".{name}" and len(shape) > 1
    if problem := refusal("tp", ranks.tp, workload.tp):
        raise ValueError(problem)
    return any(fnmatchcase(f"{name}.", f"{pattern}.*") for pattern in _split_modules(workload, kind))


def _split_modules(workload: Workload, kind: LayerKind) -> Iterator[str]:
    """Names as the kind has them: inside a layer without the layer's own."""
    assert isinstance(workload.tp, Split)
    for module in workload.tp.modules:
        before, star, inside = module.partition(".*.")
        if bool(star) == (kind.name != ROOT):
            yield inside or before


# -- tokens ----------------------------------------------------------------------------------------


def exchanged(
    run: LayerRun,
    workload: Workload,
    kind: LayerKind,
    ranks: ReplicaRanks,
    tokens: int,
    again: bool,
    network: Network,
) -> LayerRun:
    """``run`` with what computation waits for; ``again``: its backward computes the forward once more."""
    forward = backward = Seconds(0.0, 0.0)
    if ranks.ep > 1 and any(len(shape) == 3 and ".experts." in f".{name}" for name, shape in kind.shapes):
        nbytes = tokens * workload.experts_per_token * workload.width * _BF16
        apart = ranks.same_experts if ranks.ep_across_nodes else 1
        way = price("all_to_all", nbytes, Place.even(ranks.ep, network, apart), network)
        forward = backward = _times(way, 2)
    elif ranks.tp > 1:
        place, width = Place.even(ranks.tp, network), tokens * workload.width * _BF16
        total = price("all_reduce", width, place, network)
        forward = backward = _times(total, 2)
        if kind.name == ROOT:
            rows = [shape[0] for part in parts_of(workload, kind, ranks)[1:] for _, shape in part.shapes]
            logits = tokens * sum(rows) * ranks.tp * _BF16
            forward, backward = price("all_gather", logits, place, network), total
    if again:
        backward = Seconds(*(a + b for a, b in zip(forward, backward)))
    return replace(run, forward_exchange=forward, backward_exchange=backward)


def _times(held: Seconds, times: int) -> Seconds:
    return Seconds(held.inside * times, held.outside * times)


def shared_point(point: Point, workload: Workload, kind: LayerKind, ranks: ReplicaRanks, card: Card) -> Point:
    """The computation of a rank that shares a layer, from that of a GPU that has all of it."""
    if ranks.ep > 1:
        return _with_fewer_experts(point, workload, kind, ranks.ep, card)
    return _split_point(point, workload, kind, ranks, card) if ranks.tp > 1 else point


def _with_fewer_experts(point: Point, workload: Workload, kind: LayerKind, ep: int, card: Card) -> Point:
    """``point`` with its rows on a part of the experts: less to read of weights, fewer gradients to write."""
    experts = [shape for name, shape in kind.shapes if ".experts." in f".{name}" and len(shape) == 3]
    if not experts:
        return point
    held = _BF16 * sum(map(_numel, experts))
    rows = point.tokens * workload.experts_per_token
    product_ms = 2 * rows * sum(_numel(shape[1:]) for shape in experts) / (card.matmul_tflops * 1e9)
    read_ms = held / (card.memory_gb_s * 1e6)
    less_ms = max(read_ms, product_ms) - max(read_ms / ep, product_ms)
    less_bytes = int(held * (1 - 1 / ep))
    return replace(
        point,
        forward_ms=max(0.0, point.forward_ms - less_ms),
        backward_ms=max(0.0, point.backward_ms - 2 * less_ms),
        recompute_ms=max(0.0, point.recompute_ms - less_ms),
        backward_peak_bytes=max(0, point.backward_peak_bytes - less_bytes),
        recompute_peak_bytes=max(0, point.recompute_peak_bytes - less_bytes),
    )


def _split_point(point: Point, workload: Workload, kind: LayerKind, ranks: ReplicaRanks, card: Card) -> Point:
    """One tensor-parallel rank's part of what a GPU computes with the tokens of all of them."""
    saved_share = 1 - 1 / ranks.tp
    if kind.name == ROOT:  # only the product with the head is split, and not what its logits need
        shared = sum(
            _numel(shape) for part in parts_of(workload, kind, ranks)[1:] for _, shape in part.shapes
        )
        product_ms = 2 * point.tokens * shared * ranks.tp / (card.matmul_tflops * 1e9)
        return replace(
            point,
            forward_ms=point.forward_ms - saved_share * min(product_ms, point.forward_ms),
            backward_ms=point.backward_ms - saved_share * min(2 * product_ms, point.backward_ms),
        )
    once = point.tokens * workload.width * _BF16
    once_ms = once / (card.memory_gb_s * 1e6)

    def share(value: float, whole: float) -> float:
        return value - saved_share * max(0.0, value - whole)

    return replace(
        point,
        forward_ms=share(point.forward_ms, _WHOLE_FORWARD * once_ms),
        backward_ms=share(point.backward_ms, _WHOLE_BACKWARD * once_ms),
        recompute_ms=share(point.recompute_ms, _WHOLE_FORWARD * once_ms),
        saved_bytes=int(share(point.saved_bytes, _WHOLE_SAVED * once)),
        forward_peak_bytes=int(share(point.forward_peak_bytes, _WHOLE_SAVED * once)),
        backward_peak_bytes=int(share(point.backward_peak_bytes, _WHOLE_SAVED * once)),
        recompute_peak_bytes=int(share(point.recompute_peak_bytes, _WHOLE_SAVED * once)),
        roofline_forward_ms=share(point.roofline_forward_ms, _WHOLE_FORWARD * once_ms),
        roofline_backward_ms=share(point.roofline_backward_ms, _WHOLE_BACKWARD * once_ms),
    )


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total
