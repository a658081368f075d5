"""Ragged placements on stock DTensor. Importing this package installs the support in torch.

See :mod:`ragged_fsdp.placement` for the transition table, :mod:`ragged_fsdp.dtensor.patches` for what
is changed in torch and why, and ``docs/raggedshard.md`` for the whole picture.
"""

from ragged_fsdp.dtensor import patches
from ragged_fsdp.dtensor.construct import distribute_tensor, wrap_local
from ragged_fsdp.dtensor.dispatch import register_op
from ragged_fsdp.dtensor.geometry import (
    RaggedLayout,
    RaggedOpError,
    is_ragged,
    ragged_layout,
    ragged_spec,
    refusal,
)
from ragged_fsdp.placement import RaggedShard, StridedRaggedShard, legal_granularity, placement_from_layout

__all__ = [
    "RaggedLayout",
    "RaggedOpError",
    "RaggedShard",
    "StridedRaggedShard",
    "distribute_tensor",
    "is_ragged",
    "legal_granularity",
    "placement_from_layout",
    "ragged_layout",
    "ragged_spec",
    "refusal",
    "register_op",
    "wrap_local",
]

patches.install()
