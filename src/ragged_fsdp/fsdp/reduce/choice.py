"""Which transport reduces the gradients of a group: what the user asked for, or what fits his network.

    ==================  ===================================  ======================================
    ``reduction``       transport                            leaves a node, of gradients of B bytes
    ==================  ===================================  ======================================
    reduce_scatter      ``ReduceScatter``                    B in the dtype of the sum
    all_to_all          ``Exchange``                         B per rank of the node
    two_level           ``Exchange`` over nodes and rails    B
    ==================  ===================================  ======================================

``auto`` is the exchange where gradients are added in a wider dtype than they have, through two levels if the
group spans nodes; otherwise there are no bytes to save, and it is the reduce-scatter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch

from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.reduce.exchange import Exchange
from ragged_fsdp.fsdp.reduce.transport import GradTransport, ReduceScatter
from ragged_fsdp.topology import Levels, find_levels, level_groups

__all__ = ["REDUCTIONS", "choose_reduction", "pick_reduction"]

REDUCTIONS = ("reduce_scatter", "all_to_all", "two_level", "auto")
logger = logging.getLogger("ragged_fsdp")
_SAID: set[str] = set()


def pick_reduction(asked: str, levels: Levels, *, widens: bool) -> str:
    """What ``asked`` means on a network with these levels; ``widens``: sums are wider than gradients."""
    if asked == "auto":
        if not widens or (levels.spans_nodes and not levels.has_two):
            return "reduce_scatter"
        return "two_level" if levels.has_two else "all_to_all"
    if asked == "two_level" and levels.spans_nodes and not levels.has_two and levels.largest_node > 1:
        raise ValueError(
            f"fully_shard: reduction='two_level' needs nodes that hold equally many ranks of the group, or a "
            f"common part of them; got {levels}. Use 'reduce_scatter' or 'auto'."
        )
    return asked


def choose_reduction(
    asked: str,
    mesh: ParallelMesh,
    device: torch.device,
    *,
    widens: bool,
    ranks_per_node: int | None,
    between: torch.dtype | None,
) -> Callable[[Members], GradTransport]:
    """The transport of a group's gradients; the ranks of ``mesh`` ask together where their nodes are."""
    if asked == "reduce_scatter":
        return ReduceScatter
    levels = find_levels(mesh.shard_group, device, ranks_per_node)
    picked = pick_reduction(asked, levels, widens=widens)
    if asked != picked or asked == "two_level":
        _say_once(logging.INFO, f"fully_shard: reduction={asked!r} is {picked!r} here: {levels}")
    if picked == "reduce_scatter":
        return ReduceScatter
    if picked == "two_level" and levels.has_two:
        return partial(Exchange, levels=level_groups(mesh.shard_group, levels, device), between=between)
    if picked == "all_to_all" and levels.has_two:
        _say_once(
            logging.WARNING,
            f"fully_shard: reduction='all_to_all' over {levels}: every rank sends its whole gradients over "
            f"its own link to other nodes, {levels.ranks_per_node} times what two levels send. Use "
            "reduction='two_level' or 'auto'.",
        )
    return Exchange


def _say_once(level: int, text: str) -> None:
    """Log a sentence that every call for another layer would repeat."""
    if text not in _SAID:
        _SAID.add(text)
        logger.log(level, text)
