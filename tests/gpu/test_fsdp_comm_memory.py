"""Gathered weights and gradient buffers in a memory pool; gathers by hand on another stream."""

import pytest
import torch

import fsdp_inside
from fsdp_cases import Transformer, build, shard_blocks, tokens, train
from rank_pool import DEVICE, Rank, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")


def _holds(pool: torch.cuda.MemPool, tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    return any(s["address"] <= address < s["address"] + s["total_size"] for s in pool.snapshot())


@spmd(2)
def test_training_in_a_pool(rank: Rank) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory, pool = fsdp_inside.pool_memory(rank.mesh().get_group(), device)
    losses = []
    for enabled in (False, True):
        model, _ = build(Transformer, rank.device)
        shard_blocks(model, mesh=rank.mesh())
        for module in (model, *model.layers):
            fsdp_inside.use_comm_memory(module, memory if enabled else None)
        losses.append(train(model, torch.optim.SGD(model.parameters(), lr=0.3), rank, range(5)))
    assert torch.equal(*losses)
    shard = model.head.weight.to_local()
    loss = model(tokens(rank, 0))
    assert _holds(pool, model.head.weight)  # the root stays gathered after forward
    assert not _holds(pool, shard)
    loss.backward()


@spmd(2)
def test_gathers_by_hand_on_another_stream(rank: Rank) -> None:
    """Memory allocated on that stream is released on the compute stream: reuse waits for the computation."""
    side = torch.cuda.Stream()
    losses = []
    for by_hand in (False, True):
        model, _ = build(lambda: Transformer(layers=3), rank.device)
        shard_blocks(model, mesh=rank.mesh(), reshard_after_forward=True)
        for layer in model.layers:
            layer.register_forward_pre_hook(lambda *_: torch.cuda._sleep(2_000_000))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        seen = []
        for step in range(4):
            if by_hand:
                with torch.cuda.stream(side):
                    side.wait_stream(torch.cuda.default_stream())
                    handles = [layer.unshard(async_op=True) for layer in model.layers]
                for handle in handles:
                    handle.wait()
            loss = model(tokens(rank, step))
            with torch.cuda.stream(side):  # takes what was released, if the allocator lets it
                torch.full((1 << 14,), float("nan"), device=rank.device)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    assert losses[0] == losses[1]
