"""A whole forward and backward of a sharded model as one CUDA graph: one call launches a step."""

import copy

import pytest
import torch

from fsdp_cases import Transformer, build, shard_blocks, tokens
from rank_pool import DEVICE, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")


def _capture(model, batch):
    """One eager step makes everything that stays; then the graph, its loss and its gradients."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # the second follows the recorded order
            model(batch).backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(batch)
        loss.backward()
    return graph, loss


def _use_freed_memory(model, batch):
    """An evaluation frees what training keeps; a graph must not have counted on it."""
    with torch.no_grad():
        model(batch)
    model.reshard()  # the root stays gathered after a forward
    torch.cuda.empty_cache()
    torch.full((1 << 24,), float("nan"), device=batch.device)


@pytest.mark.parametrize("reduction", ["reduce_scatter", "all_to_all", "two_level"])
@spmd(1, 2, 4)
def test_a_captured_step_trains_like_an_eager_one(rank, reduction):
    model, twin = build(lambda: Transformer(layers=4), rank.device)
    for one in (model, twin):
        shard_blocks(one, reduction=reduction, ranks_per_node=2)
    batch = copy.copy(tokens(rank, 0))
    graph, loss = _capture(model, batch)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, twin)]
    for step in range(4):
        batch.copy_(tokens(rank, step))
        graph.replay()
        expected = twin(tokens(rank, step))
        expected.backward()
        assert torch.equal(loss, expected), step
        for mine, theirs in zip(model.parameters(), twin.parameters()):
            assert torch.equal(mine.grad.to_local(), theirs.grad.to_local()), step
        for optimizer in optimizers:
            optimizer.step()
        optimizers[1].zero_grad()  # the graph writes its own gradients anew
        _use_freed_memory(model, batch)
    model.zero_grad()
    model(batch).backward()  # eager steps still work
    twin(batch).backward()
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())
