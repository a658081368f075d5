"""RAGGED_FSDP_DEBUG=1 and the failures it makes visible."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from fsdp_core_cases import batch, clone, loss_of, make_net
from ragged_fsdp import DBuffer, fully_shard
from rank_pool import Rank, spmd


@contextmanager
def debug() -> Iterator[None]:
    os.environ["RAGGED_FSDP_DEBUG"] = "1"
    try:
        yield
    finally:
        del os.environ["RAGGED_FSDP_DEBUG"]


@spmd(2, 3)
def test_results_do_not_change(rank: Rank) -> None:
    """Released and new storage is NaN; training must not notice."""
    grads = []
    for enabled in (False, True):
        with debug() if enabled else torch.enable_grad():
            model = clone(make_net(rank.device))
            for block in model.blocks:
                fully_shard(block, mesh=rank.mesh())
            fully_shard(model, mesh=rank.mesh())
            for step in range(3):
                loss_of(
                    model, batch(rank.device, step, rank.world_size).chunk(rank.world_size)[rank.rank]
                ).backward()
        grads.append([p.grad.to_local().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    assert all(g.isfinite().all() for g in grads[1])


@spmd(2)
def test_freed_storage_is_poisoned(rank: Rank) -> None:
    with debug():
        buffer = DBuffer.distribute({"w": torch.ones(8, 8)}, rank.mesh())
        from torch.distributed.tensor import Replicate

        full = buffer.redistribute([Replicate()])
        full.release()
        full.materialize()
        assert full.tensor(0).isnan().all()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, left_first: bool) -> torch.Tensor:
        first, second = (self.left, self.right) if left_first else (self.right, self.left)
        return second(first(x))


@spmd(3)
def test_divergent_order_names_the_rank(rank: Rank) -> None:
    """Without the check these ranks would gather one layer's bytes into the other's buffer."""
    with debug():
        model = Branches().to(rank.device)
        fully_shard(model.left, mesh=rank.mesh())
        fully_shard(model.right, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh())
        x = torch.ones(2, 8, device=rank.device)
        model(x, True)
        with pytest.raises(RuntimeError, match=r"rank 0: .*all_gather of group 'left'; rank 2: .*'right'"):
            model(x, rank.rank < 2)
        model.reset_iter_state()


@spmd(2)
def test_a_failing_collective_says_where(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(rank.device)
    fully_shard(model[0], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())

    class Broken:
        def __call__(self, **_: object) -> None:
            raise RuntimeError("timed out")

    model[0].set_custom_all_gather(Broken())
    with pytest.raises(RuntimeError, match="timed out") as caught:
        model(torch.ones(2, 8, device=rank.device))
    (note,) = caught.value.__notes__
    assert f"all-gather of group '0' failed on rank {rank.rank}" in note
    model.reset_iter_state()
    model[0].set_custom_all_gather(None)
    model(torch.ones(2, 8, device=rank.device)).sum().backward()
