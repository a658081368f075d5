"""How the data of a group goes over the network: what the user asked for, or what fits its nodes.

    =================  =======================================  ======================================
    ``reduction``      transport                                leaves a node, of gradients of B bytes
    =================  =======================================  ======================================
    reduce_scatter     ``ReduceScatter``                        B in the dtype of the sum
    all_to_all         ``GradExchange``                         B per rank of the node
    two_level          ``GradExchange`` over nodes and rails    B
    =================  =======================================  ======================================

``auto`` is the exchange where gradients are added in a wider dtype than they have, through two levels if
there are two. It is the reduce-scatter where there are no bytes to save: sums as wide as the gradients, or
nodes whose numbers of ranks have only a small common divisor. One node, and nodes of one rank each, have one
level: what was asked to go through two goes through that one there.

A gather moves the same bytes over one level or two (:class:`~ragged_fsdp.collectives.LevelComm`); two have
fewer steps that wait for each other, which counts where there are many ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch.distributed import ProcessGroup

from ragged_fsdp.collectives import Comm, LevelComm, explain_failure
from ragged_fsdp.fsdp.construct.call import Options
from ragged_fsdp.fsdp.parts.members import Members
from ragged_fsdp.fsdp.reduce.exchange import GradExchange
from ragged_fsdp.fsdp.reduce.transport import GradTransport, ReduceScatter
from ragged_fsdp.topology import Levels, find_levels, level_groups

__all__ = ["NetworkPath", "network_path", "pick", "pick_gather", "pick_reduction"]

logger = logging.getLogger("ragged_fsdp")
_MANY_RANKS = 128  # from here on the steps of a ring cost more than two levels do
_SAID: set[str] = set()


def pick_reduction(asked: str, levels: Levels, *, widens: bool) -> str:
    """What ``asked`` means on a network with these levels; ``widens``: sums are wider than gradients."""
    if asked == "auto":
        if not widens:
            return "reduce_scatter"
        if levels.spans_nodes and levels.largest_node > 1:
            # without two levels every gradient would leave the node from each of its ranks; and small parts
            # of nodes send what they save, and more
            fits = levels.has_two and levels.largest_node <= 2 * levels.ranks_per_node
            return "two_level" if fits else "reduce_scatter"
        return "all_to_all"
    if asked == "two_level" and not levels.has_two:
        if levels.largest_node > 1 and levels.spans_nodes:
            raise ValueError(
                "fully_shard: reduction='two_level' needs nodes that hold equally many ranks of the group, "
                f"or a common part of them; got {levels}. Use 'reduce_scatter' or 'auto'."
            )
        return "all_to_all"
    return asked


def pick_gather(asked: str, levels: Levels) -> str:
    """What ``asked`` means on a network with these levels."""
    if asked == "auto":
        ranks = len(levels.nodes) * levels.ranks_per_node
        return "two_level" if levels.has_two and levels.in_order and ranks >= _MANY_RANKS else "flat"
    if asked == "two_level" and not (levels.has_two and levels.in_order):
        if levels.largest_node > 1 and levels.spans_nodes:
            raise ValueError(
                "fully_shard: gather='two_level' needs nodes of consecutive ranks, equally many in each; got "
                f"{levels}, {levels.nodes[:4]}. Use 'flat' or 'auto'."
            )
        return "flat"
    return asked


NetworkPath = tuple[Callable[[Members], GradTransport], Comm | None]
"""What reduces the gradients of a group, and what gathers its weights; None is what gathers everywhere."""


def pick(options: Options, levels: Levels, *, widens: bool) -> tuple[str, str]:
    """How gradients are reduced and weights are gathered on a network; the log says where it is not as asked.

    Raises where what was asked for does not fit, on the ranks of one mesh and not on those of another: before
    :func:`network_path` the call compares what became of it.
    """
    reduction = pick_reduction(options.reduction, levels, widens=widens)
    gather = pick_gather(options.gather, levels)
    chosen = ("reduction", options.reduction, reduction), ("gather", options.gather, gather)
    for name, asked, picked in chosen:
        if asked != picked:
            _say_once(logging.INFO, f"fully_shard: {name}={asked!r} is {picked!r} here: {levels}")
    if reduction == "all_to_all" and levels.spans_nodes and levels.largest_node > 1:
        _say_once(
            logging.WARNING,
            f"fully_shard: reduction='all_to_all' over {levels}: every rank sends its whole gradients "
            f"over its own link to other nodes, up to {levels.largest_node} times what two levels send. "
            "Use reduction='two_level' or 'auto'.",
        )
    return reduction, gather


def network_path(
    reduction: str, gather: str, pg: ProcessGroup, device: torch.device, options: Options
) -> NetworkPath:
    """What was picked, with the process groups it needs: a collective of the ranks of ``pg``."""
    over = None
    if "two_level" in (reduction, gather):
        levels = find_levels(pg, device, options.node_size)
        with explain_failure("making of groups for nodes", "", pg):
            over = level_groups(pg, levels, device)
    comm = LevelComm(over, device) if over is not None and gather == "two_level" else None
    if reduction == "reduce_scatter":
        return ReduceScatter, comm
    over = over if reduction == "two_level" else None
    return partial(GradExchange, levels=over, between=options.internode_dtype), comm


def _say_once(level: int, text: str) -> None:
    """Log a sentence that every call for another layer would repeat."""
    if text not in _SAID:
        _SAID.add(text)
        logger.log(level, text)
