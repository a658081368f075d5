"""Tokens between nodes: each leaves its node once for every other node that has experts for it.

A token that goes to three experts of another node would cross the slow network three times. Here it crosses
once, to the rank of its own place there (a *rail*), which passes it on over the fast links; outputs are added
up on that node, weighted, and one row comes back::

    node 0                 rail                node 1
    rank 1   token t  ------------->  rank 5   t  ---->  ranks 4, 6, 6   its three experts there
             sum      <-------------           sum  <--  their outputs

Both levels are exchanges of rows with a host wait each. Sums of a node travel back in the dtype of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ragged_fsdp.dbuffer.checks import device_of
from ragged_fsdp.experts.dispatch import AllToAll, Dispatched, Dispatcher, Meanwhile, Route, exchange
from ragged_fsdp.experts.permute import add_up, by_expert, inverted, take
from ragged_fsdp.experts.split import ExpertSplit
from ragged_fsdp.topology import Levels, find_levels, given_ranks_per_node, level_groups

__all__ = ["TwoLevel", "two_level"]


def two_level(mesh: DeviceMesh, split: ExpertSplit, *, ranks_per_node: int | None = None) -> Dispatcher:
    """The dispatcher for a mesh over several nodes, or :class:`AllToAll` where there is nothing to gain:

    on one node, with one rank on each, or where a node has no experts. Nodes are found by the ranks,
    or given here or as ``RAGGED_FSDP_RANKS_PER_NODE``. All ranks call it.
    """
    levels = find_levels(mesh.get_group(), device_of(mesh), given_ranks_per_node(ranks_per_node))
    if levels.has_two and all(sum(split.held[rank] for rank in node) for node in levels.nodes):
        return TwoLevel(mesh, split, levels)
    return AllToAll(mesh, split)


class TwoLevel:
    """Rows go between nodes, then inside them, and back the same way; made by :func:`two_level`."""

    def __init__(self, mesh: DeviceMesh, split: ExpertSplit, levels: Levels) -> None:
        groups = level_groups(mesh.get_group(), levels, device_of(mesh))
        assert groups.rail is not None
        self._rail, self._split = groups.rail, split
        nodes = [levels.nodes[levels.find(rank)[0]] for rank in levels.rails[groups.place]]
        self._nodes = len(nodes)
        own = ExpertSplit(tuple(split.held[rank] for rank in levels.nodes[groups.node]))
        self._here, self._inside = own.experts, AllToAll(groups.local, own)
        self._places: dict[int, tuple[int, int]] = {}
        """By expert: the place of its node on the rail, and its number among the experts there."""
        for place, ranks in enumerate(nodes):
            experts = [split.first[rank] + i for rank in ranks for i in range(split.held[rank])]
            self._places.update((expert, (place, number)) for number, expert in enumerate(experts))
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def dispatch(self, tokens: Tensor, chosen: Tensor, meanwhile: Meanwhile = None) -> Dispatched:
        """Rows of all ranks' tokens for the experts of this rank."""
        node_of, local_of = self._on(tokens.device)
        nodes = self._nodes
        of_slot = node_of[chosen]  # (N, K), by place on the rail
        # a token's slots are now the nodes it goes to; the others are numbered as none
        goes = (of_slot.unsqueeze(-1) == torch.arange(nodes, device=tokens.device)).any(1)
        wanted = torch.where(goes, torch.arange(nodes, device=tokens.device), nodes)
        order, counts = by_expert(wanted, nodes)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self._rail)
        numbers = torch.cat((counts, received)).tolist()
        there, here = numbers[:nodes], numbers[nodes:]
        slot_of = order[: sum(there)]
        row_of = inverted(slot_of, wanted.numel())
        arrived = exchange(take(tokens, slot_of, row_of), there, here, self._rail, meanwhile)
        token, node = slot_of.div(nodes, rounding_mode="floor"), slot_of % nodes
        # of each row's experts those of the node it goes to, by their number there
        numbered = torch.where(of_slot[token] == node.unsqueeze(-1), local_of[chosen[token]], -1)
        asked = exchange(numbered, there, here, self._rail)
        rows, held, inside = self._inside.dispatch(arrived, torch.where(asked < 0, self._here, asked))
        route = Route(slot_of, row_of, by_expert(chosen, self._split.experts)[1])
        route.extra.update(inside=inside, there=there, here=here)
        return rows, held, route

    def combine(self, outputs: Tensor, weights: Tensor, route: Route) -> Tensor:
        """The sums of what the nodes made of each token."""
        way: dict[str, Any] = route.extra
        sent = take(weights, route.slot_of, route.row_of)
        theirs = exchange(sent, way["there"], way["here"], self._rail)
        sums = self._inside.combine(outputs, theirs, way["inside"]).to(outputs.dtype)
        back = exchange(sums, way["here"], way["there"], self._rail)
        return add_up(back, route.slot_of, route.row_of, len(weights))

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The node of each expert, by its place on the rail, and its number there; copied once."""
        if device not in self._constants:
            places = torch.tensor([self._places[e] for e in range(self._split.experts)], device=device)
            self._constants[device] = (places[:, 0].contiguous(), places[:, 1].contiguous())
        return self._constants[device]
