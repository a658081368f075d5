"""Networks with nodes, and what a collective costs on them.

A GPU has two ways out: NVLink to the other GPUs of its node (the level *inside*) and one network card of
its own to everybody else (the level *outside*). Each has a rate and a latency per step. What a collective
of ``N`` ranks costs on each level follows from where its group's ranks lie: ``M`` nodes, of which the
smallest has ``n`` of them (their cards are the narrowest place of a ring; ``n`` is the same everywhere
unless the group cuts nodes unevenly), and ``h`` in this rank's own. ``B`` is the full buffer, all ranks'
parts together.

==================================  ==========================  =========================  =============
collective                          bytes on the GPU's NVLink   bytes on the GPU's card    steps
==================================  ==========================  =========================  =============
all-gather, reduce-scatter          B (1 - 1/N)                 B (1 - n/N) / n            ring
all-reduce                          2 B (1 - 1/N)               2 B (1 - n/N) / n          ring or tree
broadcast, reduce                   B                           B / n                      ring
all-to-all of equal parts           B (h - 1)/N                 B (N - h)/N                one
other all-to-all, gather, scatter,  to or from ranks inside,    to or from ranks outside,  one
point to point                      the larger of the two       the larger of the two
barrier                             none                        none                       as all-reduce
==================================  ==========================  =========================  =============

A level that no two ranks of the group share costs nothing: with one rank per node (a rail) a ring has its
own card only, ``B (1 - 1/N)`` bytes on it, and nothing inside; a group within a node has nothing outside.

Steps are NCCL's own count (``src/graph/tuning.cc``). A ring makes ``N - M`` steps inside and ``M - 1``
outside, twice as many for an all-reduce; a tree makes ``2 (n_max - 1)`` inside and ``2 log2(M)`` outside
(``n_max``: ranks of the largest node), and NCCL takes the faster one of the two. A level is held for its
bytes and its own steps; the level outside for the steps inside as well, since a part that goes round waits
for both.

A real ring carries more between nodes, ``B (1 - 1/N) / n`` (an eighth more at 64 ranks in nodes of 8): a part
that has come round a node is sent on although its neighbours there have it. The smaller number is charged
to everybody, which is kind to who uses rings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

__all__ = [
    "COLLECTIVES",
    "PROFILES",
    "Network",
    "Place",
    "Seconds",
    "Traffic",
    "WireName",
    "exchange_price",
    "network_of",
    "price",
    "wire_text",
]

WireName = float | str | None
"""How a case names a network: None is free, a number one NVLink domain of so many GB/s, a text a profile."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "reduce", "barrier")
_RING_TWICE = ("all_reduce", "barrier")
_RING_ONCE = ("all_gather", "reduce_scatter")


class Seconds(NamedTuple):
    """How long a collective holds each level."""

    inside: float
    outside: float


@dataclass(frozen=True)
class Network:
    """Rates are 1e9 bytes per second that one GPU can use each way; None takes no time."""

    name: str
    inside_gb_s: float | None = None
    card_gb_s: float | None = None
    ranks_per_node: int | None = None
    """None: one NVLink domain of any size without latency, where every byte of a buffer is charged, this
    rank's own part too. That is the flat wire of the earlier results."""
    inside_step_us: float = 0.0
    outside_step_us: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node: expected at least 1, got {self.ranks_per_node}")
        for rate in (self.inside_gb_s, self.card_gb_s):
            if rate is not None and rate <= 0:
                raise ValueError(f"{self.name}: expected rates above 0 GB/s, got {rate}")

    @property
    def flat(self) -> bool:
        return self.ranks_per_node is None

    @property
    def free(self) -> bool:
        """Whether nothing takes time."""
        return self.flat and self.inside_gb_s is None

    @property
    def text(self) -> str:
        """The network in words, for the title of a table."""
        if self.flat:
            return self.name if self.free else f"one NVLink domain of {self.inside_gb_s:g} GB/s"
        return (
            f"{self.name}: nodes of {self.ranks_per_node}, {self.inside_gb_s:g} GB/s inside, "
            f"{self.card_gb_s:g} GB/s cards, {self.inside_step_us:g} and {self.outside_step_us:g} us per step"
        )


