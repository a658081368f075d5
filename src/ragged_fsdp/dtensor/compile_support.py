"""What ``torch.compile`` must know about ragged placements, and about ranks."""

from __future__ import annotations

import torch
import torch.compiler.config as compiler_config
import torch.distributed as dist

from ragged_fsdp.placement import RaggedShard, StridedRaggedShard
from ragged_fsdp.torch_internals import register_constant_class

__all__ = ["register_placements", "tag_rank"]

_KINDS = (RaggedShard, StridedRaggedShard)
_MEMBERS = ("is_shard", "is_partial", "is_replicate", "__eq__", "dims", "local_units")


def register_placements() -> None:
    """Let weights_only loading and dynamo take the placements as the constants they are."""
    torch.serialization.add_safe_globals(list(_KINDS))
    for kind in _KINDS:
        register_constant_class(kind, _MEMBERS)


def tag_rank() -> None:
    """Give each rank compile cache entries of its own.

    The cache key holds neither the rank nor the local shape, so a rank could load the graph compiled
    for the piece of another (an uneven ``Shard(0)`` has the same problem). A tag that the user has
    set is kept, and extended.
    """
    if not dist.is_initialized():
        return
    tag = f"ragged_fsdp-rank{dist.get_rank()}of{dist.get_world_size()}"
    present = compiler_config.cache_key_tag
    if tag not in present:
        compiler_config.cache_key_tag = f"{present}{'-' if present else ''}{tag}"
