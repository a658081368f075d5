"""The implementations under test: how each builds the same layers, and how each runs one step.

A builder gets a :class:`Case` and a device and returns a :class:`Trainer`. Each uses the settings its
documentation recommends: bf16 compute, gradients reduced in the case's dtype, fp32 main weights, one
unit per layer, the case's optimizer.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from .case import Case
from .layers import Layer, MixtureOfExperts, Stack
from .shapes import layer_numel
from .torchao_layers import RECIPES, after_update, convert

__all__ = ["IMPLEMENTATIONS", "SETTINGS", "Trainer", "build", "missing", "per_layer"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Trainer:
    """One step, in two parts that are timed apart; ``update`` includes dropping the gradients."""

    forward_backward: Callable[[torch.Tensor], torch.Tensor]
    update: Callable[[], None] | None
    stack: Stack
    """The plain layers, to bind positions and routing to."""


def _optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-5)
    return torch.optim.AdamW(parameters, lr=1e-5, fused=torch.cuda.is_available())


def _plain_step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x)
    loss.backward()
    return loss


def _trainer(model: nn.Module, stack: Stack, optimizer: torch.optim.Optimizer | None) -> Trainer:
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(partial(_plain_step, model), update if optimizer else None, stack)


def _dense_stack(case: Case, device: torch.device, dtype: torch.dtype) -> Stack:
    """All weights of all layers on the device, initialised."""
    with device:
        stack = Stack(case.shape, case.layers, case.recompute).to(dtype)
    for layer in stack.layers:
        layer.reset_parameters()
    return stack


def _none(case: Case, device: torch.device) -> Trainer:
    """No sharding: bf16 weights and gradients, no optimizer. The compute floor."""
    stack = _dense_stack(case, device, torch.bfloat16)

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        stack.zero_grad(set_to_none=True)
        return _plain_step(stack, x)

    return Trainer(forward_backward, None, stack)


def per_layer(
    case: Case,
    device: torch.device,
    shard: Callable[..., Any],
    policy: Any,
    prepare: Callable[[Stack], None] = lambda stack: None,
    **kwargs: Any,
) -> Trainer:
    """FSDP2's calling convention: shard on meta, allocate, initialise the parts that are here.

    ``prepare`` gets the layers before they are sharded.
    """
    sizes, names = (case.ranks,), ("shard",)
    if case.replicas > 1:
        sizes, names = (case.replicas, case.shard_ranks), ("replicate", "shard")
    mesh = dist.device_mesh.init_device_mesh(device.type, sizes, mesh_dim_names=names)
    with torch.device("meta"):
        stack = Stack(case.shape, case.layers, case.recompute)
    prepare(stack)
    for layer in stack.layers:
        shard(layer, mesh=mesh, mp_policy=policy, **kwargs)
    shard(stack, mesh=mesh, mp_policy=policy, **kwargs)
    stack.to_empty(device=device)
    for layer in stack.layers:
        layer.reset_parameters()
    return _trainer(stack, stack, _optimizer(case, stack.parameters()))


def _fsdp2(
    case: Case,
    device: torch.device,
    shard_dim: int = 0,
    reduce_dtype: str | None = None,
    kept: int = 0,
    **extra: Any,
) -> Trainer:
    """``kept`` layers at the end stay gathered until backward; ``extra`` goes to ``fully_shard``."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard

    reduced = _DTYPES[reduce_dtype or case.reduce_dtype]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    if shard_dim:
        extra["shard_placement_fn"] = lambda p: Shard(shard_dim) if p.ndim > shard_dim else Shard(0)
    trainer = per_layer(case, device, fully_shard, policy, **extra)
    _keep(trainer, kept)
    return trainer


def _torchao(case: Case, device: torch.device, recipe: str) -> Trainer:
    """FSDP2 with torchao's linear layers."""
    trainer = _fsdp2(case, device, prepare=partial(convert, recipe=recipe, device=device))
    if recipe != "gathered":
        return trainer
    step = trainer.update

    def update() -> None:
        step()
        after_update(trainer.stack)

    return replace(trainer, update=update)


def _keep(trainer: Trainer, kept: int) -> None:
    """The last ``kept`` layers stay gathered until backward."""
    layers = list(trainer.stack.layers)
    for layer in layers[max(0, len(layers) - kept) :]:
        layer.set_reshard_after_forward(False)


