"""Which parameters have a gradient after a backward: those of the unsharded model, in random module trees."""

import pytest
import torch
from torch import nn

from ragged_fsdp import fully_shard
from rank_pool import spmd
from tree_cases import WIDTH, differences


@spmd(1, 2, 3, 4)
def test_random_trees_have_the_gradients_of_the_unsharded_model(rank):
    """Present or missing, and to 1e-12, for all reductions; ``tree_cases.py`` says what trees do."""
    seeds = range(100 * rank.world_size, 100 * rank.world_size + 24 // rank.world_size)
    wrong = [text for seed in seeds for text in differences(seed, fully_shard, rank.mesh())]
    assert not wrong, "\n".join(wrong)


@spmd(4)
def test_random_trees_over_replicas(rank):
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    wrong = [text for seed in range(900, 904) for text in differences(seed, fully_shard, mesh)]
    assert not wrong, "\n".join(wrong)


class Partly(nn.Module):
    """The first rank uses a parameter that the others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.every, self.some = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor, uses_some: bool) -> torch.Tensor:
        return (x * self.every + (self.some if uses_some else 0.0)).sum()


@spmd(2)
def test_a_parameter_that_only_one_rank_uses(rank):
    """Each rank has the gradients that its own backward made; zeros on request; named in debug mode."""
    x = torch.ones(WIDTH, device=rank.device)
    for zeros in (False, True):
        model = Partly().to(rank.device)
        fully_shard(model, mesh=rank.mesh())
        model.set_reduce_scatter_unused_params(zeros)
        model(x, uses_some=rank.rank == 0).backward()
        assert torch.equal(model.every.grad.to_local(), torch.ones_like(model.every.to_local()))
        assert (model.some.grad is None) == (rank.rank == 1 and not zeros)
        if model.some.grad is not None:
            assert torch.equal(model.some.grad.to_local(), torch.full_like(model.some.to_local(), 0.5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAGGED_FSDP_DEBUG", "1")
        model = Partly().to(rank.device)
        fully_shard(model, mesh=rank.mesh())
        with pytest.raises(
            RuntimeError, match=r"reduction of every, some of group .*reduction of every of group"
        ):
            model(x, uses_some=rank.rank == 0).backward()
