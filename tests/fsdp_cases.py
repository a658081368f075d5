"""The zoo of the tests of ``fully_shard``: models, batches, unsharded references, comparisons.

A test builds a model and its reference with :func:`build`, shards the one, runs both on the batches of
:func:`tokens` or :func:`rows`, lets :func:`average_gradients` do for the reference what DDP would, and
compares with :func:`assert_same`. Collectives are counted with ``collective_calls.py``; what cannot be seen
from outside is in ``fsdp_inside.py``. A model that exists to misbehave in one test stays beside that test.

``FSDP_IMPL`` names the module that ``fully_shard`` is taken from (``ragged_fsdp`` unless set), so
that each test can be shown to hold for stock FSDP2 too: ``FSDP_IMPL=torch.distributed.fsdp``.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils import _pytree as pytree

IMPL_NAME = os.environ.get("FSDP_IMPL", "ragged_fsdp")
RAGGED = IMPL_NAME == "ragged_fsdp"
fsdp = importlib.import_module(IMPL_NAME)
fully_shard = fsdp.fully_shard
ragged_only = pytest.mark.skipif(not RAGGED, reason="tests what stock FSDP2 does not have")

VOCAB, DIM, SEQ = 33, 12, 6
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
}


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


class Stack(nn.Module):
    """Residual feed-forward layers, and a linear head that is the root's own; any dims, float inputs."""

    def __init__(self, layers: int = 2, dim: int = DIM, hidden: int = 20) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward(dim, hidden) for _ in range(layers))
        self.head = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Blocked(nn.Module):
    """Matrices of several heights and stacked experts, for blocks and codes; norms have neither."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(wide, 72), nn.Linear(72, wide)
        self.experts = nn.Parameter(torch.randn(3, wide, wide) / wide)
        self.norm = nn.LayerNorm(wide)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + torch.einsum("bd,edk->bk", x, self.experts)


class HalfOnTheWire(torch.Tensor):
    """Holds float32, sends bfloat16 and a scale, computes with what arrives."""

    meshes: list = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, strides=data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data):
        self._data = data

    def __tensor_flatten__(self):
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        return HalfOnTheWire(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._data, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out)

    def __repr__(self):
        return f"HalfOnTheWire({tuple(self.shape)})"

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(module, nn.Linear) and len(outer_stride) == len(outer_size) == 2
        self.meshes.append(mesh)
        half = self._data.to(torch.bfloat16)
        padded = half.new_zeros(-(-outer_size[0] // mesh.size()), outer_size[1])
        padded[: len(half)] = half
        return (padded, torch.ones(1, device=self.device)), "note"

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        half, scales = outputs
        assert metadata == "note" and scales.numel() == self.meshes[-1].size()
        whole = half.to(param_dtype) * scales[0]
        if out is not None:
            with _unsafe_preserve_version_counter(out):
                out.copy_(whole[: len(out)])
            return None
        return whole, (whole,)


class Extended(FeedForward):
    """A feed-forward layer whose matrices decide themselves how they travel."""

    def __init__(self) -> None:
        super().__init__()
        for linear in (self.up, self.down):
            linear.weight = nn.Parameter(HalfOnTheWire(linear.weight.detach()))


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


@dataclass(frozen=True)
class Mode:
    """One way to shard a model on four ranks; ``two_dims`` gives it replicas."""

    factory: Callable[[], nn.Module]
    options: dict[str, Any] = field(default_factory=dict)
    two_dims: bool = False

    def model(self, rank: Any) -> nn.Module:
        """A model sharded in this way."""
        mesh = rank.mesh(2, 2, names=("replicate", "shard")) if self.two_dims else rank.mesh()
        return shard_blocks(build(self.factory, rank.device)[0], mesh=mesh, **self.options)

    def batch(self, rank: Any, step: int) -> Tensor:
        """What the model takes."""
        return (tokens if self.factory is Transformer else rows)(rank, step)


def _even() -> nn.Module:
    return Stack(hidden=24)


def _extended() -> nn.Module:
    model = Stack()
    model.layers[1] = Extended()
    return model


def _tiles(name: str, parameter: nn.Parameter) -> Any:
    from ragged_fsdp import BlockCodes  # not on top: tests wrap torch's functions before the import

    return BlockCodes("int8", (4, 4)) if parameter.ndim == 2 else None


_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
_EXCHANGE = {"reduction": "all_to_all"}
_LEVELS = {"reduction": "two_level", "ranks_per_node": 2}
_LAST_DIM = {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)}
MODES = {  # whatever moves data in a way of its own
    "plain": Mode(Transformer),
    "bf16": Mode(Transformer, {"mp_policy": _BF16}),
    "exchange": Mode(Transformer, _EXCHANGE),
    "exchange of bf16": Mode(Transformer, {"mp_policy": _BF16, **_EXCHANGE}),
    "two levels": Mode(Transformer, _LEVELS),
    "two levels of bf16": Mode(Transformer, {"mp_policy": _BF16, **_LEVELS}),
    "replicas": Mode(Transformer, two_dims=True),
    "replicas and exchange": Mode(Transformer, _EXCHANGE, two_dims=True),
    "larger shards": Mode(Transformer, {"reshard_after_forward": 2}),
    "kept": Mode(Transformer, {"reshard_after_forward": False}),
    "offload": Mode(Transformer, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "Shard(0)": Mode(Stack, {"shard_placement_fn": lambda parameter: Shard(0)}),
    "Shard(dim)": Mode(_even, _LAST_DIM),
    "Shard(dim) and exchange": Mode(_even, {**_LAST_DIM, **_EXCHANGE}),
    "codes": Mode(Stack, {"gather_policy": _tiles}),
    "codes and exchange": Mode(Stack, {"gather_policy": _tiles, **_EXCHANGE}),
    "extensions": Mode(_extended),
}


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


def placed_on(mesh: DeviceMesh) -> Any:
    """What ``shard_placement_fn`` answers for a parameter that is sharded over ``mesh``."""
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("this torch has no ShardPlacementResult")
    return common.ShardPlacementResult(Shard(0), common.FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0))


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


def backward_through(
    reference: nn.Module,
    weights: Mapping[str, Tensor],
    batch: Tensor,
    loss_of: Callable[[Tensor], Tensor] = torch.sum,
) -> Tensor:
    """The loss of ``reference`` computed with other ``weights``, by name.

    Their gradients are added to those of the reference's own parameters, in the parameters' dtype.
    """
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    loss = loss_of(torch.func.functional_call(reference, leaves, (batch,)))
    loss.backward()
    for name, parameter in reference.named_parameters():
        if (gradient := leaves[name].grad) is not None:
            before = 0 if parameter.grad is None else parameter.grad
            parameter.grad = gradient.to(parameter.dtype) + before
    return loss.detach()


def in_dtype(reference: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The parameters of ``reference`` as mixed precision computes with them, by name."""
    return {name: parameter.detach().to(dtype) for name, parameter in reference.named_parameters()}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rank: Any,
    steps: Iterable[int],
    batches: Callable[[Any, int], Tensor] = tokens,
) -> Tensor:
    """Train on a rank's batches of some steps; the losses."""
    losses = []
    for step in steps:
        loss = model(batches(rank, step)).float().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def train_both(
    model: nn.Module,
    reference: nn.Module,
    rank: Any,
    *,
    optimizer: str = "sgd",
    steps: int = 4,
    tolerance: float = 1e-6,
    batches: Callable[[Any, int], Tensor] = tokens,
) -> None:
    """Train both on the same batches; equal losses at each step and equal parameters at the end."""
    optimizers = [OPTIMIZERS[optimizer](module.parameters()) for module in (model, reference)]
    for step in range(steps):
        losses = [module(batches(rank, step)).float().square().sum() for module in (model, reference)]
        torch.testing.assert_close(*losses, rtol=max(tolerance, 1e-6), atol=0)
        for loss in losses:
            loss.backward()
        average_gradients(reference)
        for each in optimizers:
            each.step()
            each.zero_grad()
    assert_same(model, reference, tolerance=tolerance)


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
    ours = ours.to(theirs.device)  # offloaded ones lie on the host
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


@contextmanager
def logged(level: int | None = None) -> Iterator[list[str]]:
    """What this package logs within it, from ``level`` on; by default what it always logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("ragged_fsdp")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(before if level is None else level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class GatheredMemory:
    """The memory of the weights that modules compute with: what is allocated of it, at any later time.

    A sharded module's parameters are noted at its forward, when the gathered ones are registered.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._storages: dict[nn.Module, dict[int, torch.UntypedStorage]] = {module: {} for module in modules}
        for module in modules:
            module.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor):
                storage = parameter.untyped_storage()
                self._storages[module][storage._cdata] = storage

    def was_used(self, module: nn.Module) -> bool:
        """Whether the module has had a forward, without which its memory is not known."""
        return bool(self._storages[module])

    def nbytes(self, module: nn.Module) -> int:
        """Bytes that are allocated now."""
        assert self._storages[module], "the module has had no forward"
        return sum(storage.nbytes() for storage in self._storages[module].values())


def is_sharded(parameters: Iterable[nn.Parameter]) -> bool:
    """True if all are DTensors, False if none is; mixed is an error."""
    kinds = {isinstance(p, DTensor) for p in parameters}
    assert len(kinds) == 1, "sharded and unsharded parameters are mixed"
    return kinds.pop()
