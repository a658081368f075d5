"""Replicas of a sharded model that may fail: their gradients averaged, their state copied rank to rank.

Nothing here knows who is alive: that is the business of an engine, such as torchft behind
:mod:`ragged_fsdp.integrations.torchft`. An engine averages the flat tensors of :class:`ReplicaGradients`, and
lets a rank that came late :func:`receive` what the :class:`StateServer` of a peer offers.
"""

from ragged_fsdp.replicas.gradients import ReplicaGradients
from ragged_fsdp.replicas.state import Offer, ReplicaState
from ragged_fsdp.replicas.transport import HealingError, Received, StateServer, receive

__all__ = [
    "HealingError",
    "Offer",
    "Received",
    "ReplicaGradients",
    "ReplicaState",
    "StateServer",
    "receive",
]
