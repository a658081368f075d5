"""The states of a group: where its parameters are, and what it is doing. See docs/design.md."""

from __future__ import annotations

from enum import Enum, IntEnum, auto

__all__ = ["ALLOWED_MOVES", "Phase", "Residence"]


class Residence(IntEnum):
    """Where the parameters are; see docs/design.md."""

    SHARDED = auto()
    GATHERING = auto()
    UNSHARDED = auto()
    PARKED = auto()


ALLOWED_MOVES = {
    (Residence.SHARDED, Residence.GATHERING),
    (Residence.PARKED, Residence.GATHERING),
    (Residence.GATHERING, Residence.UNSHARDED),
    (Residence.UNSHARDED, Residence.SHARDED),
    (Residence.UNSHARDED, Residence.PARKED),
    (Residence.UNSHARDED, Residence.GATHERING),
    (Residence.GATHERING, Residence.SHARDED),
    (Residence.PARKED, Residence.SHARDED),
}


class Phase(Enum):
    """What the group is doing in the current iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
