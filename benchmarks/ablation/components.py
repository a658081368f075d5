"""The two components, turned off one at a time, as a system without them would have to work.

Without the buffer, communication needs memory of its own: shards are copied in before a gather, parameters
copied out after it, gradients copied in before a reduction. Without the planner, shards are cut anywhere, so
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

__all__ = ["CopyingGather", "CopyingReduce", "RedistributingAdamW8bit"]

_CODES = ("exp_avg_codes", "exp_avg_sq_codes")
_COMM = Comm()


class _Copying:
    """A communication buffer beside the parameters, copied in as many pieces as the group has tensors."""

    def __init__(self, tensors: int) -> None:
        self._tensors = tensors

    def sizes(self, shard_numel: int) -> list[int]:
        """The pieces of a shard."""
        piece = -(-shard_numel // self._tensors)
        return [min(piece, shard_numel - start) for start in range(0, shard_numel, piece)]


class CopyingGather(_Copying):
    """An all-gather through memory of its own: copy in, gather, copy out tensor by tensor."""

    def __call__(
        self, *, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> None:
        sizes = self.sizes(input_tensor.numel())
        sent, received = torch.empty_like(input_tensor), torch.empty_like(output_tensor)
        torch._foreach_copy_(list(sent.split(sizes)), list(input_tensor.split(sizes)))
        _COMM.gather(received, sent, group)
        _copy_columns(output_tensor, received, group.size(), sizes)


class CopyingReduce(_Copying):
    """A reduce-scatter through memory of its own: copy in tensor by tensor, reduce, copy out."""

    def __call__(
        self,
        *,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool,
    ) -> None:
        sizes = self.sizes(output_tensor.numel())
        sent, received = torch.empty_like(input_tensor), torch.empty_like(output_tensor)
        _copy_columns(sent, input_tensor, group.size(), sizes)
        _COMM.reduce(received, sent, group, op=op)
        output_tensor.copy_(received)


def _copy_columns(target: Tensor, source: Tensor, ranks: int, sizes: Sequence[int]) -> None:
    """Copy (ranks, shard) tensor by tensor: each is a stretch of columns."""
    for to, of in zip(
        target.view(ranks, -1).split(list(sizes), 1), source.view(ranks, -1).split(list(sizes), 1)
    ):
        to.copy_(of)


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
