"""Turn: one ``fully_shard`` call in the iteration, and the phases it goes through."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, auto

from torch import nn

from ragged_fsdp.fsdp.runtime.conditional import Conditional
from ragged_fsdp.fsdp.runtime.group import ParamGroup

__all__ = ["ALLOWED_PHASES", "IN_BACKWARD", "Phase", "Turn"]


class Phase(IntEnum):
    """What the modules of a call are doing in the current iteration."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    DONE = auto()


ALLOWED_PHASES = {
    (Phase.IDLE, Phase.FORWARD): "the forward starts",
    (Phase.FORWARD, Phase.IDLE): "the forward ends or raises",
    (Phase.IDLE, Phase.BACKWARD): "the first gradient of an output arrives",
    (Phase.DONE, Phase.BACKWARD): "the module ran twice, and this is the backward of its first run",
    (Phase.FORWARD, Phase.BACKWARD): "a gradient is taken inside the forward",
    (Phase.BACKWARD, Phase.DONE): "the gradients of the inputs are there",
    (Phase.IDLE, Phase.DONE): "the loss came from inside it, past the hooks of its outputs",
    (Phase.FORWARD, Phase.DONE): "a gradient taken inside the forward passes the hooks of its outputs by",
    (Phase.BACKWARD, Phase.IDLE): "the backward ends or is given up",
    (Phase.DONE, Phase.IDLE): "the backward ends or is given up",
}
"""From phase to phase, and when; anything else raises. To stay in a phase is no move."""


IN_BACKWARD = (Phase.BACKWARD, Phase.DONE)
"""Phases in which a forward that starts is one that the backward computes again."""


class Turn:
    """One ``fully_shard`` call in the iteration: its groups, and its phase, which the schedule changes."""

    def __init__(self) -> None:
        self.groups: list[ParamGroup] = []
        self.phase = Phase.IDLE
        self.is_root: bool | None = None
        self.auto_reshard = True
        """Whether the library chose ``reshard_after_forward``: the root then stays gathered."""
        self.gathered_budget_bytes = 0
        """Bytes of gathered parameters that may stay between forward and backward."""
        self.gathers_first = False
        """Whether its backward issues the next gather before its reduction; the same on all its ranks."""
        self.forward_prefetch: Sequence[Turn] | None = None
        self.backward_prefetch: Sequence[Turn] | None = None
        self.still_to_run: set[nn.Module] = set()
        """Modules of a list whose forward has not run in this pass."""
        self.ignored: set[nn.Parameter] = set()
        """Parameters that the call was told to leave alone."""
        self.positions: list[int] = []
        """Places in the order of ended forwards, one for each of its own since the last backward."""
        self.under: Conditional | None = None
        """The outermost module that not every rank runs and that it belongs to."""
        self.behind_conditional = False
        """Whether such a module runs before it: its inputs then need gradients on every rank."""
        self.following: Turn | None = None
        """The turn whose backward comes after its own, while that runs."""
