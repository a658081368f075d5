"""The gradients of a rank in one flat buffer per group, in which they are averaged over replicas.

The gradients themselves stay as they are until the average is certain: when a replica dies in the middle,
what the others computed is still there and is averaged again over those that are left. The price is a second
copy of this rank's gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ragged_fsdp.fsdp.runtime.module import reshard_all
from ragged_fsdp.fsdp.runtime.state import states_below
from ragged_fsdp.optim.state import local_part, state_like

__all__ = ["ReplicaGradients"]


@dataclass(frozen=True)
class _Bucket:
    """Parameters of one group with one dtype and device, and their gradients behind each other."""

    indices: tuple[int, ...]
    flat: Tensor
    parts: tuple[Tensor, ...]


class ReplicaGradients:
    """Flat copies of the gradients of ``model``'s parameters.

    A gradient that this replica has not and another has counts as zero here; one that none has becomes None.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard_all(model)
        self._params = list(model.parameters())
        self._group_of: dict[int, int] = {}
        """By the id of a parameter; those in no group are together."""
        groups = (group for state in states_below(model) for group in state.groups)
        for number, group in enumerate(groups):
            self._group_of |= {id(param.sharded): number for param in group.params}
        self._laid_out: list[tuple[bool, torch.Size]] | None = None
        """What was trained, and in which shapes, when the buffers were made."""
        self._buckets: list[_Bucket] = []
        self.times_laid_out = 0
        """Grows when parameters are frozen or trained again, or experts move to other ranks."""

    @torch.no_grad()
    def collect(self) -> tuple[Tensor, list[Tensor]]:
        """Copy the gradients; returns which there are, to be added up, and the buffers, to be averaged."""
        now = [(param.requires_grad, local_part(param).shape) for param in self._params]
        if now != self._laid_out:
            self._laid_out, self._buckets = now, self._lay_out()
            self.times_laid_out += 1
        for bucket in self._buckets:
            grads = [self._params[index].grad for index in bucket.indices]
            if any(grad is None for grad in grads):
                bucket.flat.zero_()
            there = [(part, local_part(g)) for part, g in zip(bucket.parts, grads) if g is not None]
            if there:
                torch._foreach_copy_([part for part, _ in there], [grad for _, grad in there])
        # that of what trains, though a rank may hold nothing of it, and takes part all the same
        first = next((param for param in self._params if param.requires_grad), self._params[0])
        device = local_part(first).device
        present = [param.grad is not None for param in self._params]
        return torch.tensor(present, dtype=torch.int64, device=device), [b.flat for b in self._buckets]

    @torch.no_grad()
    def hand_over(self, present: Tensor) -> None:
        """Let the gradients be what the buffers hold; ``present`` counts the replicas that have each.

        One that this replica has and did not contribute, and no other has, goes: with zeros the optimizer
        would decay what it leaves alone elsewhere.
        """
        counts = present.tolist()
        for param, count in zip(self._params, counts):
            if not count:
                param.grad = None
        for bucket in self._buckets:
            targets, sources = [], []
            for index, part in zip(bucket.indices, bucket.parts):
                param = self._params[index]
                if param.grad is not None:
                    targets.append(local_part(param.grad))
                    sources.append(part)
                elif counts[index]:
                    param.grad = state_like(param, part.clone())
            if targets:
                torch._foreach_copy_(targets, sources)
        for index, param in enumerate(self._params):  # empty on this rank, so in no bucket
            if param.grad is None and counts[index] and not local_part(param).numel():
                param.grad = state_like(param, torch.empty_like(local_part(param)))

    def _lay_out(self) -> list[_Bucket]:
        members: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
        for index, param in enumerate(self._params):
            local = local_part(param)
            if param.requires_grad and local.numel():
                key = (self._group_of.get(id(param), -1), param.dtype, local.device)
                members.setdefault(key, []).append(index)
        return [self._bucket(key[1], key[2], indices) for key, indices in members.items()]

    def _bucket(self, dtype: torch.dtype, device: torch.device, indices: Sequence[int]) -> _Bucket:
        locals_ = [local_part(self._params[index].detach()) for index in indices]
        flat = torch.empty(sum(local.numel() for local in locals_), dtype=dtype, device=device)
        parts = flat.split([local.numel() for local in locals_])
        return _Bucket(
            tuple(indices), flat, tuple(part.view(local.shape) for part, local in zip(parts, locals_))
        )
