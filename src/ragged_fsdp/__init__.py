"""Fully sharded data parallelism on ragged, block-aligned DTensors, with FSDP2's API.

::

    fully_shard, FSDPModule, ...        shard a model; FSDP2's names with FSDP2's meaning
    adopt_parameters                    shard what was attached to a sharded model
    Elements, Rows, Tiles, Whole        what stays together on a rank
    BlockCodes                          what is gathered instead of values
    encode_frozen                       what is frozen, stored as codes
    describe                            what became of a model: groups, padding, bytes per rank
    RaggedShard, distribute_tensor      the placement and tensors of your own
    DBuffer                             a group of tensors in one buffer, without modules

    ragged_fsdp.optim                   AdamW8bit, Muon, Shampoo, FusedAdamW, clip_grad_norm_
    ragged_fsdp.weights                 load and stream the weights of a sharded model
    ragged_fsdp.experts                 experts spread over ranks
    ragged_fsdp.fp8                     linear layers and experts that compute in FP8
    ragged_fsdp.replicas                replicas that may fail
    ragged_fsdp.planner                 layouts of groups; needs no torch
    ragged_fsdp.checkpoint              folders of checkpoints, safetensors
    ragged_fsdp.integrations            Accelerate, the Transformers Trainer, Lightning, torchtitan, torchft
    ragged_fsdp.models, .trainer        what ``ragged-fsdp train`` builds and runs

Names and sub-packages are loaded on first use, so that ``ragged_fsdp.planner`` works without torch.
Where torch is already loaded, the DTensor support is installed at import, so that checkpoints
holding ragged tensors can be read after a plain ``import ragged_fsdp``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; keep in step with _HOMES and _SUBPACKAGES
    from ragged_fsdp import checkpoint as checkpoint
    from ragged_fsdp import dbuffer as dbuffer
    from ragged_fsdp import dtensor as dtensor
    from ragged_fsdp import experts as experts
    from ragged_fsdp import fp8 as fp8
    from ragged_fsdp import integrations as integrations
    from ragged_fsdp import models as models
    from ragged_fsdp import optim as optim
    from ragged_fsdp import planner as planner
    from ragged_fsdp import policy as policy
    from ragged_fsdp import replicas as replicas
    from ragged_fsdp import trainer as trainer
    from ragged_fsdp import weights as weights
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
    from ragged_fsdp.description import describe as describe
    from ragged_fsdp.dtensor import RaggedShard as RaggedShard
    from ragged_fsdp.dtensor import StridedRaggedShard as StridedRaggedShard
    from ragged_fsdp.dtensor import distribute_tensor as distribute_tensor
    from ragged_fsdp.frozen_codes import encode_frozen as encode_frozen
    from ragged_fsdp.policy import BlockCodes as BlockCodes
    from ragged_fsdp.policy import Elements as Elements
    from ragged_fsdp.policy import Rows as Rows
    from ragged_fsdp.policy import Tiles as Tiles
    from ragged_fsdp.policy import Whole as Whole

_HOMES = {
    "RaggedShard": "ragged_fsdp.dtensor",
    "StridedRaggedShard": "ragged_fsdp.dtensor",
    "distribute_tensor": "ragged_fsdp.dtensor",
    "DBuffer": "ragged_fsdp.dbuffer",
    "describe": "ragged_fsdp.description",
    "encode_frozen": "ragged_fsdp.frozen_codes",
    "BlockCodes": "ragged_fsdp.policy",
    "Elements": "ragged_fsdp.policy",
    "Rows": "ragged_fsdp.policy",
    "Tiles": "ragged_fsdp.policy",
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

_SUBPACKAGES = (
    "checkpoint",
    "dbuffer",
    "dtensor",
    "experts",
    "fp8",
    "integrations",
    "models",
    "optim",
    "planner",
    "policy",
    "replicas",
    "trainer",
    "weights",
)

__all__ = list(_HOMES)
__version__ = "0.1.0"


if not TYPE_CHECKING:  # a checker that saw it would take every misspelt name for one of any type

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        if name in _SUBPACKAGES:
            return import_module(f"ragged_fsdp.{name}")
        raise AttributeError(f"module 'ragged_fsdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is for users: names, sub-packages, and what every module has."""
    return sorted([*_HOMES, *_SUBPACKAGES, *(name for name in globals() if name.startswith("__"))])


if "torch" in sys.modules:
    import_module("ragged_fsdp.dtensor")
