"""What sharding leaves out, named before it trains wrong: parameters of no group, optimizers of old ones.

A parameter that is attached after ``fully_shard``, such as an adapter, is in no group: nobody reduces its
gradient, and each rank trains a copy of its own. An optimizer that was made before ``fully_shard`` holds the
parameters that it replaced: it steps tensors that no module uses any more. One that was made while a module
was gathered, as the root is after a forward, holds what is freed at the next reshard. By themselves none of
these would raise. Nor would a forward with weights that were gathered before an optimizer step: a step is
counted as a write of its parameters, as torch counts other writes, and such weights are gathered again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ragged_fsdp.torch_internals import disable_dynamo, get_registry

__all__ = [
    "MANAGED_ATTRIBUTE",
    "check_managed",
    "note_current",
    "note_gathered",
    "note_replaced",
    "unmanaged",
    "warn_half_precision",
]

logger = logging.getLogger("ragged_fsdp")
MANAGED_ATTRIBUTE = "_ragged_fsdp_managed"
_REPLACED_ATTRIBUTE = "_ragged_fsdp_replaced"
_GATHERED_ATTRIBUTE = "_ragged_fsdp_gathered"
_MISTAKES = {
    _REPLACED_ATTRIBUTE: "parameters that the model does not use any more: {}. Make the optimizer after "
    "fully_shard, and again after replacing parameters.",
    _GATHERED_ATTRIBUTE: "the gathered form of {}: it was made while the module was gathered, as the root is "
    "after a forward. Call model.reshard(), then make it.",
}
"""By the attribute of a parameter that an optimizer must not hold: what is wrong, and what to do."""
_NAMED = 8  # parameters that an error names; an adapter has hundreds
_CHECKED: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""Optimizers that have made a step since a parameter was last replaced, and how many they held then."""
_WATCHES: list[Any] = []
_WARNED: list[str] = []


def unmanaged(
    module: nn.Module, places: Collection[tuple[nn.Module, str]], ignored: Collection[nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters below ``module`` that no call manages, ignores, or leaves to ``replicate``.

    ``places`` are where managed ones are registered: what a user put there is taken over as one.
    """
    replicated: set[nn.Module] = set()
    for child in module.modules():
        if "replicate" in (get_registry(child) or {}):
            replicated.update(child.modules())
    for prefix, child in module.named_modules():
        if child in replicated:
            continue
        for name, param in child.named_parameters(prefix, recurse=False):
            known = (child, name.rpartition(".")[2]) in places or hasattr(param, MANAGED_ATTRIBUTE)
            if not known and param not in ignored:
                yield name, param


def check_managed(
    module: nn.Module, places: Collection[tuple[nn.Module, str]], ignored: Collection[nn.Parameter]
) -> None:
    """Raise if a parameter that trains belongs to no group."""
    names = [name for name, param in unmanaged(module, places, ignored) if param.requires_grad]
    if names:
        raise ValueError(
            f"{_listed(names)}: trainable, below a module that fully_shard has sharded, and in no group: "
            "each rank would train its own copy. Attach parameters before fully_shard, call "
            "ragged_fsdp.adopt_parameters(model) after it, or name them in ignored_params."
        )


def note_replaced(param: nn.Parameter, name: str) -> None:
    """Remember that the model uses another tensor than ``param``: an optimizer that steps it is refused."""
    if not _WATCHES:
        _WATCHES.append(register_optimizer_step_pre_hook(_check_optimizer))
        _WATCHES.append(register_optimizer_step_post_hook(_count_step))
    setattr(param, _REPLACED_ATTRIBUTE, name)
    _CHECKED.clear()


def note_current(param: torch.Tensor) -> None:
    """The model uses ``param`` again."""
    if hasattr(param, _REPLACED_ATTRIBUTE):
        delattr(param, _REPLACED_ATTRIBUTE)


def note_gathered(param: torch.Tensor, name: str) -> None:
    """Remember that ``param`` is the gathered form of a parameter: only the sharded form is stepped."""
    setattr(param, _GATHERED_ATTRIBUTE, name)


@disable_dynamo
def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before a step: raise if the optimizer holds parameters that were replaced, or their gathered form."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _CHECKED.get(optimizer) == count:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for attribute, mistake in _MISTAKES.items():
        names = [getattr(param, attribute) for param in params if hasattr(param, attribute)]
        if names:
            raise RuntimeError(f"{type(optimizer).__name__} holds {mistake.format(_listed(names))}")
    _CHECKED[optimizer] = count


@disable_dynamo
def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """After a step: count a write to each parameter, also where torch does not.

    Torch counts neither ops on lists of DTensors nor kernels on their local tensors, and a rank writes only
    what it holds; but all ranks must find the same weights old.
    """
    params = (param for group in optimizer.param_groups for param in group["params"])
    increment_version([param for param in params if hasattr(param, MANAGED_ATTRIBUTE)])


def warn_half_precision(params: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Say once that optimizer steps will be rounded: trainable main weights have 16 bits."""
    half = (torch.bfloat16, torch.float16)
    names = [name for name, param in params if param.requires_grad and param.dtype in half]
    if names and not _WARNED:
        _WARNED.append(names[0])
        logger.warning(
            "fully_shard: the main weights of %s are of 16 bits, and small optimizer steps are lost in them. "
            "Load the model in float32 and pass mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16) "
            "to compute in bf16.",
            _listed(names),
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:_NAMED]) + more
