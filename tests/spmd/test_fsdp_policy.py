"""``orig_param_policy``: blocks stay whole; plans that differ between ranks are refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from fsdp_cases import (
    RAGGED,
    Experts,
    FeedForward,
    Transformer,
    assert_same,
    backward_both,
    build,
    fully_shard,
    shard_blocks,
    tokens,
)
from rank_pool import spmd

pytestmark = pytest.mark.skipif(not RAGGED, reason="tests what stock FSDP2 does not have")


def _boundaries(parameter):
    """Where each rank's part of the flattened parameter begins and ends, gathered over the mesh."""
    local = torch.tensor([parameter.to_local().numel()], device=parameter.to_local().device)
    sizes = [torch.empty_like(local) for _ in range(parameter.device_mesh.size())]
    torch.distributed.all_gather(sizes, local, group=parameter.device_mesh.get_group())
    edges, end = [0], 0
    for size in sizes:
        end += int(size)
        edges.append(end)
    return edges


@spmd(2, 3, 4)
def test_blocks_never_cross_ranks(rank):
    from ragged_fsdp import Elements, Rows, Whole

    policies = {
        "up.weight": Rows(1),
        "down.weight": Whole(),
        "up.bias": Elements(23),
        "down.bias": None,
    }
    blocks = {"up.weight": 12, "down.weight": 12 * 23, "up.bias": 23, "down.bias": 1}
    model, reference = build(FeedForward, rank.device)
    seen = []

    def policy(name, parameter):
        seen.append((name, tuple(parameter.shape)))
        return policies[name]

    fully_shard(model, orig_param_policy=policy)
    assert sorted(seen) == sorted((n, tuple(p.shape)) for n, p in reference.named_parameters())
    for name, parameter in model.named_parameters():
        edges = _boundaries(parameter)
        assert edges[-1] == parameter.numel()
        for edge in edges[1:-1]:
            assert edge % blocks[name] == 0 or edge == parameter.numel(), (name, edges)
    assert_same(model, reference)


@pytest.mark.parametrize("kind", ["rows", "elements", "whole"])
@spmd(3)
def test_training_does_not_depend_on_the_granularity(rank, kind):
    from ragged_fsdp import Elements, Rows, Whole

    granularity = {"rows": Rows(3), "elements": Elements(6), "whole": Whole()}[kind]
    model, reference = build(lambda: Transformer(moe=True), rank.device)
    shard_blocks(model, orig_param_policy=lambda name, p: granularity if p.ndim > 1 else None)
    backward_both(model, reference, tokens(rank, 0))
    assert_same(model, reference, tolerance=1e-6, grads=True)


@spmd(2)
def test_names_are_relative_to_the_module_given(rank):
    model, _ = build(lambda: Transformer(moe=True), rank.device)
    names = []
    shard_blocks(model, orig_param_policy=lambda name, p: names.append(name))
    expected = [name for name, _ in model.layers[0].named_parameters()]
    assert sorted(names[: len(expected)]) == sorted(expected)


@spmd(2)
def test_a_wrong_policy_names_the_parameter(rank):
    from ragged_fsdp import Elements

    for answer in (128, "rows", Elements):
        with pytest.raises((TypeError, ValueError), match=r"(up|down)\.(weight|bias)"):
            fully_shard(FeedForward(), orig_param_policy=lambda name, p, answer=answer: answer)


@spmd(3)
def test_local_shards_match_distribute_tensor(rank):
    """What others assume of a DTensor: distributing the full value gives the local shard."""
    model, reference = build(Experts, rank.device)
    fully_shard(model)
    for name, parameter in model.named_parameters():
        whole = reference.get_parameter(name).detach()
        local = torch.distributed.tensor.distribute_tensor(
            whole, parameter.device_mesh, parameter.placements
        ).to_local()
        assert torch.equal(local, parameter.to_local()), name


@pytest.mark.parametrize(
    "difference", ["shape", "name", "policy", "dtype", "frozen", "count", "group", "none"]
)
@spmd(3)
def test_ranks_that_disagree_raise_everywhere(rank, difference):
    """Rank 1 builds something else: every rank gets an exception that names the parameter."""
    from ragged_fsdp import Rows

    model = FeedForward()
    policy = None
    if rank.rank == 1:
        if difference == "shape":
            model.down = nn.Linear(23, 11)
        elif difference == "name":
            model.lower = model.down
            del model.down
        elif difference == "policy":
            policy = lambda name, p: Rows(2) if name == "down.weight" else None  # noqa: E731
        elif difference == "dtype":
            model.down.bfloat16()
        elif difference == "frozen":
            model.down.requires_grad_(False)
        elif difference == "count":
            model.down.bias = None
        elif difference == "none":
            model = nn.Identity()

    def placement(p: nn.Parameter) -> Shard | None:
        return Shard(0) if difference == "group" and rank.rank == 1 and p.ndim == 1 else None

    with pytest.raises((RuntimeError, ValueError), match=r"(down|lower|up)\.(weight|bias)"):
        fully_shard(model.to(rank.device), orig_param_policy=policy, shard_placement_fn=placement)


@spmd(4)
def test_every_replica_hears_of_a_difference(rank):
    """Rank 3 differs: ranks 0 and 1 are in no group with it that shards, and must not wait for it."""
    mesh = rank.mesh(2, 2, names=("replicate", "shard"))
    width = 5 if rank.rank == 3 else 4
    with pytest.raises(ValueError, match=r"rank 2 has 'weight \(4, 4\).*rank 3 has 'weight \(4, 5\)"):
        fully_shard(nn.Linear(width, 4, device=rank.device), mesh=mesh)
    with pytest.raises(
        ValueError, match=r"rank [01] has 'reduction=reduce_scatter', rank [23] has 'reduction=all_to"
    ):
        fully_shard(
            nn.Linear(4, 4, device=rank.device),
            mesh=mesh,
            reduction="all_to_all" if rank.rank >= 2 else "reduce_scatter",
        )
