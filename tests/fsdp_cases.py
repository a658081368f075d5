"""Models, references and comparisons that the tests of ``fully_shard`` share.

``FSDP_IMPL`` names the module that ``fully_shard`` is taken from (``ragged_fsdp`` unless set), so
that each test can be shown to hold for stock FSDP2 too: ``FSDP_IMPL=torch.distributed.fsdp``.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

IMPL_NAME = os.environ.get("FSDP_IMPL", "ragged_fsdp")
RAGGED = IMPL_NAME == "ragged_fsdp"
fsdp = importlib.import_module(IMPL_NAME)
fully_shard = fsdp.fully_shard
ragged_only = pytest.mark.skipif(not RAGGED, reason="tests what stock FSDP2 does not have")

VOCAB, DIM, SEQ = 33, 12, 6


class Attention(nn.Module):
    """Causal self-attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM, bias=False)  # a key bias has no gradient but noise
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A plain two-layer MLP whose width no world size divides."""

    def __init__(self, dim: int = DIM, hidden: int = 23) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """Three experts in 3-D parameters, two of them used per token."""

    def __init__(self, experts: int = 3, hidden: int = 10) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, DIM, hidden) / DIM**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, DIM) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        kept = torch.zeros_like(weights).scatter(-1, weights.topk(2, dim=-1).indices, 1.0)
        per_expert = F.silu(torch.einsum("btd,edh->bteh", x, self.up))
        outputs = torch.einsum("bteh,ehd->bted", per_expert, self.down)
        return (outputs * (weights * kept).unsqueeze(-1)).sum(-2)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, *, moe: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.mlp = Experts() if moe else FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model small enough for hundreds of tests; returns the loss."""

    def __init__(self, *, moe: bool = False, layers: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(moe=moe) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(factory: Callable[[], nn.Module], device: str, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Two models with equal values on every rank: the one to shard and its unsharded reference."""
    torch.manual_seed(seed)
    model = factory().to(device)
    return model, copy.deepcopy(model)


def shard_blocks(model: nn.Module, **kwargs: Any) -> nn.Module:
    """``fully_shard`` on each layer and on the root, as users do."""
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def linear_on_a_full_mesh(rank: Any, **options: Any) -> tuple[nn.Module, nn.Module, DeviceMesh]:
    """A tensor-parallel layer on a 2 x 2 mesh, sharded over its ``dp``; the reference; the mesh."""
    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        pytest.skip("this torch has no DataParallelMeshDims")
    mesh = rank.mesh(2, 2, names=("dp", "tp"))
    model, reference = build(lambda: nn.Linear(DIM, 8, bias=False), rank.device)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)]))
    mesh = model.weight.device_mesh  # torch may have cached an equal one, and compares by identity
    fully_shard(model, mesh=mesh, dp_mesh_dims=fsdp.DataParallelMeshDims(shard="dp"), **options)
    return model, reference, mesh


def tokens(rank: Any, step: int, batch: int = 2) -> Tensor:
    """A batch of its own for each rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank.rank)
    return torch.randint(0, VOCAB, (batch, SEQ + 1), generator=generator).to(rank.device)


def rows(rank: Any, step: int, dim: int = DIM, batch: int = 3) -> Tensor:
    """Float inputs of its own for each rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank.rank)
    return torch.randn(batch, dim, generator=generator).to(rank.device)


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """What DDP does: the mean of the gradients over the ranks."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(dist.get_world_size(group))


def backward_both(
    model: nn.Module, reference: nn.Module, batch: Tensor, group: dist.ProcessGroup | None = None
) -> None:
    """Fresh gradients of the sharded model and of its reference, which averages them as DDP does."""
    for module in (model, reference):
        module.zero_grad()
        module(batch).sum().backward()
    average_gradients(reference, group)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered if it is distributed."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)).item()


def assert_same(
    model: nn.Module, reference: nn.Module, *, tolerance: float = 0.0, grads: bool = False, wrapper: str = ""
) -> None:
    """Parameters (and gradients) equal the reference's, by name; bitwise if ``tolerance`` is zero.

    ``wrapper`` is what wrapping modules add to the names of ``model``.
    """
    theirs = dict(reference.named_parameters())
    ours = {name.replace(wrapper, ""): parameter for name, parameter in model.named_parameters()}
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        _compare(name, full(parameter), theirs[name].detach(), tolerance)
        if grads:
            assert (parameter.grad is None) == (theirs[name].grad is None), (
                f"{name}: grad is None on one side"
            )
            if parameter.grad is not None:
                _compare(f"{name}.grad", full(parameter.grad), theirs[name].grad, tolerance)


def _compare(name: str, ours: Tensor, theirs: Tensor, tolerance: float) -> None:
    assert ours.shape == theirs.shape, name
    if tolerance == 0.0:
        assert torch.equal(ours, theirs), f"{name}: differs by {relative_error(ours, theirs):.2e}"
    else:
        assert relative_error(ours, theirs) <= tolerance, f"{name}: {relative_error(ours, theirs):.2e}"


def assert_steps_agree(
    model: nn.Module,
    reference: nn.Module,
    rank: Any,
    steps: int = 2,
    tolerance: float = 1e-6,
    wrapper: str = "",
) -> None:
    """Gradients of some steps equal those of the reference on the tokens of all ranks."""
    for step in range(steps):
        backward_both(model, reference, tokens(rank, step))
        assert_same(model, reference, tolerance=tolerance, grads=True, wrapper=wrapper)


class _Counter(TorchDispatchMode):
    """Counts c10d operators; unlike ``CommDebugMode`` it survives recomputation in a backward."""

    KINDS = {  # noqa: RUF012
        "_allgather_base_": "gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # desugar first: count what really runs
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            name = func.__name__.split(".")[0]
            self.counts[self.KINDS.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def count(fn: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Run ``fn`` and count the collectives by kind."""
    with _Counter() as counter:
        result = fn()
    return result, dict(counter.counts)


def is_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    """True if all are DTensors, False if none is; mixed is an error."""
    kinds = {isinstance(p, DTensor) for p in parameters}
    assert len(kinds) == 1, "sharded and unsharded parameters are mixed"
    return kinds.pop()
