"""Libraries that call torch's ``fully_shard`` call ours instead, for the time of a ``with`` block."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch import nn

from ragged_fsdp.api import fully_shard
from ragged_fsdp.policy import Granularity

__all__ = ["ragged_fully_shard"]


@contextmanager
def ragged_fully_shard(
    orig_param_policy: Callable[[str, nn.Parameter], Granularity | None] | None = None,
) -> Iterator[None]:
    """Inside, ``torch.distributed.fsdp.fully_shard`` is ours, with this granularity policy.

    It reaches code that looks the function up when it shards, as Accelerate and the Transformers
    ``Trainer`` do; a module that imported it by name earlier keeps torch's. Models sharded inside stay
    ragged after the block.
    """
    original = torch_fsdp.fully_shard

    @functools.wraps(fully_shard)
    def substitute(module: Any, **options: Any) -> Any:
        options.setdefault("orig_param_policy", orig_param_policy)
        if options.get("offload_policy") is None:
            options.pop("offload_policy", None)  # Accelerate passes None where torch wants a policy
        return fully_shard(module, **options)

    substitute.state = fully_shard.state  # type: ignore[attr-defined]
    torch_fsdp.fully_shard = substitute  # type: ignore[assignment]
    try:
        yield
    finally:
        torch_fsdp.fully_shard = original
