"""torchtitan: a parallelize function for a model's spec.

torchtitan builds a model on the meta device and hands it to the spec's parallelize function with the
parallel dims of the run. This one shards with :func:`ragged_fsdp.fully_shard`; dims it does not apply
are refused, never passed over.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ragged_fsdp.api import MixedPrecisionPolicy, fully_shard
from ragged_fsdp.policy import Granularity

__all__ = ["parallelize"]

_UNSUPPORTED = ("tp", "pp", "cp", "ep")


def parallelize(
    layers_of: Callable[[Any], Iterable[nn.Module]],
    *,
    orig_param_policy: Callable[[str, nn.Parameter], Granularity | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> Callable[..., nn.Module]:
    """A function ``(model, *, parallel_dims, ...) -> model`` that shards each layer, then the rest.

    ``layers_of`` finds the layers of a model; a dict of modules is taken by its values. Other keyword
    arguments that torchtitan passes (job config, converters) are accepted and not needed.
    """

    def parallelize_fn(model: nn.Module, *, parallel_dims: Any, **options: Any) -> nn.Module:
        for name in _UNSUPPORTED:
            if getattr(parallel_dims, name, 1) > 1:
                raise ValueError(
                    f"parallel_dims.{name} = {getattr(parallel_dims, name)}: this function shards over "
                    "data-parallel dims only; apply the others in a parallelize function of your own"
                )
        common: dict[str, Any] = {
            "mesh": _data_mesh(parallel_dims),
            "orig_param_policy": orig_param_policy,
            "mp_policy": mp_policy or MixedPrecisionPolicy(),
        }
        layers = layers_of(model)
        for layer in layers.values() if isinstance(layers, dict | nn.ModuleDict) else layers:
            fully_shard(layer, **common)
        return fully_shard(model, **common)

    return parallelize_fn


def _data_mesh(parallel_dims: Any) -> Any:
    """The mesh to shard over: with replicas, both dims."""
    names = ["fsdp"] if getattr(parallel_dims, "dp_replicate", 1) == 1 else ["dp_replicate", "fsdp"]
    if hasattr(parallel_dims, "get_mesh"):
        return parallel_dims.get_mesh(names)
    return parallel_dims.world_mesh[tuple(names)]
