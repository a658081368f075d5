"""torchtitan: a model's own parallelize function, sharding with :func:`ragged_fsdp.fully_shard`.

torchtitan hands a model on the meta device to the ``parallelize_fn`` of its spec, which applies tensor,
context and expert parallelism, checkpointing and compilation, and then torch's ``fully_shard``. Only the last
is changed.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ragged_fsdp.integrations.substitute import ragged_fully_shard
from ragged_fsdp.policy import Granularity

__all__ = ["ragged_parallelize"]


def ragged_parallelize(
    parallelize_fn: Callable[..., Any],
    orig_param_policy: Callable[[str, nn.Parameter], Granularity | None] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """``parallelize_fn`` of a torchtitan model spec, with ragged parameters.

    Args:
        parallelize_fn: torchtitan's function for the model, such as ``parallelize_llama``.
        orig_param_policy: ``policy(name, parameter)``, the granularity of each parameter; names are relative
            to the module that torchtitan shards (a block, the head, the model).
        options: as in :func:`~ragged_fsdp.integrations.substitute.ragged_fully_shard`.

    Example::

        spec = model_registry("8B")
        spec.parallelize_fn = ragged_parallelize(spec.parallelize_fn, policy)
    """

    @functools.wraps(parallelize_fn)
    def parallelize(*arguments: Any, **keywords: Any) -> Any:
        with ragged_fully_shard(orig_param_policy, **options):
            return parallelize_fn(*arguments, **keywords)

    return parallelize
