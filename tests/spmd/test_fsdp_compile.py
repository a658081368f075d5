"""``torch.compile`` of blocks before and after sharding, and of the optimizer's inputs."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fsdp_cases import (
    Transformer,
    assert_same,
    assert_steps_agree,
    average_gradients,
    backward_both,
    build,
    fsdp,
    fully_shard,
    relative_error,
    shard_blocks,
    tokens,
)
from rank_pool import spmd


@pytest.mark.parametrize("order", ["before", "after", "wrapped", "in one list"])
@spmd(2, timeout=170)
def test_blocks_compiled(rank, order):
    """Each block is one graph: the hooks are neither in it nor compiled themselves."""
    options = {"backend": "aot_eager", "fullgraph": True}
    model, reference = build(Transformer, rank.device)
    if order == "before":
        for layer in model.layers:
            layer.compile(**options)
    if order == "in one list":
        fully_shard(list(model.layers))
        fully_shard(model)
    else:
        shard_blocks(model)
    if order == "wrapped":
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, **options)
    elif order != "before":
        for layer in model.layers:
            layer.compile(**options)
    assert_steps_agree(model, reference, rank, wrapper="_orig_mod.")


@spmd(2, timeout=170)
def test_whole_model_compiled_with_mixed_precision(rank):
    """The compiler's backend runs the operations of the eager model in their order: on CPUs every bit agrees.

    CUDA's kernels may add in another order; there the bound is one unit in the last place of bf16.
    """
    model, _ = build(Transformer, rank.device)
    eager, _ = build(Transformer, rank.device)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (model, eager):
        shard_blocks(module, mp_policy=policy)
    compiled = torch.compile(model, backend="aot_eager")
    tolerance = 0.0 if rank.device == "cpu" else 2**-7
    for step in range(2):
        loss, expected = compiled(tokens(rank, step)), eager(tokens(rank, step))
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0.0)
        loss.backward()
        expected.backward()
    for (name, p), q in zip(model.named_parameters(), eager.parameters()):
        error = relative_error(p.grad.full_tensor(), q.grad.full_tensor())
        assert error <= tolerance, f"{name}: {error:.2e}"


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
        backward_both(model, reference, tokens(rank, step))
        assert_same(model, reference, tolerance=1e-6, grads=True, wrapper="_orig_mod.")


@spmd(2, timeout=170)
def test_compiled_optimizer_step(rank):
    """Shards that are cut unevenly, as views of one buffer, go through the compiler too."""
    _, reference = build(lambda: torch.nn.Conv2d(3, 47, 3, padding=1), rank.device)
    with torch.device("meta"):
        model = torch.nn.Conv2d(3, 47, 3, padding=1)
    fully_shard(model, reshard_after_forward=False)
    model.to_empty(device=rank.device)
    set_model_state_dict(model, reference.state_dict(), options=StateDictOptions(full_state_dict=True))
    ours = torch.optim.Adam(model.parameters(), lr=1e-3)
    theirs = torch.optim.Adam(reference.parameters(), lr=1e-3)
    step = torch.compile(ours.step, backend="aot_eager")
    for index in range(2):
        generator = torch.Generator().manual_seed(10 * index + rank.rank)
        x = torch.randn(2, 3, 8, 8, generator=generator).to(rank.device)
        for module in (model, reference):
            module(x).square().sum().backward()
        average_gradients(reference)
        step() if index else ours.step()
        theirs.step()
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
    assert_same(model, reference, tolerance=1e-6)
