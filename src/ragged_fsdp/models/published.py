"""Published models by name: what ``plan``, ``predict``, ``calibrate`` and ``train`` all understand.

Each is a Hugging Face config in which only what differs from the class's defaults is written. Nothing is
downloaded: a name stands for shapes, not for weights.
"""

from typing import Any

__all__ = ["PUBLISHED", "published_name"]

_LLAMA3: dict[str, Any] = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
_QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"model_type": "deepseek_v3"},
    "gpt-oss-120b": {"model_type": "gpt_oss", "num_hidden_layers": 36, "num_local_experts": 128},
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
    "llama-3-8b": _LLAMA3
    | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "llama-3-70b": _LLAMA3
    | {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "llama-3-405b": _LLAMA3
    | {
        "num_hidden_layers": 126,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
    },
    "qwen3-30b-a3b": _QWEN3_MOE
    | {"num_hidden_layers": 48, "hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32},
    "qwen3-235b-a22b": _QWEN3_MOE
    | {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
    },
}


def published_name(name: str) -> str | None:
    """The name of :data:`PUBLISHED` that ``name`` spells, whatever its case and dashes; None if none."""
    plain = _plain(name)
    return next((known for known in PUBLISHED if _plain(known) == plain), None)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
