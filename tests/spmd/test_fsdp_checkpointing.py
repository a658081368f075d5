"""Activation checkpointing in its various forms, in either order with ``fully_shard``."""

import functools

import pytest
import torch
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from collective_calls import count
from fsdp_cases import (
    Transformer,
    assert_same,
    assert_steps_agree,
    backward_both,
    build,
    fsdp,
    fully_shard,
    ragged_only,
    shard_blocks,
    tokens,
)
from rank_pool import spmd


class _Recomputed(Transformer):
    """Checkpoints its layers with ``torch.utils.checkpoint``."""

    options: dict | None = None
    runs = 1

    def forward(self, batch):
        x = self.embed(batch[:, :-1])
        for layer in [layer for layer in self.layers for _ in range(self.runs)]:
            x = layer(x) if self.options is None else checkpoint(layer, x, **self.options)
        logits = self.head(self.norm(x.to(self.norm.weight.dtype)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def _keep_matmuls(ctx, op, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE
    )


OPTIONS = {
    "reentrant": {"use_reentrant": True},
    "non_reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": functools.partial(create_selective_checkpoint_contexts, _keep_matmuls),
    },
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", list(OPTIONS))
@spmd(2)
def test_checkpoint_function(rank, kind, reshard):
    model, reference = build(_Recomputed, rank.device)
    model.options = reference.options = OPTIONS[kind]
    shard_blocks(model, reshard_after_forward=reshard)
    assert_steps_agree(model, reference, rank)


@ragged_only  # stock FSDP2 loses the gradient of the second run, and leaves the layer unsharded
@pytest.mark.parametrize("reshard", [True, False])
@spmd(1, 2)
def test_a_layer_that_runs_twice_recomputed_reentrantly(rank, reshard):
    model, reference = build(_Recomputed, rank.device)
    for module in (model, reference):
        module.options = OPTIONS["reentrant"]
        module.runs = 2
    shard_blocks(model, reshard_after_forward=reshard)
    assert_steps_agree(model, reference, rank)


@pytest.mark.parametrize("reshard", [True, False])
@spmd(2)
def test_composable_checkpoint(rank, reshard):
    model, reference = build(Transformer, rank.device)
    for layer in model.layers:
        composable_checkpoint(layer)
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    assert_steps_agree(model, reference, rank)


@pytest.mark.parametrize("impl", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
@pytest.mark.parametrize("inside", [True, False], ids=["fsdp(ckpt)", "ckpt(fsdp)"])
@spmd(2)
def test_checkpoint_wrapper(rank, inside, impl):
    model, reference = build(Transformer, rank.device)
    for i, layer in enumerate(model.layers):
        if inside:
            model.layers[i] = fully_shard(checkpoint_wrapper(layer, checkpoint_impl=impl))
        else:
            model.layers[i] = checkpoint_wrapper(fully_shard(layer), checkpoint_impl=impl)
    fully_shard(model)
    for step in range(2):
        backward_both(model, reference, tokens(rank, step))
        assert_same(model, reference, tolerance=1e-6, grads=True, wrapper="_checkpoint_wrapped_module.")


@spmd(2)
def test_a_wrapper_of_a_sharded_layer_may_be_sharded_too(rank):
    """It has the attributes of the layer, but no state of its own: Transformers' Trainer does this."""
    model, reference = build(Transformer, rank.device)
    for i, layer in enumerate(model.layers):
        model.layers[i] = fully_shard(checkpoint_wrapper(fully_shard(layer)))
    fully_shard(model)
    assert_steps_agree(model, reference, rank, wrapper="_checkpoint_wrapped_module.")
    with pytest.raises(AssertionError, match="only be applied to a module once"):
        fully_shard(model)


@spmd(2)
def test_recompute_gathers_no_more_than_the_backward_needs(rank):
    """Two layers and the root: the backward gathers each resharded layer once, recomputation included."""
    model, _ = build(_Recomputed, rank.device)
    model.options = OPTIONS["non_reentrant"]
    shard_blocks(model, reshard_after_forward=True)
    model(tokens(rank, 0)).backward()
    loss, forward = count(lambda: model(tokens(rank, 1)))
    _, backward = count(loss.backward)
    assert forward == {"gather": 3}
    assert backward == {"gather": 3, "reduce_scatter": 3}


@spmd(2)
def test_recomputation_repeats_the_casts(rank):
    model, plain = build(_Recomputed, rank.device)
    model.options = OPTIONS["non_reentrant"]
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    shard_blocks(model, mp_policy=policy)
    shard_blocks(plain, mp_policy=policy)
    for module in (model, plain):
        module(tokens(rank, 0)).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters()):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor()), name
