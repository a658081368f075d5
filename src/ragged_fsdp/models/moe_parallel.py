"""Our model split over tensor-parallel ranks, which share their tokens: heads, experts, output head.

=============  =================================================================
q, k, v        ``Shard(0)``: each rank has some heads
o              ``Shard(1)``; outputs are summed
experts        some on each rank, which applies them to the common tokens;
               outputs are summed. Not with expert parallelism beside it
lm_head        ``Shard(0)``; logits are gathered (not if tied to the embedding)
router, norms  whole
=============  =================================================================

What stays whole is for FSDP to shard, over all ranks: so it is equal on the ranks of a tensor-parallel group
by construction, not because they compute the same.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ragged_fsdp.experts import ExpertSplit, SharedTokens, SplitExperts, spread
from ragged_fsdp.models.moe import Block, MoETransformer

__all__ = ["SPLIT_ATTENTION", "SPLIT_TENSORS", "split_attention", "split_tensors"]

SPLIT_ATTENTION = (*(f"layers.*.self_attn.{name}_proj" for name in "qkvo"), "lm_head")
"""Modules whose parameters are split."""
SPLIT_TENSORS = (*SPLIT_ATTENTION, "layers.*.experts")


def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism of a model on the meta device, in place: attention, experts and the head."""
    split_attention(model, mesh)
    for name, layer in _blocks(model).items():
        even = ExpertSplit.even(layer.experts.num_experts, mesh.size())
        spread(SplitExperts(f"{name}.experts", layer.experts, mesh, even, SharedTokens))


def split_attention(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallelism of attention and of the head alone: experts are left as they are."""
    inputs = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    for layer in _blocks(model).values():
        parallelize_module(layer.self_attn, mesh, {**inputs, "o_proj": RowwiseParallel()})
    assert isinstance(model, MoETransformer)
    if model.lm_head.weight is not model.embed_tokens.weight:
        parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))


def _blocks(model: nn.Module) -> dict[str, Block]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Block)}
