"""What ``torch.compile`` must know about ragged placements, and about ranks."""

from __future__ import annotations

import torch
import torch.compiler.config as compiler_config
import torch.distributed as dist
from torch.distributed.tensor import placement_types

from ragged_fsdp.placement import RaggedShard, StridedRaggedShard

__all__ = ["register_placements", "tag_rank"]

_KINDS = (RaggedShard, StridedRaggedShard)
_MEMBERS = ("is_shard", "is_partial", "is_replicate", "__eq__", "dims", "local_units")


def register_placements() -> None:
    """Let weights_only loading and dynamo take the placements as the constants they are."""
    torch.serialization.add_safe_globals(list(_KINDS))
    if not hasattr(placement_types, "_register_placements_as_opaque"):  # torch 2.11
        import torch.utils._pytree as pytree

        for kind in _KINDS:
            pytree.register_constant(kind)
        return
    import torch._library.opaque_object as opaque

    members = dict.fromkeys(_MEMBERS, opaque.MemberType.USE_REAL)
    for kind in _KINDS:
        if hasattr(opaque, "register_custom_class"):  # torch 2.15
            opaque.register_custom_class(kind, typ="constant", members=members)
        else:
            opaque.register_opaque_type(kind, typ="value", members=members)


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
