"""Expert parallelism: the experts of a layer spread over ranks, with tokens that travel to them and back.

:func:`expert_parallel` does it to a model; ``docs/experts.md`` has the picture.
"""

from ragged_fsdp.experts.all_to_all import AllToAll
from ragged_fsdp.experts.balance import ExpertLoad, balanced_splits, fit_capacity, load_of, move_experts
from ragged_fsdp.experts.dispatch import (
    AllGather,
    Dispatcher,
    Here,
    Route,
    SharedTokens,
    SlicedTokens,
)
from ragged_fsdp.experts.layers import GroupedExperts, expert_count, expert_modules, grouped_linear, held_part
from ragged_fsdp.experts.levels import TwoLevel, two_level
from ragged_fsdp.experts.parallel import (
    SplitExperts,
    divide_gradients,
    expert_parallel,
    mix,
    split_experts_of,
    spread,
)
from ragged_fsdp.experts.split import ExpertSplit

__all__ = [
    "AllGather",
    "AllToAll",
    "Dispatcher",
    "ExpertLoad",
    "ExpertSplit",
    "GroupedExperts",
    "Here",
    "Route",
    "SharedTokens",
    "SlicedTokens",
    "SplitExperts",
    "TwoLevel",
    "balanced_splits",
    "divide_gradients",
    "expert_count",
    "expert_modules",
    "expert_parallel",
    "fit_capacity",
    "grouped_linear",
    "held_part",
    "load_of",
    "mix",
    "move_experts",
    "split_experts_of",
    "spread",
    "two_level",
]