def _ours(
    case: Case,
    device: torch.device,
    grad_buffers: int | None = None,
    prefetch: int | None = None,
    communicators: int = 1,
    codes: str | None = None,
    fp8: bool = False,
    tiles: bool = False,
    reduce_dtype: str | None = None,
    kept: int = 0,
    **options: Any,
) -> Trainer:
    """``options`` go to ``fully_shard``; the others have setters of their own (None: the default)."""
    from ragged_fsdp import MixedPrecisionPolicy, fully_shard

    if fp8:
        from ragged_fsdp.fp8 import gather_policy, orig_param_policy

        options |= {"gather_policy": gather_policy, "prepare": partial(_in_fp8, tiles)}
        options |= {"orig_param_policy": orig_param_policy} if tiles else {}
    if codes is not None:
        options["gather_policy"] = partial(_codes, codes)
    if "two_level" in options.values():  # the other ranks do not exist and cannot be asked where they are
        options["ranks_per_node"] = case.ranks_per_node
    reduced = _DTYPES[reduce_dtype or case.reduce_dtype]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    trainer = per_layer(case, device, fully_shard, policy, **(options | dict(case.options)))
    _keep(trainer, kept)
    if grad_buffers is not None:
        trainer.stack.set_reduce_scatter_max_input_buffers(grad_buffers)
    if communicators == 2:
        trainer.stack.set_separate_reduce_scatter_group()
    if prefetch is not None:
        layers = list(trainer.stack.layers)
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 1 + prefetch])
            layer.set_modules_to_backward_prefetch(layers[max(0, i - prefetch) : i][::-1])
    return trainer


def _in_fp8(tiles: bool, stack: Stack) -> None:
    """Matrices of attention, MLP and experts compute in FP8, where their sizes allow it.

    In tiles the experts' sizes need not be multiples of 128. Linear layers of such sizes are small.
    """
    from ragged_fsdp.experts import grouped_linear
    from ragged_fsdp.fp8 import compute_in_fp8, fits, fp8_training

    for layer_name, layer in stack.layers.named_children():
        weights = {n: getattr(layer.mlp, n, None) for n in ("gate_up", "down")}
        if isinstance(layer.mlp, MixtureOfExperts) and all(fits(w, tiles=tiles) for w in weights.values()):
            for name, weight in weights.items():
                compute_in_fp8(weight, f"{layer_name}.{name}", tiles=tiles)
            layer.mlp.multiply = lambda rows, weight, routing: grouped_linear(rows, weight, routing.counts)
    linears = {n: m for n, m in stack.named_modules() if isinstance(m, nn.Linear) and "router" not in n}
    if any(fits(module.weight) for module in linears.values()):
        fp8_training(stack, include=lambda name, module: name in linears and fits(module.weight))


def _codes(dtype: str, name: str, parameter: nn.Parameter) -> Any:
    """8-bit codes for the matrices of attention and MLP, in the largest square tiles up to 128 that fit."""
    from ragged_fsdp import BlockCodes

    if parameter.ndim < 2 or "bias" in name or "router" in name:
        return None
    side = math.gcd(128, *parameter.shape[-2:])
    return BlockCodes(dtype, (side, side))


def _fsdp1(case: Case, device: torch.device) -> Trainer:
    from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    @torch.no_grad()
    def initialise(module: nn.Module) -> None:
        module.to_empty(device=device, recurse=False)
        for parameter in module.parameters(recurse=False):
            parameter.normal_(std=0.02)

    with torch.device("meta"):
        stack = Stack(case.shape, case.layers, case.recompute)
    model = FullyShardedDataParallel(
        stack,
        auto_wrap_policy=ModuleWrapPolicy({Layer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=_DTYPES[case.reduce_dtype]),
        device_id=device if device.type == "cuda" else None,
        param_init_fn=initialise,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch=True,
        limit_all_gathers=True,
        use_orig_params=True,
    )
    return _trainer(model, stack, _optimizer(case, model.parameters()))


def _megatron(case: Case, device: torch.device, **options: Any) -> Trainer:
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    stack = _dense_stack(case, device, torch.bfloat16)
    # It checks that the ranks' shards cover each tensor, except where it is told that there is one rank.
    with mock.patch.object(dist, "get_backend", lambda *_: "fake"):
        model, optimizer = fully_shard(
            stack,
            _optimizer(case, stack.parameters()),
            fsdp_unit_modules=[Layer],
            zero_dp_strategy=3,
            device=device,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=torch.float32,
                main_grads_dtype=torch.float32,
                grad_comm_dtype=_DTYPES[case.reduce_dtype],
            ),
            preproc_state_dict_for_dcp_ckpt=False,
            **options,
        )
    return _trainer(model, stack, optimizer)


