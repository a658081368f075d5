"""Tiny mixture-of-experts models of transformers and of ours, and how they are spread, for tests."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rank_pool import DEVICE

__all__ = ["EXPERTS", "FAMILIES", "batch", "build", "layers_of", "loss_of", "shard", "wide_arithmetic"]

EXPERTS = 5
_COMMON = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "use_cache": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3MoeConfig": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 8,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "GptOssConfig": {"num_local_experts": EXPERTS, "head_dim": 8},
    "DeepseekV3Config": {
        "n_routed_experts": EXPERTS,
        "moe_intermediate_size": 8,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "MixtralConfig": {"num_local_experts": EXPERTS},
    "ours": {},
}


def build(family: str, dtype: torch.dtype, experts: int = EXPERTS) -> Any:
    """A model with random weights, the same on every rank."""
    torch.manual_seed(3)
    if family == "ours":
        from ragged_fsdp.models import MoEConfig, MoETransformer

        config = MoEConfig(
            vocab_size=64,
            hidden=16,
            layers=2,
            heads=2,
            kv_heads=2,
            experts=experts,
            experts_per_token=2,
            expert_hidden=8,
        )
        model: Any = MoETransformer(config)
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                model.init_module(module, torch.Generator().manual_seed(3))
    else:
        import transformers

        sizes = {k: experts if v == EXPERTS else v for k, v in FAMILIES[family].items()}
        config = getattr(transformers, family)(**{**_COMMON, **sizes})
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, experts_implementation="eager"
        )
    model = model.to(DEVICE, dtype).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "router" in name or ".gate." in name:
                parameter.normal_(std=0.3)  # so that tokens differ and experts matter
    return model


def batch(sequences: int = 12, length: int = 5) -> torch.Tensor:
    return torch.randint(64, (sequences, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def loss_of(model: nn.Module, ids: torch.Tensor, tokens: int) -> torch.Tensor:
    """The sum over these sequences, divided by the tokens of the whole batch."""
    logits = model(ids).logits
    return logits.logsumexp(-1).sum() / tokens + (logits**2).sum() / tokens


def layers_of(model: Any) -> nn.ModuleList:
    return getattr(model, "model", model).layers


def shard(model: Any, dp: Any, everyone: Any, parts: int, fully_shard: Any, **options: Any) -> None:
    """Experts over ``dp``, the rest over all ranks, a group per layer."""
    from ragged_fsdp.experts import divide_gradients, split_experts_of

    for layer in layers_of(model):
        experts = [split.module for split in split_experts_of(layer).values()]
        for module in experts:
            fully_shard(module, mesh=dp, **options)
        divide_gradients(experts, parts)
        fully_shard(layer, mesh=everyone, **options)
    fully_shard(model, mesh=everyone, **options)


class _Wide:
    """``torch`` as a module of transformers sees it, where what it computes in float32 is float64."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextlib.contextmanager
def wide_arithmetic(family: str) -> Iterator[None]:
    """Let a model that computes norms and routers in float32 whatever its weights are do it in float64.

    A difference of a last bit would otherwise be rounded up to one of float32.
    """
    if family == "ours":
        yield
        return
    name = {"Qwen3MoeConfig": "qwen3_moe", "GptOssConfig": "gpt_oss", "DeepseekV3Config": "deepseek_v3"}.get(
        family, "mixtral"
    )
    modeling = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    before, method = modeling.torch, torch.Tensor.float
    modeling.torch, torch.Tensor.float = _Wide(), torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        modeling.torch, torch.Tensor.float = before, method  # type: ignore[method-assign]
