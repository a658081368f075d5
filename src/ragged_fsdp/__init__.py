"""ragged_fsdp: fully sharded data parallelism on ragged, block-aligned DTensors.

The public names are loaded on first use, so that ``ragged_fsdp.planner`` works without torch.
Where torch is already loaded, the DTensor support is installed at import, so that checkpoints
holding ragged tensors can be read after a plain ``import ragged_fsdp``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; keep in step with _HOMES
    from ragged_fsdp.api import CPUOffloadPolicy as CPUOffloadPolicy
    from ragged_fsdp.api import DataParallelMeshDims as DataParallelMeshDims
    from ragged_fsdp.api import FSDPModule as FSDPModule
    from ragged_fsdp.api import MixedPrecisionPolicy as MixedPrecisionPolicy
    from ragged_fsdp.api import OffloadPolicy as OffloadPolicy
    from ragged_fsdp.api import UnshardHandle as UnshardHandle
    from ragged_fsdp.api import adopt_parameters as adopt_parameters
    from ragged_fsdp.api import fully_shard as fully_shard
    from ragged_fsdp.api import register_fsdp_forward_method as register_fsdp_forward_method
    from ragged_fsdp.api import share_comm_ctx as share_comm_ctx
    from ragged_fsdp.dbuffer import DBuffer as DBuffer
    from ragged_fsdp.dtensor import RaggedShard as RaggedShard
    from ragged_fsdp.dtensor import StridedRaggedShard as StridedRaggedShard
    from ragged_fsdp.dtensor import distribute_tensor as distribute_tensor
    from ragged_fsdp.policy import BlockCodes as BlockCodes
    from ragged_fsdp.policy import Elements as Elements
    from ragged_fsdp.policy import Rows as Rows
    from ragged_fsdp.policy import Whole as Whole

_HOMES = {
    "RaggedShard": "ragged_fsdp.dtensor",
    "StridedRaggedShard": "ragged_fsdp.dtensor",
    "distribute_tensor": "ragged_fsdp.dtensor",
    "DBuffer": "ragged_fsdp.dbuffer",
    "BlockCodes": "ragged_fsdp.policy",
    "Elements": "ragged_fsdp.policy",
    "Rows": "ragged_fsdp.policy",
    "Whole": "ragged_fsdp.policy",
    "adopt_parameters": "ragged_fsdp.api",
    "fully_shard": "ragged_fsdp.api",
    "FSDPModule": "ragged_fsdp.api",
    "UnshardHandle": "ragged_fsdp.api",
    "MixedPrecisionPolicy": "ragged_fsdp.api",
    "OffloadPolicy": "ragged_fsdp.api",
    "CPUOffloadPolicy": "ragged_fsdp.api",
    "DataParallelMeshDims": "ragged_fsdp.api",
    "register_fsdp_forward_method": "ragged_fsdp.api",
    "share_comm_ctx": "ragged_fsdp.api",
}

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ragged_fsdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


if "torch" in sys.modules:
    import_module("ragged_fsdp.dtensor")
