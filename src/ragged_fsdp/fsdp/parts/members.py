"""What a group is made of, and the switches that users change between steps.

Transports and reducers work on :class:`Members`; the group itself adds the states of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ragged_fsdp.collectives import Comm, explain
from ragged_fsdp.fsdp.parts.main_shard import MainShard, RowPieces, pins_memory
from ragged_fsdp.fsdp.parts.mesh import ParallelMesh
from ragged_fsdp.fsdp.parts.param import ManagedParam
from ragged_fsdp.fsdp.parts.plan import GroupPlan, gathered_dtype
from ragged_fsdp.fsdp.streams import CommContext
from ragged_fsdp.torch_internals import profiler_enabled

__all__ = ["GroupSettings", "Members"]

_TORCH = Comm()


@dataclass
class GroupSettings:
    """One per group; ``FSDPModule``'s setters write it, the group reads it when it acts."""

    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    reduce_unused: bool = False
    """Whether a trainable parameter without a gradient takes part with zeros and gets a gradient."""
    divide_factor: float | None = None
    """What the sum of gradients is divided by; None is the number of data-parallel ranks."""
    sum_only: bool = False
    """Whether collectives may only sum; scaling is then done before or after them."""
    unshard_async_op: bool = False
    keep_storage: bool = False
    """Whether a reshard leaves the gathered storage allocated, so that its address does not change."""
    max_grad_buffers: int = 1
    """Gradient buffers alive at once below this group's root; the largest setting counts."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    all_reduce_hook_stream: Any = None
    gather_comm: Comm = _TORCH
    reduce_comm: Comm = _TORCH
    reduce_group: dist.ProcessGroup | None = None
    """A process group of its own for reductions over the shards, if asked for."""


class Members:
    """Parameters that are gathered and reduced together: their plan, shards, mesh, dtypes and settings."""

    def __init__(
        self,
        params: Sequence[ManagedParam],
        modules: tuple[nn.Module, ...],
        mesh: ParallelMesh,
        plan: GroupPlan,
        main: MainShard | RowPieces,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.params = list(params)
        self.modules = modules
        self.mesh = mesh
        self.plan = plan
        self.main = main
        self.device = device
        self.mp_policy = mp_policy
        self.offload = isinstance(offload_policy, CPUOffloadPolicy)
        self.pin_memory = pins_memory(offload_policy, device)
        self.settings = GroupSettings()
        self.context: CommContext = None  # type: ignore[assignment]  # the schedule's, once there is one
        self.fqn: str | None = None
        self.label_suffix = ""
        """Which of the groups of its call this one is, if there are several."""
        self.reduce_dtype: torch.dtype | None = None
        """In which gradients are summed, if not in the dtype that autograd produces."""

    @property
    def label(self) -> str:
        """Name for errors and profiles."""
        return (self.fqn or (self.params[0].name if self.params else "")) + self.label_suffix

    @property
    def gathered_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtype that each parameter is computed with."""
        return tuple(gathered_dtype(param.dtype, self.mp_policy.param_dtype) for param in self.params)

    def follow_trainable(self) -> None:
        """Choose the dtypes of gradients; again when other parameters train than before."""
        param_dtype, reduce_dtype = self.mp_policy.param_dtype, self.mp_policy.reduce_dtype
        self.reduce_dtype = None if reduce_dtype == param_dtype else reduce_dtype
        trainable = {p.dtype for p in self.params if p.trains}
        if len(trainable) > 1:
            raise AssertionError(f"FSDP expects uniform original parameter dtype but got {trainable}")
        self.trainable_dtype = next(iter(trainable), torch.float32)
        self.wire_dtype = gathered_dtype(self.trainable_dtype, param_dtype)
        """Of the gradients, as autograd produces them."""
        self.gradient_dtype = self.reduce_dtype or self.wire_dtype

    def launch(self, phase: str, pg: Any, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call ``collective`` for this group: an error says where, a profiler that runs shows its name."""
        if self.context.order_check is not None:
            self.context.order_check.note(phase.replace("-", "_"), self.label, pg)
        try:
            if not profiler_enabled():
                return collective(*args, **options)
            with torch.profiler.record_function(f"FSDP::{phase.replace('-', '_')} ({self.label})"):
                return collective(*args, **options)
        except RuntimeError as error:
            explain(error, phase, self.label, pg)
            raise
