"""Gathered weights and gradient buffers in a memory pool; gathers by hand on another stream."""

import pytest
import torch

from fsdp_core_cases import OPTIMIZERS, batch, clone, loss_of, make_net, shard, train_sharded
from ragged_fsdp.fsdp.comm_memory import ProcessGroupMemory, process_group_memory
from rank_pool import DEVICE, Rank, spmd

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")


class _PlainMemory(ProcessGroupMemory):
    """The same over the common allocator, for backends without one of their own."""

    def __init__(self) -> None:
        self._pool = torch.cuda.MemPool()


def _holds(memory: ProcessGroupMemory, tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    segments = memory._pool.snapshot()
    return any(s["address"] <= address < s["address"] + s["total_size"] for s in segments)


@spmd(2)
def test_training_in_a_pool(rank: Rank) -> None:
    base = make_net(rank.device)
    pg = rank.mesh().get_group()
    memory = process_group_memory(pg, torch.device("cuda", torch.cuda.current_device())) or _PlainMemory()
    losses = []
    for enabled in (False, True):
        model = shard(clone(base), mesh=rank.mesh())
        for module in (model, *model.blocks):
            for group in module._get_fsdp_state().groups:
                group.settings.comm_memory = memory if enabled else None
        losses.append(train_sharded(model, OPTIMIZERS["sgd"], rank.rank, rank.world_size, 5))
    assert losses[0] == losses[1]
    loss = loss_of(model, batch(rank.device, 0, 2).chunk(2)[rank.rank])
    (group,) = model._get_fsdp_state().groups  # the root stays gathered after forward
    assert _holds(memory, group.model_weight.flat)
    assert not _holds(memory, group.main.flat)
    loss.backward()


@spmd(2)
def test_gathers_by_hand_on_another_stream(rank: Rank) -> None:
    """Memory allocated on that stream is released on the compute stream: reuse waits for the computation."""
    side = torch.cuda.Stream()
    losses = []
    for by_hand in (False, True):
        model = shard(make_net(rank.device), mesh=rank.mesh(), reshard_after_forward=True)
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: torch.cuda._sleep(2_000_000))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        seen = []
        for step in range(4):
            if by_hand:
                with torch.cuda.stream(side):
                    side.wait_stream(torch.cuda.default_stream())
                    handles = [block.unshard(async_op=True) for block in model.blocks]
                for handle in handles:
                    handle.wait()
            loss = loss_of(model, batch(rank.device, step, 2).chunk(2)[rank.rank])
            with torch.cuda.stream(side):  # takes what was released, if the allocator lets it
                torch.full((1 << 14,), float("nan"), device=rank.device)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        losses.append(seen)
    assert losses[0] == losses[1]
