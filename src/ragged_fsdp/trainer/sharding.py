"""How a model is spread over the ranks: the one place where the trainer meets ``fully_shard``.

Four ways behind one interface, so that the same run can be compared across them: ``ragged`` (ours),
``fsdp2`` (torch's), ``ddp`` (replicas) and ``none`` (one process).
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ragged_fsdp.experts import (
    AllGather,
    AllToAll,
    Dispatcher,
    ExpertSplit,
    divide_gradients,
    two_level,
)
from ragged_fsdp.fp8 import fp8_training
from ragged_fsdp.fp8 import gather_policy as fp8_codes
from ragged_fsdp.fsdp.construct.network import pick_reduction
from ragged_fsdp.topology import find_levels, given_ranks_per_node
from ragged_fsdp.torch_internals import checkpoint_wrapper
from ragged_fsdp.trainer.config import ShardingConfig
from ragged_fsdp.trainer.config_file import ConfigError
from ragged_fsdp.trainer.optimizers import GranularityPolicy
from ragged_fsdp.trainer.ranks import Ranks
from ragged_fsdp.trainer.rules import match_rules, stores_tiles

__all__ = ["ShardedModel", "dispatcher_for", "prepare_layers", "reductions", "shard", "transformer_layers"]

_INTERNODE_DTYPES = {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}


class ShardedModel:
    """A model ready to train: what the loop calls, whichever way it is sharded."""

    def __init__(self, module: nn.Module, config: ShardingConfig, ranks: Ranks) -> None:
        self.module: Any = module
        """The model itself; its parameters go to the optimizer and its state into checkpoints."""
        self._call: nn.Module = module
        self._fsdp = isinstance(module, FSDPModule)
        self._autocast = resolved_precision(config, ranks.device).startswith("bf16") and not self._fsdp
        self._device = ranks.device
        self._reshard_after_forward = config.reshard_after_forward
        if config.sharding == "ddp" and ranks.world_size > 1:
            ids = [ranks.device] if ranks.device.type == "cuda" else None
            self._call = DistributedDataParallel(module, device_ids=ids)

    def __call__(self, input_ids: torch.Tensor) -> Any:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
            return self._call(input_ids)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch; gradients are reduced after the last one only."""
        if self._fsdp:
            self.module.set_requires_gradient_sync(last)
        elif isinstance(self._call, DistributedDataParallel) and not last:
            return self._call.no_sync()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, parameters stay gathered after their first use: for many small forwards."""
        if not self._fsdp:
            yield
            return
        parts = [m for m in self.module.modules() if isinstance(m, FSDPModule)]
        for part in parts:
            part.unshard()
            part.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for part in parts:
                part.set_reshard_after_forward(self._reshard_after_forward, recurse=False)
                part.reshard()


def transformer_layers(model: nn.Module) -> nn.ModuleList:
    """The list of repeated layers: of all module lists, the outermost one with the most parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise ConfigError(f"model: a {type(model).__name__} has no list of layers to shard one by one")
    return max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))


def prepare_layers(model: nn.Module, config: ShardingConfig) -> None:
    """FP8 products, activation checkpointing and compilation, in place, before sharding."""
    if config.fp8:
        try:  # the whole model was checked before the start; what tensor parallelism left of it was not
            fp8_training(model, tiles=stores_tiles(config.granularity))
        except ValueError as error:
            raise ConfigError(f"fp8: {error}") from error
    layers = transformer_layers(model)
    for index in range(len(layers)):
        if config.activation_checkpointing and index % config.activation_checkpointing == 0:
            layers[index] = checkpoint_wrapper(layers[index])
        if config.compile:
            layers[index].compile()


