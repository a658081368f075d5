"""Tokens between nodes: each leaves its node once for every other node that has experts for it.

A token that goes to three experts of another node would cross the slow network three times. Here it crosses
once, to the rank of its own place there (a *rail*), which passes it on over the fast links; outputs are added
up on that node, weighted, and one row comes back::

    node 0                 rail                node 1
    rank 1   token t  ------------->  rank 5   t  ---->  ranks 4, 6, 6   its three experts there
             sum      <-------------           sum  <--  their outputs

Both levels are exchanges of rows with a host wait each, or with a capacity of fixed numbers of rows and none.
Sums of a node travel back in the dtype of the rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged_fsdp.dbuffer.checks import device_of
from ragged_fsdp.experts.all_to_all import AllToAll, agree_on_tokens, all_to_all
from ragged_fsdp.experts.dispatch import Dispatched, Dispatcher, Route
from ragged_fsdp.experts.exchange import Asked, Meanwhile, exchange
from ragged_fsdp.experts.permute import count, place, take
from ragged_fsdp.experts.split import ExpertSplit
from ragged_fsdp.experts.tally import keep_largest
from ragged_fsdp.experts.trips import Trip
from ragged_fsdp.topology import Levels, find_levels, given_ranks_per_node, level_groups

__all__ = ["TwoLevel", "two_level"]


def two_level(
    mesh: DeviceMesh, split: ExpertSplit, *, ranks_per_node: int | None = None, capacity: float | None = None
) -> Dispatcher:
    """The dispatcher for a mesh over several nodes, or :func:`all_to_all` where there is nothing to gain:

    on one node, with one rank on each, or where a node has no experts. Nodes are found by the ranks,
    or given here or as ``RAGGED_FSDP_RANKS_PER_NODE``. All ranks call it.
    """
    levels = find_levels(mesh.get_group(), device_of(mesh), given_ranks_per_node(ranks_per_node))
    if levels.has_two and all(sum(split.held[rank] for rank in node) for node in levels.nodes):
        return TwoLevel(mesh, split, levels, capacity=capacity)
    return all_to_all(mesh, split, capacity=capacity)


class TwoLevel:
    """Rows go between nodes, then inside them, and back the same way; made by :func:`two_level`.

    A ``capacity`` is that of :class:`AllToAll` on both levels: the rows that each rank sends each node, and
    then each rank of its own, as a multiple of those it would send if tokens went everywhere alike.
    """

    def __init__(
        self, mesh: DeviceMesh, split: ExpertSplit, levels: Levels, *, capacity: float | None = None
    ) -> None:
        groups = level_groups(mesh.get_group(), levels, device_of(mesh))
        assert groups.rail is not None
        self._group, self._rail, self._split = mesh.get_group(), groups.rail, split
        nodes = [levels.nodes[levels.find(rank)[0]] for rank in levels.rails[groups.place]]
        self._nodes = len(nodes)
        own = ExpertSplit(tuple(split.held[rank] for rank in levels.nodes[groups.node]))
        self._here = own.experts
        self._inside = AllToAll(groups.local, own, capacity=capacity, partial=True)
        self.for_evaluation = self if capacity is None else TwoLevel(mesh, split, levels)
        self._needed: Tensor | None = None
        self._agreed: set[int] = set()
        self._places: dict[int, tuple[int, int]] = {}
        """By expert: the place of its node on the rail, and its number among the experts there."""
        for node, ranks in enumerate(nodes):
            experts = [split.first[rank] + i for rank in ranks for i in range(split.held[rank])]
            self._places.update((expert, (node, number)) for number, expert in enumerate(experts))
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._edges: dict[tuple[torch.device, int], Tensor] = {}

    @property
    def capacity(self) -> float | None:
        """Room on both levels, of an even share; None sends what there is."""
        return self._inside.capacity

    @capacity.setter
    def capacity(self, capacity: float | None) -> None:
        self._inside.capacity = capacity

    @property
    def needed(self) -> Tensor | None:
        """The capacity that would have dropped nothing since :meth:`forget_needed`; None before the first."""
        inside = self._inside.needed
        return None if self._needed is None or inside is None else torch.maximum(self._needed, inside)

    def forget_needed(self) -> None:
        """Count the capacity that is needed anew."""
        self._inside.forget_needed()
        if self._needed is not None:
            self._needed.zero_()

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of all ranks' tokens for the experts of this rank."""
        node_of, local_of = self._on(tokens.device)
        number = torch.arange(self._nodes, device=tokens.device)
        # (N, node, K): of each token's experts those of each node
        theirs = node_of[chosen].unsqueeze(1) == number.unsqueeze(-1)
        # a token's slots are now the nodes it goes to; the others are numbered as none
        wanted = torch.where(theirs.any(-1), number, self._nodes)
        numbers = chosen.new_zeros(2, self._nodes, dtype=torch.int64)
        counted = count(wanted, self._nodes, into=numbers[0])
        load = count(chosen, self._split.experts).counts
        if self.capacity is None:
            dist.all_to_all_single(numbers[1], numbers[0], group=self._rail)
            asked = Asked(numbers)
            route = Route(counted.rows(), load)
            there, here = asked.answer()
        else:
            room = self._room(chosen, counted.counts)
            route = Route(counted.rows(self._edges_of(room, tokens.device)), load)
            lost = (wanted.flatten() < self._nodes) & (route.row_of < 0)
            route.dropped = (theirs.sum(-1).flatten() * lost).sum()
            there = here = [room] * self._nodes
        sent = sum(there)
        trip = Trip(self._rail, route.row_of)
        arrived = trip.go(tokens, [there], [here], meanwhile)
        # of each row's experts those of the node it goes to, by their number there; none of padding
        numbered = torch.where(theirs, local_of[chosen].unsqueeze(1), self._none).flatten(0, 1)
        wanted = exchange(place(numbered, route.row_of, sent, self._none), there, here, self._rail)
        wanted = torch.where(wanted == self._none, self._here, wanted)
        if self.capacity is None:
            rows, held, inside = self._inside.dispatch(arrived, wanted)
        else:
            rows, held, inside = self._inside.dispatch_fixed(arrived, wanted, chosen.numel(), None)
            assert route.dropped is not None and inside.dropped is not None
            route.dropped = route.dropped + inside.dropped
        route.extra.update(inside=inside, trip=trip, there=there, here=here)
        return rows, held, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The sums of what the nodes made of each token."""
        way: dict[str, Any] = route.extra
        sent = take(weights, route.row_of, sum(way["there"]))
        theirs = exchange(sent, way["there"], way["here"], self._rail)
        sums = self._inside.combine(outputs, theirs, way["inside"]).to(outputs.dtype)
        back: Tensor = way["trip"].come_back(sums, None)
        return back

    def _edges_of(self, room: int, device: torch.device) -> Tensor:
        """Copied once."""
        key = device, room
        if key not in self._edges:
            self._edges[key] = torch.tensor([0, room], device=device)
        return self._edges[key]

    def _room(self, chosen: Tensor, counts: Tensor) -> int:
        """Rows that each node gets under the capacity; what these ``counts`` would have needed is kept."""
        tokens, per_token = chosen.shape
        assert self.capacity is not None
        agree_on_tokens(tokens, self.capacity, self._agreed, self._group, chosen.device)
        even = tokens * (1 - (1 - 1 / self._nodes) ** per_token)  # tokens with an expert of a node
        self._needed = keep_largest(self._needed, counts.max() / max(1.0, even))
        return min(tokens, math.ceil(self.capacity * even))

    @property
    def _none(self) -> int:
        """No expert of any node: past the last number of each."""
        return self._split.experts

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The node of each expert, by its place on the rail, and its number there; of no expert, no node.

        Copied once.
        """
        if device not in self._constants:
            known = [self._places[e] for e in range(self._split.experts)]
            places = torch.tensor([*known, (self._nodes, 0)], device=device)
            self._constants[device] = (places[:, 0].contiguous(), places[:, 1].contiguous())
        return self._constants[device]
