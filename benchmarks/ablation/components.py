"""The two components, turned off one at a time, as a system without them would have to work.

Without the buffer, communication needs memory of its own: parameters are copied out of it after a gather, in
one pass on the compute stream, the least that is possible. Before a reduction there is one pass into its
buffer either way, since it casts, so nothing is added there. Without the planner, shards are cut anywhere, so
blocks are not whole on a rank: weights, gradients and moments are redistributed to whole blocks for the
optimizer step, and weights and moments back. How that move is made matters, so there are two ways: a single
uneven all-to-all per tensor, which our placements allow, and what a placement without it must do, gather the
whole tensor on every rank and keep a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from ragged_fsdp.collectives import Comm
from ragged_fsdp.dtensor import RaggedShard
from ragged_fsdp.optim import AdamW8bit
from ragged_fsdp.optim.blocks import block_grid

__all__ = ["CopyingGather", "RedistributingAdamW8bit"]

_CODES = ("exp_avg_codes", "exp_avg_sq_codes")
_COMM = Comm()


class CopyingGather:
    """An all-gather into memory of its own.

    Because it has an ``allocate``, the runtime copies the parameters out of that memory, in one pass on the
    compute stream once the gather is done.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for one gather."""
        return _COMM.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> Any:
        """Gather."""
        return _COMM.gather(output_tensor, input_tensor, group, async_op=async_op)


class RedistributingAdamW8bit:
    """8-bit AdamW on parameters whose sharding cuts blocks: they are put together for every step."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], through_full: bool, **options: Any) -> None:
        self._move = _through_full if through_full else _directly
        self._params = [param for _, param in named]
        self._whole = [_whole_blocks(param) for param in self._params]
        self._inner = AdamW8bit([(name, w) for (name, _), w in zip(named, self._whole)], **options)
        self._cut_codes: dict[nn.Parameter, dict[str, DTensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Assemble, update, and take apart again, parameter by parameter."""
        for param, whole in zip(self._params, self._whole):
            placements = whole.placements
            whole._local_tensor.copy_(self._move(param, placements)._local_tensor)
            whole.grad = self._move(param.grad, placements)
            for key, codes in self._cut_codes.get(param, {}).items():
                assembled = self._move(codes, placements)
                self._inner.state[whole][key]._local_tensor.copy_(assembled._local_tensor)
        self._inner.step()
        for param, whole in zip(self._params, self._whole):
            param._local_tensor.copy_(self._move(whole, param.placements)._local_tensor)
            state = self._inner.state[whole]
            self._cut_codes[param] = {
                key: self._move(state[key], param.placements) for key in _CODES if key in state
            }
            whole.grad = None

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for param in self._params:
            param.grad = None


def _directly(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    return tensor.redistribute(placements=placements)


def _through_full(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    return tensor.redistribute(placements=[Replicate()]).redistribute(placements=placements)


def _whole_blocks(param: nn.Parameter) -> nn.Parameter:
    """The parameter in a layout that keeps blocks whole, spread as evenly as blocks allow."""
    grid = block_grid(tuple(param.shape))
    granularity = grid.granularity
    ragged = RaggedShard.even(param.shape, param.device_mesh.size(), granularity)
    return nn.Parameter(param.detach().redistribute(placements=[ragged]))