# Latency of a ring's step in NCCL's model (src/graph/tuning.cc, LL128: 1.9 us over NVLink, 4.0 us over the
# network). Large messages use the Simple protocol, whose steps take 3.4 and 14 us: LL128's are kind to long
# rings.
_STEPS_US = {"inside_step_us": 1.9, "outside_step_us": 4.0}

PROFILES = {
    profile.name: profile
    for profile in (
        # 8 x H100 or H200, 8 x 400 Gb/s. NVLink 4 has 450 GB/s each way, of which NCCL's collectives reach
        # about 400. A 400 Gb/s card has 50 GB/s each way; NCCL's maintainers expect 46 to 48 of it on two
        # nodes (github.com/NVIDIA/nccl-tests, issue 290), and larger jobs a little less: 45.
        Network("h200-400g", 400.0, 45.0, 8, **_STEPS_US),
        # The cluster of the veScale-FSDP paper: 8 x H800 per node, "400 GB/s NVLinks", which is 200 each
        # way; the same share of it as above is useful. Its Table 1: 64 ranks gather a GPT-OSS-120B layer
        # (6.43 GB in bf16) in 43.71 ms and reduce it (12.9 GB in fp32) in 94.24 ms: 18 and 17 GB/s per card
        # if each of eight carries its eighth of 63/64 of the bytes, 16 and 15 by the smaller number of
        # bytes charged here; 18 is kind to who moves most.
        Network("paper", 178.0, 18.0, 8, **_STEPS_US),
        # GB200 NVL72: NVLink 5 has 900 GB/s each way; 811 were measured with nccl-tests on 8 GPUs of two
        # trays (lixueduan.com/posts/ai/13-gb200-mnnvl-nccl-test). One 400 Gb/s card per GPU to other racks.
        Network("nvl72", 800.0, 45.0, 72, **_STEPS_US),
        # 8 x B200, 8 x 400 Gb/s: NVLink 5 as above, the cards of h200-400g.
        Network("b200-400g", 800.0, 45.0, 8, **_STEPS_US),
        # 8 x A100, 8 x 200 Gb/s: NVLink 3 has 300 GB/s each way, of which NCCL's collectives reach about 230
        # (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md); a 200 Gb/s card has 25, of which 22 are useful.
        Network("a100-200g", 230.0, 22.0, 8, **_STEPS_US),
        Network("flat", 400.0),
        Network("free"),
    )
}


def network_of(wire: WireName) -> Network:
    """The network that a case's wire names."""
    if wire is None:
        return PROFILES["free"]
    if not isinstance(wire, str):
        return Network(f"{wire:g} GB/s", float(wire))
    if wire not in PROFILES:
        raise ValueError(f"network: expected one of {', '.join(PROFILES)}, got {wire!r}")
    return PROFILES[wire]


def wire_text(wire: WireName) -> str:
    """A wire in one word or two, for a cell or an axis."""
    return "free" if wire is None else wire if isinstance(wire, str) else f"{wire:g}"


class Traffic(NamedTuple):
    """Bytes of one rank to and from ranks of its node, and to and from all others."""

    to_inside: float = 0
    from_inside: float = 0
    to_outside: float = 0
    from_outside: float = 0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self, other)))


