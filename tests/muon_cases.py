"""Parameters, placements and gradients for the tests of Muon and of the exchange, the same on every rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ragged_fsdp.dtensor import RaggedShard, StridedRaggedShard
from ragged_fsdp.dtensor import distribute_tensor as collective_distribute_tensor
from ragged_fsdp.optim.exchange.matrices import Fused
from ragged_fsdp.torch_internals import StridedShard

SHAPES = {
    "layers.0.up.weight": (24, 40),
    "layers.0.down.weight": (40, 24),
    "layers.0.odd.weight": (7, 13),
    "layers.0.square.weight": (16, 16),
    "layers.0.qkv.weight": (36, 16),
    "layers.0.experts": (5, 12, 20),
    "layers.0.experts_gate_up": (4, 10, 16),
    "layers.0.norm.weight": (17,),
    "embed_tokens.weight": (11, 6),
}


def split(name: str | None, parameter: Tensor) -> Fused | None:
    """Three projections stacked by rows with unequal sizes; gate and up interleaved by columns."""
    if name == "layers.0.qkv.weight":
        return Fused(-2, (20, 8, 8))
    if name == "layers.0.experts_gate_up":
        return Fused(-1, (8, 8), interleaved=True)
    return None


def full_tensors(seed: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Values that depend on the seed and the name only."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def uneven_units(numel: int, ranks: int, block: int) -> tuple[int, ...]:
    """Blocks per rank: rank 0 has most, the last but one has nothing (if there are three or more)."""
    blocks = numel // block
    units = [blocks // (2 * ranks)] * ranks
    if ranks > 2:
        units[-2] = 0
    units[0] += blocks - sum(units)
    return tuple(units)


def distribute_tensor(full: Tensor, mesh, placements) -> DTensor:
    """Every rank has the full values, so nothing is sent."""
    return collective_distribute_tensor(full, mesh, placements, src_data_rank=None)


def place(full: Tensor, mesh, kind: str) -> DTensor:
    """A parameter under one of the layouts of ``PLACINGS``."""
    return PLACINGS[kind](full.to(mesh.device_type), mesh)


def _ragged(full: Tensor, mesh) -> DTensor:
    units = uneven_units(full.numel(), mesh.size(0), 1)
    return distribute_tensor(full, mesh, [RaggedShard(range(full.ndim), units)])


def _ragged_rows(full: Tensor, mesh) -> DTensor:
    units = uneven_units(full.shape[0], mesh.size(0), 1)
    return distribute_tensor(full, mesh, [RaggedShard((0,), units), *[Replicate()] * (mesh.ndim - 1)])


def _hsdp_ragged(full: Tensor, mesh) -> DTensor:
    units = uneven_units(full.numel(), mesh.size(1), 1)
    return distribute_tensor(full, mesh, [Replicate(), RaggedShard(range(full.ndim), units)])


def _ragged_tp(full: Tensor, mesh) -> DTensor:
    """Columns over the inner dim where they can be, rows over the outer one."""
    if full.ndim < 2 or full.shape[-1] % 2:
        return distribute_tensor(full, mesh, [RaggedShard((0,), (full.shape[0], 0)), Replicate()])
    units = uneven_units(full.numel() // full.shape[-1], mesh.size(0), 1)
    return distribute_tensor(full, mesh, [RaggedShard(range(full.ndim - 1), units), Shard(full.ndim - 1)])


def _ragged_ep(full: Tensor, mesh) -> DTensor:
    """Experts over the inner dim, the elements of a part of them over the outer one."""
    if full.ndim < 3:
        return _ragged_rows(full, mesh)
    parts = -(-full.shape[0] // 2), full.shape[0] // 2
    units = tuple(uneven_units(n * full.shape[1] * full.shape[2], mesh.size(0), 1) for n in parts)
    return distribute_tensor(full, mesh, [StridedRaggedShard(range(full.ndim), units), Shard(0)])


def _strided_ep(full: Tensor, mesh) -> DTensor:
    """Experts over the inner dim, then over the outer one: what FSDP2 makes of expert-parallel parameters."""
    if full.ndim < 3:
        return distribute_tensor(full, mesh, [Shard(0), Replicate()])
    shards, experts = mesh.get_coordinate()
    pieces = [list(part.chunk(2)) for part in full.chunk(2)]
    local = pieces[experts][shards] if shards < len(pieces[experts]) else full[:0]
    placements = [StridedShard(0, split_factor=2), Shard(0)]
    local = local.clone()  # torch cannot copy a DTensor whose part does not begin its storage
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


PLACINGS = {
    "ragged": _ragged,
    "ragged_rows": _ragged_rows,
    "shard0": lambda full, mesh: distribute_tensor(full, mesh, [Shard(0)]),
    "shard_last": lambda full, mesh: distribute_tensor(full, mesh, [Shard(full.ndim - 1)]),
    "replicate": lambda full, mesh: distribute_tensor(full, mesh, [Replicate()]),
    "hsdp_shard0": lambda full, mesh: distribute_tensor(full, mesh, [Replicate(), Shard(0)]),
    "hsdp_ragged": _hsdp_ragged,
    "ragged_tp": _ragged_tp,
    "ragged_ep": _ragged_ep,
    "strided_ep": _strided_ep,
}


def local(tensor: Tensor) -> Tensor:
    """The contiguous memory that a rank has of a parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a parameter or a state."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
