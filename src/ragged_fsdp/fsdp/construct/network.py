"""How the data of a group goes over the network: what the user asked for, or what fits its nodes.

    =================  ===================================  ======================================
    ``reduction``      transport                            leaves a node, of gradients of B bytes
    =================  ===================================  ======================================
    reduce_scatter     ``ReduceScatter``                    B in the dtype of the sum
    all_to_all         ``Exchange``                         B per rank of the node
    two_level          ``Exchange`` over nodes and rails    B
    =================  ===================================  ======================================

``auto`` is the exchange where gradients are added in a wider dtype than they have, through two levels if the
group spans nodes; otherwise there are no bytes to save, and it is the reduce-scatter.

A gather moves the same bytes over one level or two (:class:`~ragged_fsdp.collectives.LevelComm`); two have
fewer steps that wait for each other, which counts where there are many ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from ragged_fsdp.collectives import Comm, LevelComm
from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.reduce.exchange import Exchange
from ragged_fsdp.fsdp.reduce.transport import GradTransport, ReduceScatter
from ragged_fsdp.topology import Levels, find_levels, level_groups

__all__ = ["GATHERS", "REDUCTIONS", "Network", "pick_gather", "pick_reduction"]

REDUCTIONS = ("reduce_scatter", "all_to_all", "two_level", "auto")
GATHERS = ("flat", "two_level", "auto")
logger = logging.getLogger("ragged_fsdp")
_MANY_RANKS = 128  # from here on the steps of a ring cost more than two levels do
_SAID: set[str] = set()


def pick_reduction(asked: str, levels: Levels, *, widens: bool) -> str:
    """What ``asked`` means on a network with these levels; ``widens``: sums are wider than gradients."""
    if asked == "auto":
        if not widens or (levels.spans_nodes and not levels.has_two):
            return "reduce_scatter"
        return "two_level" if levels.has_two else "all_to_all"
    if asked == "two_level" and levels.spans_nodes and not levels.has_two and levels.largest_node > 1:
        raise ValueError(
            "fully_shard: reduction='two_level' needs nodes that hold equally many ranks of the group, or a "
            f"common part of them; got {levels}. Use 'reduce_scatter' or 'auto'."
        )
    return asked


def pick_gather(asked: str, levels: Levels) -> str:
    """What ``asked`` means on a network with these levels."""
    if asked == "auto":
        ranks = len(levels.nodes) * levels.ranks_per_node
        return "two_level" if levels.has_two and levels.in_order and ranks >= _MANY_RANKS else "flat"
    if asked == "two_level" and levels.spans_nodes and not (levels.has_two and levels.in_order):
        raise ValueError(
            "fully_shard: gather='two_level' needs nodes of consecutive ranks, equally many in each; got "
            f"{levels}, {levels.nodes[:4]}. Use 'flat' or 'auto'."
        )
    return asked


class Network:
    """The choices of one ``fully_shard`` call; the ranks of a mesh ask each other once where they are."""

    def __init__(
        self,
        device: torch.device,
        *,
        reduction: str,
        gather: str,
        ranks_per_node: int | None,
        between: torch.dtype | None,
    ) -> None:
        self._device, self._ranks_per_node, self._between = device, ranks_per_node, between
        self._asked_reduction, self._asked_gather = reduction, gather

    def _levels(self, mesh: ParallelMesh) -> Levels:
        return find_levels(mesh.shard_group, self._device, self._ranks_per_node)

    def reduction(self, mesh: ParallelMesh, *, widens: bool) -> Callable[[Members], GradTransport]:
        """The transport of the gradients of a group on ``mesh``."""
        asked = self._asked_reduction
        if asked == "reduce_scatter":
            return ReduceScatter
        levels = self._levels(mesh)
        picked = pick_reduction(asked, levels, widens=widens)
        if asked != picked or asked == "two_level":
            _say_once(logging.INFO, f"fully_shard: reduction={asked!r} is {picked!r} here: {levels}")
        if picked == "reduce_scatter":
            return ReduceScatter
        if picked == "two_level" and levels.has_two:
            over = level_groups(mesh.shard_group, levels, self._device)
            return partial(Exchange, levels=over, between=self._between)
        if picked == "all_to_all" and levels.has_two:
            _say_once(
                logging.WARNING,
                f"fully_shard: reduction='all_to_all' over {levels}: every rank sends its whole gradients "
                f"over its own link to other nodes, {levels.ranks_per_node} times what two levels send. Use "
                "reduction='two_level' or 'auto'.",
            )
        return Exchange

    def gather_comm(self, mesh: ParallelMesh) -> Comm | None:
        """What gathers the weights of a group on ``mesh``; None is what gathers everywhere."""
        asked = self._asked_gather
        if asked == "flat":
            return None
        levels = self._levels(mesh)
        picked = pick_gather(asked, levels)
        if asked != picked:
            _say_once(logging.INFO, f"fully_shard: gather={asked!r} is {picked!r} here: {levels}")
        if picked == "flat" or not levels.has_two:
            return None
        return LevelComm(level_groups(mesh.shard_group, levels, self._device))


def _say_once(level: int, text: str) -> None:
    """Log a sentence that every call for another layer would repeat."""
    if text not in _SAID:
        _SAID.add(text)
        logger.log(level, text)