@dataclass(frozen=True)
class Place:
    """Where the ranks of a group lie, seen from one of them."""

    ranks: int
    nodes: int
    fewest: int
    """Ranks of the group in the node that has fewest of them."""
    most: int
    here: int
    own: int | None
    """This rank's index in the group; None on a flat network, where its own part is charged too."""
    outside: tuple[bool, ...]
    """By index in the group: whether that rank lies in another node."""

    @staticmethod
    def of(group: Sequence[int], rank: int, network: Network) -> Place:
        """The place of global rank ``rank`` in a group of global ranks."""
        per_node = network.ranks_per_node
        nodes = [0 if per_node is None else other // per_node for other in group]
        own = list(group).index(rank)
        counts = Counter(nodes)
        return Place(
            ranks=len(nodes),
            nodes=len(counts),
            fewest=min(counts.values()),
            most=max(counts.values()),
            here=counts[nodes[own]],
            own=None if network.flat else own,
            outside=tuple(node != nodes[own] for node in nodes),
        )

    @staticmethod
    def even(ranks: int, network: Network, apart: int = 1) -> Place:
        """A group of ``ranks`` that lie ``apart`` in rank, seen from the first of them."""
        per_node = network.ranks_per_node or ranks * apart
        here = max(1, min(ranks, per_node // apart))
        nodes, rest = divmod(ranks, here)
        return Place(
            ranks=ranks,
            nodes=nodes + bool(rest),
            fewest=rest or here,
            most=here,
            here=here,
            own=None if network.flat else 0,
            outside=(),
        )

    def traffic(self, sent: Sequence[int], received: Sequence[int]) -> Traffic:
        """Bytes to and from each rank of the group, by level; what stays on this rank is on none."""
        to_outside, from_outside = (sum(compress(nbytes, self.outside)) for nbytes in (sent, received))
        to_inside, from_inside = sum(sent) - to_outside, sum(received) - from_outside
        if self.own is not None:
            to_inside, from_inside = to_inside - sent[self.own], from_inside - received[self.own]
        return Traffic(to_inside, from_inside, to_outside, from_outside)

    def one_way(self, index: int, nbytes: int, *, sent: bool) -> Traffic:
        """``nbytes`` to or from the rank at ``index`` of the group."""
        if index == self.own:
            return Traffic()
        if self.outside[index]:
            return Traffic(to_outside=nbytes) if sent else Traffic(from_outside=nbytes)
        return Traffic(to_inside=nbytes) if sent else Traffic(from_inside=nbytes)


def price(kind: str, nbytes: float, place: Place, network: Network) -> Seconds:
    """How long one of :data:`COLLECTIVES` of a full buffer of ``nbytes`` holds each level."""
    if kind not in COLLECTIVES:
        raise ValueError(f"kind: expected one of {', '.join(COLLECTIVES)}, got {kind!r}")
    if network.flat:
        return Seconds(_at(nbytes * (2 if kind == "all_reduce" else 1), network.inside_gb_s), 0.0)
    ranks, fewest = place.ranks, place.fewest
    if kind == "all_to_all":
        inside, outside = nbytes * (place.here - 1) / ranks, nbytes * (ranks - place.here) / ranks
        return exchange_price(Traffic(inside, inside, outside, outside), network)
    if kind in _RING_ONCE or kind in _RING_TWICE:
        rounds = 2 if kind in _RING_TWICE else 1
        inside, outside = rounds * nbytes * (1 - 1 / ranks), rounds * nbytes * (1 - fewest / ranks) / fewest
    else:
        inside, outside = nbytes, nbytes / fewest
    inside_latency, outside_latency = _latencies(kind, place, network)
    return Seconds(
        _at(inside, network.inside_gb_s) + inside_latency if place.here > 1 else 0.0,
        _at(outside, network.card_gb_s) + inside_latency + outside_latency if place.nodes > 1 else 0.0,
    )


def exchange_price(traffic: Traffic, network: Network) -> Seconds:
    """How long bytes between pairs of ranks, all under way at once, hold each level: the busier way counts.

    Each of the two ways (to and from this rank) has the link's full rate.
    """
    inside, outside = max(traffic[:2]), max(traffic[2:])
    return Seconds(
        _at(inside, network.inside_gb_s) + network.inside_step_us / 1e6 if inside else 0.0,
        _at(outside, network.card_gb_s) + network.outside_step_us / 1e6 if outside else 0.0,
    )


def _at(nbytes: float, gb_s: float | None) -> float:
    return 0.0 if gb_s is None else nbytes / (gb_s * 1e9)


def _latencies(kind: str, place: Place, network: Network) -> tuple[float, float]:
    """Seconds of all steps inside and of all steps outside."""
    inside_s, outside_s = network.inside_step_us / 1e6, network.outside_step_us / 1e6
    ring = (place.ranks - place.nodes) * inside_s, (place.nodes - 1) * outside_s
    if kind not in _RING_TWICE:
        return ring
    ring = 2 * ring[0], 2 * ring[1]
    tree = 2 * (place.most - 1) * inside_s, 2 * math.log2(place.nodes) * outside_s
    return min(ring, tree, key=sum)
