"""Parameters that all experts of a layer use: each rank's experts give them a part of the gradient.

They stay whole on every rank that experts are spread over, such as the norm behind the experts of
Muse Spark. A rank applies them to the rows of its own experts, which are rows of all ranks' tokens. So what
it finds is a part of the sum that one process would find. A call of ``fully_shard`` on the experts reduces
over ranks that hold the same experts: without the other parts the ranks would train apart. Here the parts are
added up, so that these gradients are sums over the ranks as those of experts are. Whoever reduces over all
ranks (a call further up, DDP) adds the parts up too, so there it is left to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ragged_fsdp.experts.layers import expert_parameters

__all__ = ["CommonParameters"]


class CommonParameters:
    """The parameters of a module of experts that have no entry per expert.

    Args:
        module: the experts.
        group: the ranks that experts are spread over.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group
        own = expert_parameters(module)
        self._places = [
            (owner, name, _below(module, path))
            for path, owner in module.named_modules()
            for name, _ in owner.named_parameters(recurse=False)
            if owner is not module or name not in own
        ]

    @contextmanager
    def added_up(self) -> Iterator[None]:
        """Within it the module computes with tensors whose gradients are added up over the ranks."""
        found = []
        if isinstance(self._module, FSDPModule) and self._group.size() > 1 and torch.is_grad_enabled():
            found = [
                (owner, name)
                for owner, name, below in self._places
                if getattr(owner, name).requires_grad and self._is_gathered_here(owner, name, below)
            ]
        if not found:
            yield
            return
        parameters = (getattr(owner, name) for owner, name in found)
        try:
            for (owner, name), tensor in zip(found, _AddUp.apply(self._group, *parameters)):
                owner.__dict__[name] = tensor  # found before the parameter, which stays registered
            yield
        finally:
            for owner, name in found:
                owner.__dict__.pop(name, None)

    def _is_gathered_here(self, owner: nn.Module, name: str, below: Sequence[nn.Module]) -> bool:
        """Whether the call of the experts manages a parameter; raise if another leaves each rank a part.

        What has a call of its own is not gathered yet: only that call can reduce it over all ranks.
        """
        calls = [module._get_fsdp_state() for module in below if isinstance(module, FSDPModule)]
        if not calls or calls[-1] is self._module._get_fsdp_state():  # type: ignore[union-attr, operator]
            return True
        param = getattr(owner, name)
        if isinstance(param, DTensor):
            ranks = set(param.device_mesh.mesh.flatten().tolist())
            spread = dist.get_process_group_ranks(self._group)
            if not ranks.issuperset(spread):
                path = next(path for path, module in self._module.named_modules() if module is owner)
                raise ValueError(
                    f"{type(self._module).__name__}: {path}.{name} is shared by the experts on ranks "
                    f"{spread}, but its own call of fully_shard is over ranks {sorted(ranks)}: each would "
                    "train with a part of its gradient. Shard it over a mesh of all these ranks, or by the "
                    "call of the experts."
                )
        return False


def _below(module: nn.Module, path: str) -> list[nn.Module]:
    """The modules on the way from ``module``, which is not among them, to the one at ``path``."""
    names = path.split(".") if path else []
    return [module.get_submodule(".".join(names[: end + 1])) for end in range(len(names))]


class _AddUp(torch.autograd.Function):
    """The tensors themselves; backward adds up the gradients that the ranks have for them."""

    @staticmethod
    def forward(ctx: Any, group: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        made = []
        for grad in grads:  # sums of many ranks lose too much in half precision
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = grad.to(wide, copy=True, memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=ctx.group)
            made.append(total.to(grad.dtype))
        return (None, *made)
