"""Which parameters have a gradient after a backward: those of the unsharded model, in random module trees."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from ragged_fsdp import fully_shard
from rank_pool import spmd

WIDTH = 6
HOW = (
    "plain",
    "plain",
    "plain",
    "unused",
    "twice",
    "detached",
    "no_grad",
    "recomputed",
    "recomputed, old",
    "beside",
)


class Node(nn.Module):
    """Children that run in ways a random number chooses, and parameters of its own, some of them unused."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.spare = nn.Parameter(torch.randn(WIDTH))
        self.uses_scale, self.uses_spare = draw.random() < 0.7, draw.random() < 0.3
        self.leaf = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
        self.leaf_by_weight = draw.random() < 0.3
        """Whether the leaf's weight is used and the leaf never called."""
        count = 0 if depth == 0 else draw.randint(1, 3)
        self.children_ = nn.ModuleList(Node(draw, depth - 1) for _ in range(count))
        self.how = [draw.choice(HOW) for _ in range(count)]
        self.shards = draw.random() < 0.5
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(draw.random() < 0.8)
        for parameter in self.leaf.parameters():
            parameter.requires_grad_(draw.random() < 0.8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.uses_scale:
            x = x * self.scale
        x = x @ self.leaf.weight.T if self.leaf_by_weight else self.leaf(x)
        side = x * self.spare if self.uses_spare else x
        for child, how in zip(self.children_, self.how):
            x, side = self.run(child, how, x, side)
        return torch.tanh(x), side

    def run(self, child: nn.Module, how: str, x: torch.Tensor, side: torch.Tensor):
        if how == "unused":
            return x, side
        if how == "no_grad":
            with torch.no_grad():
                return x + child(x)[0], side
        if how in ("recomputed", "recomputed, old"):
            return checkpoint(child, x, use_reentrant=how != "recomputed")
        main, other = child(x)
        if how == "twice":
            main = main + child(main)[0]
        if how == "detached":
            main = x + main.detach()
        return main, (side + other if how == "beside" else side)


def tree(seed: int) -> Node:
    torch.manual_seed(seed)
    return Node(random.Random(seed), depth=2)


def nodes(module: Node) -> Iterator[Node]:
    for child in module.children_:
        yield from nodes(child)
    yield module


def backwards(model: Node, seed: int) -> Iterator[None]:
    """Three that accumulate: of one of the outputs or of both, or of one after the other."""
    draw = random.Random(seed)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
    x.requires_grad_(draw.random() < 0.5)
    for _ in range(3):
        main, side = (output.square().mean() for output in model(x))
        losses = draw.choice(([main], [side], [main + side], [main, side]))
        losses = [loss for loss in losses if loss.requires_grad]
        for index, loss in enumerate(losses):
            loss.backward(retain_graph=index + 1 < len(losses))
        yield


def gradients(model: Node, seed: int) -> list[dict[str, torch.Tensor | None]]:
    # before the forward: after one without a backward the root is gathered, and has other parameters
    parameters = dict(model.named_parameters())
    return [{name: whole(p.grad) for name, p in parameters.items()} for _ in backwards(model, seed)]


def whole(grad: torch.Tensor | None) -> torch.Tensor | None:
    if grad is None:
        return None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()


def differences(seed: int, shard=fully_shard, **options) -> list[str]:
    """Where the gradients of the sharded tree are not those of the unsharded one, in words."""
    expected, model = gradients(tree(seed), seed), tree(seed)
    for node in nodes(model):
        if node.shards or node is model:
            shard(node, **options)
    wrong = []
    for step, (ours, theirs) in enumerate(zip(gradients(model, seed), expected)):
        for name, grad in theirs.items():
            found, where = ours[name], f"seed {seed}, backward {step}, {name}"
            if (grad is None) != (found is None):
                wrong.append(f"{where}: {'missing' if found is None else 'present'}")
            elif grad is not None and not torch.allclose(grad, found, rtol=1e-5, atol=1e-6):
                wrong.append(f"{where}: differs")
    return wrong


@spmd(1, 2)
def test_gradients_are_there_where_they_are_in_the_unsharded_model(rank):
    """Of modules that are unused, run twice, detached, run without grad or recomputed; some parts frozen."""
    wrong = [text for seed in range(16) for text in differences(seed, mesh=rank.mesh())]
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
