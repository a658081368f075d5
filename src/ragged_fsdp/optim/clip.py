"""``clip_grad_norm_`` for any mix of ragged, Shard, replicated and plain gradients.

Each gradient adds the p-th power of its local part, once: where it is replicated, only the first replica
counts. The sums then travel together, in one all-reduce of one number per mesh::

    mesh (dp=2, tp=2)      a: [Shard, Shard]      every rank adds its part       \\
                           b: [Shard, Replicate]  ranks with tp = 0 add theirs    >  one all-reduce
    mesh (dp=2)            c: [Ragged]            every rank adds its part           one more
    no mesh                d: a plain tensor      every rank adds all of it          none

An all-reduce spans the mesh dims along which some gradient of the mesh is cut; where they are several and
do not make up the world, there is no group over them and the number is reduced along each in turn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ragged_fsdp.dtensor.geometry import settled_placements
from ragged_fsdp.optim.checks import number
from ragged_fsdp.optim.state import local_part

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that the norm of all of them together is at most ``max_norm``.

    As ``torch.nn.utils.clip_grad_norm_``, with one small all-reduce per mesh; norms of parts are taken in
    fp32 (fp64 for fp64 gradients) and added up in fp64. Call it on every rank with the same parameters;
    ``foreach`` is accepted for compatibility, gradients are always processed in groups.

    Returns:
        The norm before clipping, a plain tensor, the same on every rank.
    """
    norm_type = math.inf if norm_type == "inf" else norm_type  # torch takes it too
    if not number(norm_type) > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type!r}.")
    if not isinstance(max_norm, Tensor) and math.isnan(number(max_norm)):  # a tensor stays on its device
        raise ValueError(f"max_norm must be a number, got {max_norm!r}.")
    norm_type = float(norm_type)
    alone = isinstance(parameters, Tensor) or not isinstance(parameters, Iterable)
    params: list[Any] = [parameters] if alone else list(parameters)
    for param in params:
        if not isinstance(param, Tensor):
            raise TypeError(f"parameters must be tensors, got {param!r} among them.")
    grads = [p.grad for p in params if p.grad is not None]
    total_norm = _total_norm(params, norm_type)
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
            "cannot be clipped. To disable this error and scale by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )
    _scale(grads, (max_norm / (total_norm + 1e-6)).clamp(max=1.0))
    return total_norm


def _total_norm(params: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of all gradients. Meshes are those of the parameters, with or without gradients.

    A rank may have none (an expert that no token reached): it must take part in the sums of the others.
    """
    grads = [_summed(param.grad) for param in params if param.grad is not None]
    wide = any(grad.dtype == torch.float64 for grad in grads)
    device = next((local_part(tensor).device for tensor in [*grads, *params]), torch.device("cpu"))
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {None: []}
    cut: dict[DeviceMesh | None, set[int]] = defaultdict(set)
    for tensor in [*(param for param in params if param.requires_grad), *grads]:
        if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
            by_mesh.setdefault(tensor.device_mesh, [])
            cut[tensor.device_mesh].update(_cut_dims(tensor))
    for grad in grads:
        mesh = grad.device_mesh if isinstance(grad, DTensor) else None
        if mesh in by_mesh:  # not that of other ranks
            by_mesh[mesh].append(grad)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for mesh, of_mesh in by_mesh.items():
        counted = [local_part(grad) for grad in of_mesh if _counts_here(grad, cut[mesh])]
        value = _all_reduced(_power_sum(counted, norm_type, device), mesh, sorted(cut[mesh]), norm_type)
        total = torch.maximum(total, value) if math.isinf(norm_type) else total + value
    norm = total if math.isinf(norm_type) else total ** (1.0 / norm_type)
    return norm.to(torch.float64 if wide else torch.float32)


def _summed(grad: Tensor) -> Tensor:
    """The gradient; of a Partial one, a copy with its parts added up, which alone has a norm."""
    if not isinstance(grad, DTensor) or not any(p.is_partial() for p in grad.placements):
        return grad
    return grad.redistribute(placements=settled_placements(grad.placements))


def _cut_dims(grad: Tensor) -> list[int]:
    """Mesh dims along which ranks hold different parts of the gradient."""
    placements = grad.placements if isinstance(grad, DTensor) else ()
    return [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]


def _counts_here(grad: Tensor, reduced_dims: set[int]) -> bool:
    """Whether this rank adds its part: the first one along dims that are reduced but do not cut it."""
    if not isinstance(grad, DTensor):
        return True
    coordinate = grad.device_mesh.get_coordinate()
    return coordinate is not None and all(
        coordinate[dim] == 0 for dim in reduced_dims.difference(_cut_dims(grad))
    )


def _power_sum(locals_: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p over local parts (their largest magnitude for inf), in fp64: it cannot overflow."""
    norms = [torch.zeros(1, dtype=torch.float64, device=device)]
    for (_, dtype), tensors in _alike(local for local in locals_ if local.numel()).items():
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        norms.append(
            torch.stack(torch._foreach_norm(tensors, norm_type, dtype=wide)).to(device, torch.float64)
        )
    every = torch.cat(norms)
    return every.max() if math.isinf(norm_type) else (every**norm_type).sum()


def _all_reduced(value: Tensor, mesh: DeviceMesh | None, dims: Sequence[int], norm_type: float) -> Tensor:
    """The sum (or maximum) over the ranks along ``dims``."""
    groups = _groups(mesh, dims)
    if mesh is None or not groups:
        return value
    # A maximum may lose a NaN on the way, so it travels as a flag beside the number.
    largest = math.isinf(norm_type)
    message = torch.stack([value.nan_to_num(0.0, math.inf), value.isnan().double()]) if largest else value
    message = message.to(mesh.device_type).clone()
    for group in groups:
        dist.all_reduce(message, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    message = message.to(value.device)
    return torch.where(message[1] > 0, math.nan, message[0]) if largest else message


def _groups(mesh: DeviceMesh | None, dims: Sequence[int]) -> list[dist.ProcessGroup]:
    """One group over all ``dims`` if there is one, else one per dim, to be reduced in turn."""
    if mesh is None:
        return []
    dims = [dim for dim in dims if mesh.size(dim) > 1]
    world = dist.group.WORLD
    if world is not None and len(dims) > 1 and math.prod(mesh.size(d) for d in dims) == world.size():
        return [world]
    return [mesh.get_group(dim) for dim in dims]


def _scale(grads: Sequence[Tensor], factor: Tensor) -> None:
    for (device, _), tensors in _alike(map(local_part, grads)).items():
        torch._foreach_mul_(tensors, factor.to(device))


def _alike(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Tensors by what foreach ops want to be the same."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found
