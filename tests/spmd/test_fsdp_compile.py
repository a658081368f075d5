"""``torch.compile`` of blocks before and after sharding, and of the optimizer's inputs."""

import pytest
import torch

from fsdp_cases import (
    Transformer,
    assert_same,
    average_gradients,
    build,
    fsdp,
    fully_shard,
    shard_blocks,
    tokens,
)
from rank_pool import spmd


def _check(model, reference, rank, tolerance=1e-5):
    for step in range(2):
        for module in (model, reference):
            module.zero_grad()
            module(tokens(rank, step)).backward()
        average_gradients(reference)
        assert_same(model, reference, tolerance=tolerance, grads=True)


@pytest.mark.parametrize("order", ["before", "after"])
@spmd(2, timeout=170)
def test_blocks_compiled(rank, order):
    model, reference = build(Transformer, rank.device)
    if order == "before":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    shard_blocks(model)
    if order == "after":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
    _check(model, reference, rank)


@spmd(2, timeout=170)
def test_whole_model_compiled_with_mixed_precision(rank):
    model, _ = build(Transformer, rank.device)
    eager, _ = build(Transformer, rank.device)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model, eager):
        shard_blocks(module, mp_policy=policy)
    compiled = torch.compile(model, backend="aot_eager")
    for step in range(2):
        loss, expected = compiled(tokens(rank, step)), eager(tokens(rank, step))
        torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)
        loss.backward()
        expected.backward()
    for (name, p), q in zip(model.named_parameters(), eager.parameters()):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor(), rtol=5e-2, atol=5e-2, msg=name)


@spmd(2, timeout=170)
def test_a_submodule_compiled_inside_a_sharded_block(rank):
    """The parameters are views into the gathered buffer whose storage comes and goes."""
    model, reference = build(Transformer, rank.device)
    for layer in model.layers:
        layer.mlp = torch.compile(layer.mlp, backend="aot_eager")
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for step in range(2):
        for module in (model, reference):
            module.zero_grad()
            module(tokens(rank, step)).backward()
    average_gradients(reference)
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        want = expected[name.replace("_orig_mod.", "")].grad
        torch.testing.assert_close(parameter.grad.full_tensor(), want, rtol=1e-5, atol=1e-6)
