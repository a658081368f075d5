"""Our model split over ranks: heads and experts (tensor parallel), or experts alone (expert parallel).

=============  ==========================================  =============================================
               tensor parallel: ranks share their tokens   expert parallel: each rank has its own tokens
=============  ==========================================  =============================================
q, k, v        ``Shard(0)``: each rank has some heads      whole
o              ``Shard(1)``; outputs are summed            whole
experts        ``Shard(0)``: each rank applies its own     ``Shard(0)``: tokens travel to their experts
               to the common tokens; outputs are summed    and back, two all-to-alls
lm_head        ``Shard(0)``; logits are gathered (not if   whole
               tied to the embedding)
router, norms  whole                                       whole
=============  ==========================================  =============================================

What stays whole is for FSDP to shard, over all ranks: so it is equal on the ranks of a tensor-parallel group
by construction, not because they compute the same.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ragged_fsdp.models.moe import Block, Experts, MoETransformer, by_expert, combine

__all__ = ["split_experts", "split_tensors"]


def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism of a model on the meta device, in place."""
    inputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    for layer in _blocks(model):
        parallelize_module(layer.self_attn, mesh, {**inputs, "o_proj": RowwiseParallel()})
        _hold_some(layer.experts, mesh)
        layer.experts.mix = _CommonTokens(mesh)
    assert isinstance(model, MoETransformer)
    if model.lm_head.weight is not model.embed_tokens.weight:
        parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))


def split_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Expert parallelism of a model on the meta device, in place."""
    for layer in _blocks(model):
        _hold_some(layer.experts, mesh)
        layer.experts.mix = _TravellingTokens(mesh)


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _hold_some(experts: Experts, mesh: DeviceMesh) -> None:
    """Leave this rank its part of the experts; every rank of the mesh has as many as the others."""
    for name, parameter in list(experts.named_parameters()):
        part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(part))


class _CommonTokens:
    """Every rank has all tokens and some experts: it computes what those add, and the parts are summed."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    @torch.compiler.disable  # the host must know how many rows there are
    def __call__(self, experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        x, weights = self._shared(x), self._shared(weights)
        order, counts = by_expert(chosen, experts.count)
        held = experts.count // self._mesh.size()
        first = self._mesh.get_local_rank() * held
        start, stop = torch.stack((counts[:first].sum(), counts[: first + held].sum())).tolist()
        mine = order[start:stop]  # the slots whose experts are here
        y = experts.apply_to_groups(x[mine // chosen.shape[1]], counts[first : first + held])
        outputs = y.new_zeros(len(order), y.shape[-1]).index_copy(0, mine, y)
        part = combine(outputs, weights)
        return DTensor.from_local(part, self._mesh, [Partial()], run_check=False).full_tensor()

    def _shared(self, tensor: Tensor) -> Tensor:
        """The tensor itself; backward sums the gradients, of which each rank computes a part."""
        common = DTensor.from_local(tensor, self._mesh, [Replicate()], run_check=False)
        return common.to_local(grad_placements=[Partial()])


class _TravellingTokens:
    """Every rank has its own tokens and some experts: rows are sent to their experts, and outputs back::

    rank 0   a0 a1 b0 c0 c1 d0      grouped by expert; experts a, b are on rank 0, c, d on rank 1
    rank 1   a2 b1 b2 d1

    rank 0 receives  a0 a1 b0 | a2 b1 b2     and groups them   a0 a1 a2 b0 b1 b2
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._ranks = mesh.get_group(), mesh.size()

    @torch.compiler.disable  # the host must know how many rows there are
    def __call__(self, experts: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order, counts = by_expert(chosen, experts.count)
        sent = counts.view(self._ranks, -1)  # (rank, expert there)
        received = torch.empty_like(sent)  # (rank, expert here)
        dist.all_to_all_single(received, sent.contiguous(), group=self._group)
        there, here = torch.stack((sent.sum(1), received.sum(1))).tolist()
        rows = self._send(x[order // chosen.shape[1]], there, here)
        expert = torch.arange(received.shape[1], device=x.device).repeat(self._ranks)
        grouping = expert.repeat_interleave(received.flatten(), output_size=len(rows)).argsort(stable=True)
        y = experts.apply_to_groups(rows[grouping], received.sum(0))
        outputs = self._send(y[grouping.argsort()], here, there)
        return combine(outputs[order.argsort()], weights)

    def _send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        result: Tensor = _AllToAll.apply(rows, sent, received, self._group)
        return result


class _AllToAll(torch.autograd.Function):
    """Rows cut by ``sent`` to the ranks of a group, and the rows that they send here, in their order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.back = (received, sent, group)
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllToAll.apply(grads[0], *ctx.back), None, None, None
