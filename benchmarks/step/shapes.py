"""Published shapes of the layers that the benchmark runs, and the arithmetic of their sizes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODELS", "Attention", "Experts", "LatentAttention", "LayerShape", "layer_numel"]


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention."""

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention: queries and keys/values pass through low-rank bottlenecks."""

    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Experts:
    """Routed experts, each a gated MLP of ``hidden`` units, and shared experts every token passes."""

    count: int
    per_token: int
    hidden: int
    bias: bool = False
    shared_hidden: int = 0
    separate: bool = False
    """Whether each expert's matrices are parameters of their own, as in checkpoints, and not stacked."""


@dataclass(frozen=True)
class LayerShape:
    """One transformer layer: attention, then a dense gated MLP (``mlp_hidden``) or experts."""

    name: str
    width: int
    attention: Attention | LatentAttention
    mlp_hidden: int = 0
    experts: Experts | None = None
    sequence: int = 4096
    layers: int = 0
    """Of the published model; 0 where it has none."""

    def __post_init__(self) -> None:
        if bool(self.mlp_hidden) == (self.experts is not None):
            raise ValueError(f"{self.name}: a layer has either a dense MLP or experts, got both or neither")


MODELS = {
    "gpt-oss-120b": LayerShape(
        "GPT-OSS-120B",
        2880,
        Attention(64, 8, 64, bias=True),
        experts=Experts(128, 4, 2880, bias=True),
        layers=36,
    ),
    "deepseek-v3": LayerShape(
        "DeepSeek-V3",
        7168,
        LatentAttention(128, 1536, 512, 128, 64, 128),
        experts=Experts(256, 8, 2048, shared_hidden=2048),
        layers=61,
    ),
    "deepseek-v3-separate": LayerShape(
        "DeepSeek-V3, experts apart",
        7168,
        LatentAttention(128, 1536, 512, 128, 64, 128),
        experts=Experts(256, 8, 2048, shared_hidden=2048, separate=True),
        layers=61,
    ),
    "llama-3-70b": LayerShape("Llama-3-70B", 8192, Attention(64, 8, 128), mlp_hidden=28672, layers=80),
    "llama-3-8b": LayerShape("Llama-3-8B", 4096, Attention(32, 8, 128), mlp_hidden=14336, layers=32),
    "small-dense": LayerShape("small dense", 512, Attention(8, 8, 64), mlp_hidden=1408, sequence=128),
    "tiny-moe": LayerShape(
        "tiny MoE", 64, Attention(4, 2, 16, bias=True), experts=Experts(8, 2, 32, True), sequence=16
    ),
}
"""The models by the name the command line takes. The last two are ours: CPU cost per layer, and tests."""


def layer_numel(shape: LayerShape) -> int:
    """Parameters of one layer, from its shape alone."""
    width, a, total = shape.width, shape.attention, 2 * shape.width
    if isinstance(a, Attention):
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        total += width * (2 * q + 2 * kv) + (q + 2 * kv + width if a.bias else 0)
    else:
        total += width * a.q_rank + a.q_rank + a.q_rank * a.heads * (a.nope_dim + a.rope_dim)
        total += width * (a.kv_rank + a.rope_dim) + a.kv_rank
        total += a.kv_rank * a.heads * (a.nope_dim + a.v_dim) + a.heads * a.v_dim * width
    if shape.experts is None:
        return total + 3 * width * shape.mlp_hidden
    e = shape.experts
    total += e.count * (3 * width * e.hidden + (2 * e.hidden + width if e.bias else 0))
    total += e.count * (width + (1 if e.bias else 0)) + 3 * width * e.shared_hidden
    return total
