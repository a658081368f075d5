"""Parameters and gradients shared by the optimizer tests, as plain and as distributed tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate

from ragged_fsdp.dtensor import RaggedShard, distribute_tensor
from ragged_fsdp.optim.blocks import block_grid

SHAPES = {
    "wide": (128, 96),  # tiles divide it
    "odd": (36, 300),  # tiles are 4 x 256, the last one short
    "experts": (4, 64, 40),
    "vector": (5120,),
    "bias": (96,),  # too small for 8 bits
    "lopsided": (192, 64),
}


def plain_parameters(
    device: str, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> dict[str, torch.nn.Parameter]:
    """Unsharded parameters with the same values on every rank."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        for name, shape in shapes.items()
    }


def gradients(step: int, device: str, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    """Gradients of a step, equal on every rank, of very different magnitudes within a tensor."""
    generator = torch.Generator().manual_seed(1000 + step)
    out = {}
    for name, shape in shapes.items():
        values, spread = (torch.randn(shape, generator=generator) for _ in range(2))
        out[name] = (values * torch.exp(2 * spread)).to(device)
    return out


def ragged_units(name: str, shape: Sequence[int], ranks: int, granule_numel: int) -> tuple[int, ...]:
    """Whole granules per rank: uneven, the first rank empty for one tensor, all on the last for another."""
    granules = torch.Size(shape).numel() // granule_numel
    if name == "lopsided":
        return tuple(int(rank == ranks - 1) for rank in range(ranks))
    start = 1 if name == "experts" and ranks > 1 else 0
    holders = list(range(start, ranks))
    units = [0] * ranks
    for granule in range(granules):
        units[holders[min(granule * len(holders) // granules, len(holders) - 1)]] += 1
    return tuple(units)


def ragged_parameters(
    mesh,
    params: dict[str, torch.nn.Parameter],
    block_shape: tuple[int, int] = (32, 32),
    run: int = 256,
    roll: int = 0,
) -> dict[str, torch.nn.Parameter]:
    """The parameters sharded raggedly over the last mesh dim, replicated over the others.

    ``roll`` gives each rank what another held: the same pieces in another layout.
    """
    out = {}
    for name, param in params.items():
        grid = block_grid(tuple(param.shape), block_shape, run)
        granule = grid.granule_numel if param.numel() % grid.granule_numel == 0 else param.numel()
        granule = granule if param.numel() >= 4096 else 1
        units = ragged_units(name, param.shape, mesh.size(mesh.ndim - 1), granule)
        units = units[roll:] + units[:roll]
        dims = tuple(range(max(1, param.ndim - 1)))
        placements = [*[Replicate()] * (mesh.ndim - 1), RaggedShard(dims, units)]
        out[name] = torch.nn.Parameter(distribute_tensor(param.detach(), mesh, placements))
    return out


def set_grads(params: dict[str, torch.nn.Parameter], grads: dict[str, torch.Tensor]) -> None:
    """Give each parameter its (global) gradient in the parameter's own layout."""
    for name, param in params.items():
        grad = grads[name].clone()
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def assert_same_numbers(ours, theirs, names: Sequence[str], equal: Callable = torch.equal) -> None:
    """Parameters and all state of two optimizers over the same names agree."""
    for name, left, right in zip(names, ours.param_groups[0]["params"], theirs.param_groups[0]["params"]):
        assert equal(full(left), full(right)), f"{name} differs"
        assert ours.state[left].keys() == theirs.state[right].keys()
        for key, value in ours.state[left].items():
            other = full(theirs.state[right][key])
            assert full(value).dtype == other.dtype, (name, key)
            assert equal(full(value), other), f"{name}: {key} differs"


def detached_copy(params: dict[str, torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
    """Independent parameters with the same values."""
    return {name: torch.nn.Parameter(copy.deepcopy(p.detach())) for name, p in params.items()}
