"""Libraries that call torch's ``fully_shard`` call ours instead, for the time of a ``with`` block."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch import nn

from ragged_fsdp.api import fully_shard
from ragged_fsdp.packing import packing_of
from ragged_fsdp.policy import Granularity
from ragged_fsdp.torch_internals import rebind

__all__ = ["ragged_fully_shard"]

_DEFAULTS = ("reduction", "gathered_budget_bytes", "reshard_after_forward", "shard_placement_fn")


@contextmanager
def ragged_fully_shard(
    orig_param_policy: Callable[[str, nn.Parameter], Granularity | None] | None = None, **options: Any
) -> Iterator[list[str]]:
    """Inside, torch's ``fully_shard`` is ours, wherever a loaded module holds it.

    Yields the classes of the modules that were sharded so far. What the library passes (mesh, resharding,
    mixed precision, offload, ignored parameters) is honoured; but frozen weights that are quantised, which
    Accelerate ignores because FSDP2 cannot shard them, are sharded.
    Models sharded inside stay ragged after the block; everything else is then as it was.

    Args:
        orig_param_policy: ``policy(name, parameter)``, the granularity of each parameter.
        options: ``reduction``, ``gathered_budget_bytes``, ``reshard_after_forward`` or
            ``shard_placement_fn`` of :func:`ragged_fsdp.fully_shard`, for calls that do not say otherwise; a
            None that a library passes says nothing.

    Raises:
        TypeError: for any other option; those are the library's to pass.

    Example::

        with ragged_fully_shard(lambda name, p: Rows(32) if p.ndim == 2 else None):
            trainer.train()
    """
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"ragged_fully_shard: {name!r} is not one of {', '.join(_DEFAULTS)}.")
    sharded: list[str] = []
    original, substitute = torch_fsdp.fully_shard, _substitute(orig_param_policy, options, sharded)
    rebind(original, substitute, skip="ragged_fsdp")
    try:
        yield sharded
    finally:
        rebind(substitute, original, skip="ragged_fsdp")


def _substitute(policy: Any, defaults: dict[str, Any], sharded: list[str]) -> Callable[..., Any]:
    @functools.wraps(fully_shard)
    def substitute(module: Any, **options: Any) -> Any:
        if options.get("ignored_params"):  # 4-bit weights are among them, since torch's cannot shard them
            options["ignored_params"] = {p for p in options["ignored_params"] if packing_of(p) is None}
        said = {name: value for name, value in options.items() if value is not None or name not in defaults}
        result = fully_shard(module, **{"orig_param_policy": policy, **defaults, **said})
        sharded.append(type(module).__name__)
        return result

    return substitute
