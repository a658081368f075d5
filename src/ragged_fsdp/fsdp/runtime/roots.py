"""What a root looks at when it takes over the groups below it: their names, and what they cannot be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ragged_fsdp.fsdp.runtime.group import ParamGroup
from ragged_fsdp.fsdp.runtime.turns import Turn

__all__ = ["check_dense", "check_shared", "find_companions", "name_groups", "outside"]

_COMPANION_SHARE = 4  # of the gradients of a module's largest group a companion has at most one in so many


def outside(turns: Sequence[Turn]) -> tuple[set[tuple[nn.Module, str]], set[nn.Parameter]]:
    """Where the parameters of all groups are registered, and those that calls were told to leave alone."""
    params = (param for turn in turns for group in turn.groups for param in group.params)
    places = {(place.module, place.attribute) for param in params for place in param.places}
    return places, {param for turn in turns for param in turn.ignored}


def name_groups(groups: Sequence[ParamGroup], module: nn.Module) -> None:
    """Name groups and their parameters as they are found below ``module``, the root's."""
    by_param = {param.sharded: param for group in groups for param in group.params}
    for name, registered in module.named_parameters():
        if registered in by_param:
            by_param[registered].fqn = name
    names = {owner: name for name, owner in module.named_modules()}
    for group in groups:
        group.name_after(", ".join(names[owner] for owner in group.modules if owner in names))


def check_shared(groups: Sequence[ParamGroup]) -> None:
    """Raise if two groups have the same parameter: each would reduce a part of its gradient."""
    seen: set[object] = set()
    for group in groups:
        for param in group.params:
            if param.identity in seen:
                raise ValueError(
                    f"Parameter '{param.fqn}' is shared with a parameter already managed "
                    "by another FSDP group. For shared/tied parameters, use "
                    "fully_shard([module_a, module_b]) to place them in the same FSDP group."
                )
            seen.add(param.identity)


def find_companions(groups: Sequence[ParamGroup]) -> None:
    """Mark the small groups of a module, by the bytes of their gradients: what a reduction needs beside them
    may differ between ranks, and with it what a reduction waits for."""
    most = max((group.reducer.grad_bytes for group in groups), default=0)
    for group in groups:
        group.reducer.transport.companion = 0 < group.reducer.grad_bytes * _COMPANION_SHARE <= most


def check_dense(groups: Sequence[ParamGroup]) -> None:
    """Raise on embeddings that will make sparse gradients: a buffer has no place for them."""
    if not torch.is_grad_enabled():
        return
    for param in (param for group in groups for param in group.params):
        owner = param.places[0].module
        if not isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            continue
        if owner.sparse and param.sharded.requires_grad:
            raise NotImplementedError(
                f"{param.fqn}: its embedding has sparse=True, and sparse gradients cannot be "
                "reduced into shards; make it with sparse=False, or freeze it."
            )
