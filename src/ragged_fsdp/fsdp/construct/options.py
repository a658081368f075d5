"""The arguments of one ``fully_shard`` call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

__all__ = ["Options"]

_REDUCTIONS = ("reduce_scatter", "all_to_all")
_SAME_ON_ALL_RANKS = (
    "reduction",
    "reshard_after_forward",
    "gathered_budget_bytes",
    "max_buffers",
    "mp_policy",
)


@dataclass(frozen=True)
class Options:
    """The arguments of ``fully_shard``."""

    reshard_after_forward: bool | int | str | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: frozenset[nn.Parameter]
    orig_param_policy: Callable[[str, nn.Parameter], Any] | None
    reduction: str = "reduce_scatter"
    gathered_budget_bytes: int | None = None
    max_buffers: int = 1
    gather_policy: Callable[[str, nn.Parameter], Any] | None = None

    def check_types(self) -> None:
        """Raise on an argument of the wrong type, naming it."""
        expected: dict[str, type] = {
            "mp_policy": MixedPrecisionPolicy,
            "offload_policy": OffloadPolicy,
        }
        for name, kind in expected.items():
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"fully_shard: {name} must be of the class {kind.__name__}, got {getattr(self, name)!r}."
                )
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self.mp_policy, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"fully_shard: mp_policy.{name} must be a floating torch.dtype or None, got {dtype!r}."
                )
        if self.reduction not in _REDUCTIONS:
            raise ValueError(f"fully_shard: reduction must be one of {_REDUCTIONS}, got {self.reduction!r}.")
        if (
            not isinstance(self.max_buffers, int)
            or isinstance(self.max_buffers, bool)
            or self.max_buffers < 1
        ):
            raise ValueError(f"fully_shard: max_buffers must be an int >= 1, got {self.max_buffers!r}.")
        for name in ("shard_placement_fn", "orig_param_policy", "gather_policy"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"fully_shard: {name} must be callable, got {getattr(self, name)!r}.")

    @staticmethod
    def ignored_set(given: Any) -> frozenset[nn.Parameter]:
        """What was given as ``ignored_params``; raise unless it is a collection of parameters."""
        if given is None:
            return frozenset()
        if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
            kind = type(given).__name__
            raise TypeError(f"fully_shard: ignored_params must be a set of parameters, got a {kind}.")
        params = list(given)
        for param in params:
            if not isinstance(param, nn.Parameter):
                raise TypeError(
                    f"fully_shard: ignored_params must be a set of parameters, got {param!r} in it."
                )
        return frozenset(params)

    @property
    def description(self) -> str:
        """One line per argument that decides which collectives run: what ranks must agree on."""
        return "\n".join(f"{name}={getattr(self, name)}" for name in _SAME_ON_ALL_RANKS)