def shard(
    model: nn.Module, config: ShardingConfig, ranks: Ranks, default: GranularityPolicy | None = None
) -> None:
    """Shard ``model`` in place, a group per layer and one for the rest; nothing to do for ddp and none.

    What tensor or expert parallelism has split is a group of its own in each layer, sharded over the ranks
    that hold the same of it. ``default`` is the granularity of parameters that no rule of the settings names.
    """
    if config.sharding in ("ddp", "none"):
        return
    extra: dict[str, object] = {}
    if config.sharding == "ragged":
        from ragged_fsdp import fully_shard

        extra["orig_param_policy"] = _policy(model, "granularity", config.granularity, default)
        codes = _policy(model, "gather_codes", config.gather_codes)
        extra["gather_policy"] = functools.partial(_gathered, codes) if config.fp8 else codes
        extra["reduction"] = config.reduction
        extra["ranks_per_node"] = config.ranks_per_node or None
        extra["internode_dtype"] = _INTERNODE_DTYPES[config.internode_dtype]
    else:
        from torch.distributed.fsdp import fully_shard  # type: ignore[assignment,no-redef]
    if ranks.splits:
        # What DTensor returns as a local tensor is a view; the models add to it out of place, as they should.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    common = {"mp_policy": _mixed_precision(resolved_precision(config, ranks.device)), **extra}
    layers = transformer_layers(model)
    # None, not True: the layers that backward begins with may then stay gathered
    in_layers = {"reshard_after_forward": None if config.reshard_after_forward else False, **common}
    for inside, options in (*((layer, in_layers) for layer in layers), (model, common)):
        for split in ranks.splits:
            if parts := _split_parts(inside, split.inner, skip=layers):
                _apply(fully_shard, parts, mesh=split.outer, **options)
                if split.name == "ep":
                    divide_gradients(parts, ranks.data_parts)
        _apply(fully_shard, inside, mesh=ranks.mesh, **options)


def reductions(config: ShardingConfig, ranks: Ranks) -> list[str]:
    """How gradients are reduced and over which levels, for each mesh that ``shard`` used; all ranks call it.

    Only our sharding has a choice to tell of, and only where there is more than one rank.
    """
    if config.sharding != "ragged":
        return []
    policy = _mixed_precision(resolved_precision(config, ranks.device))
    widens = policy.param_dtype is not None and policy.param_dtype != policy.reduce_dtype
    meshes = {"gradients": ranks.mesh}
    meshes |= {f"gradients of what {split.name} splits": split.outer for split in ranks.splits}
    lines = []
    for what, mesh in meshes.items():
        group = mesh.get_group("shard")
        if group.size() == 1:
            continue
        levels = find_levels(group, ranks.device, given_ranks_per_node(config.ranks_per_node or None))
        picked = pick_reduction(config.reduction, levels, widens=widens)
        why = " (auto)" if config.reduction == "auto" else ""
        lines.append(f"{what}: {picked}{why}, {levels}")
    return lines


def _apply(fully_shard: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Shard; a granularity or tiles that do not fit what tensor parallelism left are the user's to change."""
    try:
        fully_shard(*args, **options)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _split_parts(module: nn.Module, mesh: DeviceMesh, skip: nn.Module) -> list[nn.Module]:
    """The outermost modules all of whose parameters are split over ``mesh``; ``skip`` is not entered."""
    parts = []
    for child in module.children():
        parameters = list(child.parameters())
        if child is skip or not parameters:
            continue
        if all(isinstance(p, DTensor) and p.device_mesh == mesh for p in parameters):
            parts.append(child)
        else:
            parts += _split_parts(child, mesh, skip)
    return parts


def dispatcher_for(config: ShardingConfig) -> Callable[[DeviceMesh, ExpertSplit], Dispatcher]:
    """How tokens travel under expert parallelism."""
    capacity = config.expert_capacity or None
    if config.dispatch == "all_gather":
        return AllGather
    if config.dispatch == "two_level":
        return functools.partial(two_level, ranks_per_node=config.ranks_per_node or None, capacity=capacity)
    return functools.partial(AllToAll, capacity=capacity)


def resolved_precision(config: ShardingConfig, device: torch.device) -> str:
    """The precision after ``auto``."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if device.type == "cuda" else "fp32"


def _policy(
    model: nn.Module, setting: str, rules: dict[str, str], default: GranularityPolicy | None = None
) -> Callable[[str, nn.Parameter], Any] | None:
    """The rules of a setting as a policy of ``fully_shard``."""
    if not rules:
        return default
    chosen = match_rules(model, setting, rules)

    def policy(name: str, parameter: nn.Parameter) -> Any:
        if parameter in chosen:
            return chosen[parameter]
        return default(name, parameter) if default else None

    return policy


def _gathered(codes: Callable[[str, nn.Parameter], Any] | None, name: str, parameter: nn.Parameter) -> Any:
    """What travels: what FP8 products compute with, else what the rules say."""
    return fp8_codes(name, parameter) or (codes(name, parameter) if codes else None)


def _mixed_precision(precision: str) -> MixedPrecisionPolicy:
    if not precision.startswith("bf16"):
        return MixedPrecisionPolicy()
    reduce_dtype = torch.bfloat16 if precision == "bf16-reduce" else torch.float32
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
