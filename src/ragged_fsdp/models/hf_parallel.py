"""Tensor parallelism of Hugging Face models, after the plan that the library keeps for each of them."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
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
    if not plan:
        return f"transformers has no tensor-parallel plan for the attention of {name}"
    for module, style in plan.items():
        if style not in ("colwise", "rowwise", _OF_HEADS):
            return (
                f"the plan of {name} asks for {style!r} of {module!r}; only colwise, rowwise and {_OF_HEADS} "
                "are supported"
            )
    return _split(config, plan, _SIZES[:2])


def _split(config: PretrainedConfig, plan: dict[str, str], sizes: tuple[str, ...]) -> Split:
    """Apply ``plan`` and what the library says of the head; the ranks must divide ``sizes``."""
    head_plan = getattr(AutoModelForCausalLM._model_mapping[type(config)], "_tp_plan", None) or {}
    heads = [module for module, style in head_plan.items() if style in _HEAD_STYLES]

    def apply(model: nn.Module, mesh: DeviceMesh) -> None:
        prefix = model.base_model_prefix
        styles: dict[str, ParallelStyle] = {f"{prefix}.{module}": _style(how) for module, how in plan.items()}
        whole: Any = model
        embedding = whole.get_input_embeddings()
        for head in heads:
            if model.get_submodule(head).weight is not embedding.weight:
                styles[head] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh, styles)

    text = config.get_text_config()
    return Split(apply, {key: getattr(text, key) for key in sizes if getattr(text, key, None)})


def _style(name: str) -> ParallelStyle:
    if name == _OF_HEADS:  # one norm for all heads: each rank's gradient is a part of its own heads
        return SequenceParallel(sequence_dim=_HEAD_DIM, use_local_output=True)
    return ColwiseParallel() if name == "colwise" else RowwiseParallel()
