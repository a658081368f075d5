"""What a group of parameters costs to gather and to reduce: bytes from the plan, seconds from the network.

Formulas are those of ``docs/network.md``; prices of collectives are those of
:mod:`ragged_fsdp.predict.network`, which the step benchmark charges too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from ragged_fsdp.fsdp.construct.network import pick_reduction
from ragged_fsdp.layout import TensorSpec
from ragged_fsdp.planner import plan_group
from ragged_fsdp.predict.books import GroupCost
from ragged_fsdp.predict.card import Card
from ragged_fsdp.predict.network import Network, Place, Seconds, Traffic, exchange_price, price
from ragged_fsdp.topology import Levels

__all__ = ["Shapes", "Wires", "fsdp2_numel", "group_cost", "planned_numel"]

_BF16, _FP32 = 2, 4
_ROUND_NUMEL = 1 << 19  # of fsdp/reduce/sends.py: an exchange has fewer rounds, or is packed, below this
_ROUNDS = 4
_CHUNKS = 8  # steps of a two-level reduction that are simulated one by one
_RAIL_CALLS = 8  # of fsdp/reduce/exchange.py: sums of so many parts of the nodes leave together
_SCALES = 1 + 4 / 128**2  # bytes of an 8-bit code and its part of the scale of a tile
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Wires:
    """How parameters are sharded and moved."""

    network: Network
    shard: int
    """Ranks of a shard group."""
    apart: int = 1
    """How far they lie apart in rank: the experts of a rank are sharded over those that hold the same."""
    replicas: int = 1
    replica_ranks: int | None = None
    """Ranks of a replica; None: those of the shard group, and all between them."""
    implementation: str = "ragged"
    reduction: str = "auto"
    reduce_bytes: int = _FP32
    internode_bytes: int = _BF16
    codes: bool = False
    """Whether large matrices are gathered as 8-bit codes."""
    park: int = 0
    """``reshard_after_forward`` as an int."""
    offload: bool = False
    """Whether shards live in the host's memory."""
    ring_table: tuple[tuple[float, float], ...] = ()
    """Bytes and GB/s (bus bandwidth) of a gather as measured: of gathers and reduce-scatters, instead of the
    network's rate."""

    @property
    def place(self) -> Place:
        return Place.even(self.shard, self.network, self.apart)

    @property
    def picked(self) -> str:
        """The reduction after ``auto``."""
        if self.implementation == "fsdp2" or self.reduce_bytes <= _BF16:
            return "reduce_scatter"
        if self.reduction != "auto":
            return self.reduction
        per_node = max(1, (self.network.ranks_per_node or self.shard * self.apart) // self.apart)
        here = min(self.shard, per_node)
        if 1 < here < self.shard and self.shard % here == 0:  # equal nodes: two are no different from all
            return pick_reduction("auto", Levels.of([0] * here + [1] * here), widens=True)
        nodes = [rank // per_node for rank in range(min(self.shard, 8 * per_node))]  # more are no different
        return pick_reduction("auto", Levels.of(nodes), widens=True)

    def ring(self, kind: str, nbytes: float, place: Place | None = None) -> Seconds:
        """A collective of a full buffer; the table is of rings, in which a node's cards share the bytes."""
        held = price(kind, nbytes, place or self.place, self.network)
        if place is not None or not self.ring_table or kind == "all_to_all":
            return held
        measured = nbytes * (1 - 1 / self.shard) / (_interpolate(self.ring_table, nbytes) * 1e9)
        return Seconds(held.inside, measured) if self.place.nodes > 1 else Seconds(measured, 0.0)


def _interpolate(table: Sequence[tuple[float, float]], nbytes: float) -> float:
    """The rate at ``nbytes``: a line in the logarithm of the size, constant beyond the ends."""
    if nbytes <= table[0][0]:
        return table[0][1]
    for (low, low_rate), (high, high_rate) in pairwise(table):
        if nbytes <= high:
            share = math.log(nbytes / low) / math.log(high / low)
            return low_rate + share * (high_rate - low_rate)
    return table[-1][1]


@cache
def planned_numel(shapes: Shapes, ranks: int) -> int:
    """Elements of a rank's shard in our layout, element-wise."""
    specs = [TensorSpec(name, math.prod(shape)) for name, shape in shapes]
    return plan_group(specs, ranks).shard_numel


def fsdp2_numel(shapes: Shapes, ranks: int) -> int:
    """Elements of a rank's shard under FSDP2, which rounds every first dim up to a multiple of the ranks."""
    return sum(-(-(shape or (1,))[0] // ranks) * math.prod((shape or (1,))[1:]) for _, shape in shapes)


def group_cost(name: str, shapes: Shapes, wires: Wires, card: Card) -> GroupCost:
    """The costs of one group."""
    numel = sum(math.prod(shape) for _, shape in shapes)
    ours = wires.implementation != "fsdp2"
    shard_numel = (planned_numel if ours else fsdp2_numel)(shapes, wires.shard)
    full = shard_numel * wires.shard
    memory = card.memory_gb_s * 1e9
    gather, gather_again, decode = _gather(full, wires, card)
    message = int(full * _SCALES) if wires.codes else 0
    copies = 2 * (message or full * _BF16) / memory if wires.shard > 1 else 0.0
    kinds = {"reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all, "two_level": _two_level}
    picked = wires.picked
    if picked not in kinds:
        raise ValueError(f"reduction: expected auto, {', '.join(kinds)}, got {picked!r}")
    reduced = kinds[picked](full, shard_numel, wires, card)
    from_host = shard_numel * _FP32 / (card.host_gb_s * 1e9) if wires.offload else 0.0
    if wires.offload:  # a gradient goes to the host when it is reduced
        *parts, (held, summed) = reduced["reduce"]
        reduced["reduce"] = (*parts, (held, summed + from_host))
    copy = 2 * full * _BF16 / (card.interleave_gb_s * 1e9) if not ours and wires.shard > 1 else 0.0
    between = Seconds(0.0, 0.0)
    if wires.replicas > 1:
        apart = wires.replica_ranks or wires.shard * wires.apart
        place = Place.even(wires.replicas, wires.network, apart=apart)
        between = wires.ring("all_reduce", shard_numel * wires.reduce_bytes, place)
    return GroupCost(
        name=name,
        gathered_bytes=full * _BF16,
        gather=gather,
        gather_again=gather_again,
        cast_s=shard_numel * (_FP32 + (1 if wires.codes else _BF16)) / memory + from_host,
        memory_s=copies,
        decode_s=decode,
        message_bytes=message,
        copy_out_s=copy,
        grad_bytes=numel * _BF16,
        all_reduce=between,
        shard_grad_bytes=0 if wires.offload else shard_numel * _FP32,
        parked_bytes=full * _BF16 // wires.park if wires.park else 0,
        parameters=len(shapes),
        **reduced,
    )


def _gather(full: int, wires: Wires, card: Card) -> tuple[Seconds, Seconds, float]:
    """The gather before forward, the one before backward, and the seconds of codes."""
    if wires.shard == 1:
        return Seconds(0.0, 0.0), Seconds(0.0, 0.0), 0.0
    nbytes, decode = full * _BF16, 0.0
    if wires.codes:
        nbytes = int(full * _SCALES)
        decode = full * (1 + _BF16) / (card.decode_gb_s * 1e9)
    first = wires.ring("all_gather", nbytes)
    if not wires.park:
        return first, first, decode
    inside = Place.even(wires.park, wires.network)
    return first, wires.ring("all_gather", nbytes, inside), decode


def _reduce_scatter(full: int, shard_numel: int, wires: Wires, card: Card) -> dict[str, Any]:
    """Gradients are cast into a buffer and added on the wire."""
    if wires.implementation == "fsdp2":
        rate = card.chunk_cat_gb_s if wires.reduce_bytes == _FP32 else card.chunk_cat_bf16_gb_s
    else:
        rate = card.collect_gb_s if wires.reduce_bytes == _FP32 else card.memory_gb_s
    held = wires.ring("reduce_scatter", full * wires.reduce_bytes) if wires.shard > 1 else Seconds(0.0, 0.0)
    tail = shard_numel * (wires.reduce_bytes + _FP32) / (card.memory_gb_s * 1e9)
    return {
        "grad_copy_s": full * (_BF16 + wires.reduce_bytes) / (rate * 1e9),
        "buffer_bytes": full * wires.reduce_bytes,
        "reduce": ((held, tail),),
    }


def _all_to_all(full: int, shard_numel: int, wires: Wires, card: Card) -> dict[str, Any]:
    """Gradients travel as they are, in rounds, and are added on arrival."""
    nbytes = full * _BF16
    summed = (nbytes + shard_numel * _FP32) / (card.sum_rows_gb_s * 1e9)
    rounds = max(1, min(_ROUNDS, shard_numel // _ROUND_NUMEL))
    held = wires.ring("all_to_all", nbytes / rounds) if wires.shard > 1 else Seconds(0.0, 0.0)
    parts = ((held, summed / rounds),) * rounds
    if shard_numel < _ROUND_NUMEL:  # packed as a whole: the gradients go at once
        return {
            "grad_copy_s": 2 * nbytes / (card.memory_gb_s * 1e9),
            "buffer_bytes": 2 * nbytes,
            "reduce": parts,
            "reduce_calls": rounds,
        }
    alive = min(2, rounds) / rounds
    return {"keeps_grads": True, "buffer_bytes": int(nbytes * alive), "reduce": parts, "reduce_calls": rounds}


def _two_level(full: int, shard_numel: int, wires: Wires, card: Card) -> dict[str, Any]:
    """Inside the node, then the nodes' sums between them, one behind the other; small shards all at once."""
    place, network = wires.place, wires.network
    part, nodes = place.fewest, place.nodes
    if nodes == 1 or part == 1:  # one level
        return _all_to_all(full, shard_numel, wires, card)
    slot, rail = shard_numel * _BF16, shard_numel * wires.internode_bytes
    rows = card.sum_rows_gb_s * 1e9
    summed = (slot * part + rail) / rows
    last = (rail * nodes + shard_numel * _FP32) / rows
    grads = full * _BF16
    if shard_numel < _ROUND_NUMEL:
        inside = exchange_price(Traffic(*[slot * (part - 1) * nodes] * 2), network).inside
        outside = exchange_price(Traffic(0, 0, *[rail * (nodes - 1)] * 2), network).outside
        copied = 2 * grads / (card.memory_gb_s * 1e9)  # packed, and then sorted by rails
        return {
            "grad_copy_s": copied,
            "buffer_bytes": 2 * grads + 2 * grads // part,
            "reduce": (
                (Seconds(0.0, 0.0), copied),
                (Seconds(inside, 0.0), summed * nodes),
                (Seconds(0.0, outside), last),
            ),
            "reduce_calls": 2,
        }
    inside = exchange_price(Traffic(*[slot * (part - 1)] * 2), network).inside
    outside = exchange_price(Traffic(0, 0, rail, rail), network).outside
    chunks = min(nodes, _CHUNKS)
    each = nodes / chunks
    parts = [(Seconds(inside * each, 0.0), summed * each)]
    parts += [(Seconds(inside * each, outside * (nodes - 1) / chunks), summed * each)] * (chunks - 1)
    parts.append((Seconds(0.0, outside * (nodes - 1) / chunks), last))
    rounds = max(1, min(-(-_ROUNDS // nodes), shard_numel // _ROUND_NUMEL))
    rail_calls = -(-(nodes - 1) // max(1, nodes // _RAIL_CALLS)) * rounds
    calls = nodes * rounds + rail_calls
    buffer = 2 * grads // nodes + (grads + full * wires.internode_bytes) // part
    return {"keeps_grads": True, "buffer_bytes": buffer, "reduce": tuple(parts), "reduce_calls": calls}