def _deepspeed(case: Case, device: torch.device, whole_layers: bool = False) -> Trainer:
    """``whole_layers``: it may prefetch a layer at once; by default 50 million parameters."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(case.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29400"
    )
    import deepspeed

    stack = _dense_stack(case, device, torch.bfloat16)
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
    if whole_layers:
        numel = layer_numel(case.shape)
        zero |= {"stage3_prefetch_bucket_size": numel, "stage3_max_live_parameters": 3 * numel}
    engine, _, _, _ = deepspeed.initialize(
        model=stack,
        optimizer=_optimizer(case, stack.parameters()),
        config={
            "train_micro_batch_size_per_gpu": case.batch,
            "train_batch_size": case.batch * case.ranks,
            "bf16": {"enabled": True},
            "communication_data_type": case.reduce_dtype,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
            "steps_per_print": 1_000_000,
        },
    )

    def forward_backward(x: torch.Tensor) -> torch.Tensor:
        loss = engine(x)
        engine.backward(loss)
        return loss

    return Trainer(forward_backward, engine.step, stack)


_OPTIONS: dict[str, dict[str, Any]] = {
    "2-pending": {"grad_buffers": 2},
    "no-prefetch": {"prefetch": 0},
    "prefetch-2": {"prefetch": 2},
    "2-communicators": {"communicators": 2},
    "nothing-kept": {"reshard_after_forward": True},
    "budget": {"reshard_after_forward": "auto", "gathered_budget_bytes": 24 << 30},
    "int8": {"codes": "int8"},
    "float8": {"codes": "float8_e4m3fn"},
}
"""What is switched on and off around the all-to-all configuration, each alone."""

_NOTHING_KEPT: dict[str, Any] = {"reshard_after_forward": True}
_BF16: dict[str, Any] = {"reduce_dtype": "bf16"}
_NODE_KEEPS: dict[str, Any] = {"reshard_after_forward": 8}
_TWO_LEVEL: dict[str, Any] = {"reduction": "two_level"}
_MORE_KEPT = (3, 4, 8)
"""Layers that stay gathered until backward, beyond the two that ours keeps by default."""

IMPLEMENTATIONS: dict[str, Callable[..., Trainer]] = {
    "none": _none,
    "ours": _ours,
    "ours-nothing-kept": partial(_ours, **_NOTHING_KEPT),
    "ours-bf16": partial(_ours, **_BF16),
    "ours-nothing-kept-bf16": partial(_ours, **_NOTHING_KEPT, **_BF16),
    "ours-reshard8": partial(_ours, **_NODE_KEEPS),
    "ours-2-buffers": partial(_ours, grad_buffers=2),
    "ours-all-to-all": partial(_ours, reduction="all_to_all"),
    **{
        f"ours-all-to-all-{name}": partial(_ours, reduction="all_to_all", **how)
        for name, how in _OPTIONS.items()
    },
    "ours-fp8": partial(_ours, fp8=True),
    "ours-fp8-nothing-kept": partial(_ours, fp8=True, **_NOTHING_KEPT),
    "ours-fp8-all-to-all": partial(_ours, fp8=True, reduction="all_to_all"),
    "ours-fp8-all-to-all-nothing-kept": partial(_ours, fp8=True, reduction="all_to_all", **_NOTHING_KEPT),
    "ours-fp8-two-level": partial(_ours, fp8=True, **_TWO_LEVEL, **_NOTHING_KEPT),
    "ours-fp8-tiles-two-level": partial(_ours, fp8=True, tiles=True, **_TWO_LEVEL, **_NOTHING_KEPT),
    "ours-two-level": partial(_ours, **_TWO_LEVEL),
    "ours-two-level-nothing-kept": partial(_ours, **_TWO_LEVEL, **_NOTHING_KEPT),
    "ours-two-level-fp32-between": partial(
        _ours, **_TWO_LEVEL, **_NOTHING_KEPT, internode_dtype=torch.float32
    ),
    "ours-two-level-gather": partial(_ours, **_TWO_LEVEL, **_NOTHING_KEPT, gather="two_level"),
    "ours-two-level-float8": partial(_ours, **_TWO_LEVEL, **_NOTHING_KEPT, codes="float8_e4m3fn"),
    "ours-two-level-gather-float8": partial(
        _ours, **_TWO_LEVEL, **_NOTHING_KEPT, gather="two_level", codes="float8_e4m3fn"
    ),
    **{f"ours-two-level-kept{n}": partial(_ours, **_TWO_LEVEL, **_NOTHING_KEPT, kept=n) for n in _MORE_KEPT},
    **{
        f"ours-two-level-float8-kept{n}": partial(
            _ours, **_TWO_LEVEL, **_NOTHING_KEPT, codes="float8_e4m3fn", kept=n
        )
        for n in (2, 4)
    },
    "ours-two-level-reshard8": partial(_ours, **_TWO_LEVEL, **_NODE_KEEPS),
    "ours-two-level-reshard8-kept2": partial(_ours, **_TWO_LEVEL, **_NODE_KEEPS, kept=2),
    "fsdp2": _fsdp2,
    "fsdp2-shard1": partial(_fsdp2, shard_dim=1),
    "fsdp2-kept2": partial(_fsdp2, kept=2),
    **{f"fsdp2-kept{n}": partial(_fsdp2, kept=n) for n in _MORE_KEPT},
    "fsdp2-bf16": partial(_fsdp2, **_BF16),
    "fsdp2-kept2-bf16": partial(_fsdp2, kept=2, **_BF16),
    "fsdp2-reshard8": partial(_fsdp2, **_NODE_KEEPS),
    "fsdp2-reshard8-kept2": partial(_fsdp2, **_NODE_KEEPS, kept=2),
    **{f"fsdp2-torchao-{recipe}": partial(_torchao, recipe=recipe) for recipe in RECIPES},
    "fsdp1": _fsdp1,
    "megatron": _megatron,
    "megatron-double": partial(_megatron, fsdp_double_buffer=True),
    "deepspeed": _deepspeed,
    "deepspeed-layers": partial(_deepspeed, whole_layers=True),
}

_EQUAL, _KEPT, _BF16_SUMS = "nothing kept", "2 layers kept", "bf16 sums"
_KEPT_BF16, _NODE = f"{_KEPT}, {_BF16_SUMS}", "8 ranks keep"
SETTINGS: dict[str, str] = {
    **dict.fromkeys(("none", "fsdp2", "fsdp2-shard1", "fsdp1", "megatron", "megatron-double"), _EQUAL),
    **dict.fromkeys(("deepspeed", "deepspeed-layers"), _EQUAL),
    **dict.fromkeys(("ours-nothing-kept", "ours-all-to-all-nothing-kept"), _EQUAL),
    **dict.fromkeys((f"ours-two-level-{n}" for n in ("nothing-kept", "fp32-between", "gather")), _EQUAL),
    **dict.fromkeys(("ours-two-level-float8", "ours-two-level-gather-float8"), _EQUAL),
    **dict.fromkeys(("ours-fp8-nothing-kept", "ours-fp8-two-level", "ours-fp8-tiles-two-level"), _EQUAL),
    "ours-fp8-all-to-all-nothing-kept": _EQUAL,
    **dict.fromkeys((f"fsdp2-torchao-{recipe}" for recipe in RECIPES), _EQUAL),
    "ours-two-level-reshard8": _NODE,
    **dict.fromkeys(("ours-nothing-kept-bf16", "fsdp2-bf16"), _BF16_SUMS),
    **dict.fromkeys(("ours-bf16", "fsdp2-kept2-bf16"), _KEPT_BF16),
    **dict.fromkeys(("ours-reshard8", "fsdp2-reshard8"), _NODE),
    **dict.fromkeys(("ours-two-level-reshard8-kept2", "fsdp2-reshard8-kept2"), f"{_NODE}, {_KEPT}"),
    "ours-all-to-all-budget": "24 GiB kept",
    **{f"{name}-kept{n}": f"{n} layers kept" for n in _MORE_KEPT for name in ("fsdp2", "ours-two-level")},
    **{f"ours-two-level-float8-kept{n}": f"{n} layers kept" for n in (2, 4)},
}
SETTINGS |= {name: _KEPT for name in IMPLEMENTATIONS if name not in SETTINGS}  # what ours does by default
"""What is kept gathered after forward, and the dtype of sums where it is not the case's.

Tables group by it and compare with FSDP2 in the same setting; the default of the peers comes first.
"""
_HYBRID = ("none", "ours", "fsdp2")
_NEEDS = {"megatron": "megatron_fsdp", "deepspeed": "deepspeed", "torchao": "torchao"}


def build(name: str, case: Case, device: torch.device) -> Trainer:
    """Implementation ``name`` of a case, on a process group that was joined."""
    if case.replicas > 1 and name.split("-")[0] not in _HYBRID:
        raise ValueError(f"{name}: cannot be built with {case.replicas} replicas; {', '.join(_HYBRID)} can")
    return IMPLEMENTATIONS[name](case, device)


def missing(name: str) -> str | None:
    """The module this implementation needs and that is not installed, if so."""
    needed = [module for part, module in _NEEDS.items() if part in name.split("-")]
    return next((module for module in needed if importlib.util.find_spec(module) is None), None)
