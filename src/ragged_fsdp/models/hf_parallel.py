"""Tensor parallelism of Hugging Face models, after the plan that the library keeps for each of them."""

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, PretrainedConfig

from ragged_fsdp.models.splits import Split

__all__ = ["attention_split", "tensor_split"]

_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_HEAD_STYLES = ("colwise_gather_output", "colwise_rep")
_OF_HEADS = "replicated_with_grad_allreduce"
_HEAD_DIM = 2  # of (sequences, positions, heads, channels), what the norms of queries and keys get
_ATTENTION = "layers.*.self_attn"
_COMMON_KEYS = "keys that all heads share"
_SINKS = "a sink for each head"
_OWN_PLANS = {
    "DeepseekV3Config": {
        f"{_ATTENTION}.q_proj": "colwise",
        f"{_ATTENTION}.q_b_proj": "colwise",
        f"{_ATTENTION}.kv_b_proj": "colwise",
        f"{_ATTENTION}.o_proj": "rowwise",
        f"{_ATTENTION}.kv_a_proj_with_mqa": _COMMON_KEYS,
    },
    "GptOssConfig": {
        f"{_ATTENTION}.q_proj": "colwise",
        f"{_ATTENTION}.k_proj": "colwise",
        f"{_ATTENTION}.v_proj": "colwise",
        f"{_ATTENTION}.o_proj": "rowwise",
        _ATTENTION: _SINKS,
    },
}
"""For models whose attention the library has no plan for."""


def tensor_split(config: PretrainedConfig) -> Split | str:
    """The library's plan, if it is made of column- and row-wise linear layers alone; else why it is not."""
    name = type(config).__name__
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    if not plan:
        return f"transformers has no tensor-parallel plan for {name}"
    for module, style in plan.items():
        if style not in ("colwise", "rowwise"):
            return (
                f"the plan of {name} asks for {style!r} of {module!r}; only colwise and rowwise are supported"
            )
    return _split(config, plan, _SIZES)


def attention_split(config: PretrainedConfig) -> Split | str:
    """The library's plan for attention and the head alone: for models whose experts are spread over ranks."""
    name = type(config).__name__
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {module: style for module, style in plan.items() if ".self_attn." in module}
    plan = plan or _OWN_PLANS.get(name, {})
    if not plan:
        return f"transformers has no tensor-parallel plan for the attention of {name}"
    for module, style in plan.items():
        if style not in ("colwise", "rowwise", _OF_HEADS, _COMMON_KEYS, _SINKS):
            return (
                f"the plan of {name} asks for {style!r} of {module!r}; only colwise, rowwise and {_OF_HEADS} "
                "are supported"
            )
    return _split(config, plan, _SIZES[:2])


def _split(config: PretrainedConfig, plan: dict[str, str], sizes: tuple[str, ...]) -> Split:
    """Apply ``plan`` and what the library says of the head; the ranks must divide ``sizes``."""
    head_plan = getattr(AutoModelForCausalLM._model_mapping[type(config)], "_tp_plan", None) or {}
    heads = [module for module, style in head_plan.items() if style in _HEAD_STYLES]
    text = config.get_text_config()

    def apply(model: nn.Module, mesh: DeviceMesh) -> None:
        prefix = model.base_model_prefix
        names = [name for name, _ in model.named_modules()]
        styles: dict[str, ParallelStyle] = {}
        for module, how in plan.items():
            pattern = f"{prefix}.{module}"
            found = [name for name in names if fnmatchcase(name, pattern)]
            if how == _COMMON_KEYS:
                for name in found:
                    _sum_gradients_of_keys(model.get_submodule(name), mesh, text.qk_rope_head_dim)
            elif how == _SINKS:
                for name in found:
                    _split_sinks(model.get_submodule(name), mesh)
            elif found:  # of queries a model has one projection, or two
                styles[pattern] = _style(how)
        whole: Any = model
        embedding = whole.get_input_embeddings()
        for head in heads:
            if model.get_submodule(head).weight is not embedding.weight:
                styles[head] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh, styles)

    split = [module for module, style in plan.items() if style in ("colwise", "rowwise")]
    split += [f"{module}.sinks" for module, style in plan.items() if style == _SINKS]
    whole_sizes = {key: getattr(text, key) for key in sizes if getattr(text, key, None)}
    return Split(apply, whole_sizes, (*split, *heads))


def _style(name: str) -> ParallelStyle:
    if name == _OF_HEADS:  # one norm for all heads: each rank's gradient is a part of its own heads
        return SequenceParallel(sequence_dim=_HEAD_DIM, use_local_output=True)
    return ColwiseParallel() if name == "colwise" else RowwiseParallel()


def _sum_gradients_of_keys(projection: nn.Module, mesh: DeviceMesh, channels: int) -> None:
    """The last ``channels`` of the output are keys for all heads: a rank's gradient is that of its own."""

    def shared(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        own, common = output.split([output.shape[-1] - channels, channels], dim=-1)
        whole = DTensor.from_local(common, mesh, [Replicate()], run_check=False)
        return torch.cat((own, whole.to_local(grad_placements=[Partial()])), dim=-1)

    projection.register_forward_hook(shared)


def _split_sinks(attention: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank has the sinks of its heads; the module's own code sees them as a plain tensor."""
    sinks = attention.get_parameter("sinks")
    part = distribute_tensor(sinks.detach(), mesh, [Shard(0)], src_data_rank=None)
    attention.sinks = nn.Parameter(part, requires_grad=sinks.requires_grad)

    def show(module: nn.Module, args: Any, kwargs: Any) -> None:
        sinks: Any = module.get_parameter("sinks")
        module.__dict__["sinks"] = sinks.to_local()  # found before the parameter is

    def hide(module: nn.Module, *_: Any) -> None:
        module.__dict__.pop("sinks", None)

    attention.register_forward_pre_hook(show, with_kwargs=True)
    attention.register_forward_hook(hide, always_call=True)
