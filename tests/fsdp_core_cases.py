"""Small models and an unsharded reference for the tests of the runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ragged_fsdp import fully_shard

WIDTH = 24
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
}


class Block(nn.Module):
    """A pre-norm MLP block: sizes that no world size divides evenly."""

    def __init__(self, width: int = WIDTH, hidden: int = 37) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Embedding, blocks and a head; the head may be tied to the embedding."""

    def __init__(self, blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_net(device: str, **options: object) -> Net:
    """The same model on every rank."""
    torch.manual_seed(7)
    return Net(**options).to(device)


def batch(device: str, step: int, ranks: int, rows: int = 2) -> torch.Tensor:
    """The tokens of all ranks in one step: ``rows`` rows for each."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, 50, (ranks * rows, 5), generator=generator).to(device)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).float().flatten(0, 1), (tokens.flatten() * 7 + 1) % 50)


def train_reference(
    model: nn.Module,
    optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ranks: int,
    steps: int,
) -> list[float]:
    """Unsharded training on the mean loss of all ranks' batches."""
    optimizer = optimizer_of(model.parameters())
    losses = []
    for step in range(steps):
        tokens = batch(next(model.parameters()).device.type, step, ranks)
        loss = torch.stack([loss_of(model, part) for part in tokens.chunk(ranks)]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_sharded(
    model: nn.Module,
    optimizer_of: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    rank: int,
    ranks: int,
    steps: int,
) -> list[float]:
    """Training on this rank's part of each batch; the mean loss over the ranks."""
    optimizer = optimizer_of(model.parameters())
    losses = []
    device = next(model.parameters()).device.type
    for step in range(steps):
        loss = loss_of(model, batch(device, step, ranks).chunk(ranks)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same_params(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            full(param.detach()), expected[name].detach(), msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )


def assert_same_grads(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    """Equal gradients by name, None where the reference has None."""
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        theirs = expected[name].grad
        assert (param.grad is None) == (theirs is None), f"{name}: grad is None on one side"
        if theirs is not None:
            torch.testing.assert_close(
                full(param.grad), theirs, msg=lambda m, n=name: f"{n}: {m}", **tolerance
            )


def shard(model: nn.Module, **options: object) -> nn.Module:
    """Each block and the root."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@contextmanager
def counting_gathers(calls: list[str]) -> Iterator[None]:
    """Note each all-gather of a group, as profilers and tests intercept it: by name, at call time."""
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(dist, name)

    def counted(*args: object, **kwargs: object) -> object:
        calls.append(name)
        return original(*args, **kwargs)

    setattr(dist, name, counted)
    try:
        yield
    finally:
        setattr(dist, name, original)


def clone(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)
