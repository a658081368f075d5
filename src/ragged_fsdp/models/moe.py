"""A GPT-OSS-like mixture-of-experts transformer, small enough to read in one go.

Grouped-query attention with rotary positions, RMSNorm before each part, and a router that sends each
token to ``experts_per_token`` experts, whose weights are two fused tensors per layer::

    token ids (B, T) -> embed -> [ x + attention(norm(x)) ; x + experts(norm(x)) ] * layers -> norm -> lm_head

Shapes in comments: B sequences, T positions, N = B*T tokens, D hidden, E experts, F expert hidden, K
experts per token. Nothing here communicates: where tokens find experts of other ranks, the forward of
``Experts`` is replaced (:mod:`ragged_fsdp.experts`).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ragged_fsdp.experts import Here, grouped_linear, held_part, mix
from ragged_fsdp.models.config import MoEConfig

__all__ = ["Attention", "Block", "Experts", "MoEOutput", "MoETransformer", "Router"]


class MoEOutput(NamedTuple):
    """What the model returns: the logits, and the sum over layers of the routers' balance losses."""

    logits: Tensor  # (B, T, vocab)
    balance_loss: Tensor  # (B,), one per sequence, so that its mean does not depend on how a batch is split


class MoETransformer(nn.Module):
    """The whole model; parameter names follow Hugging Face's for decoder-only models."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, input_ids: Tensor) -> MoEOutput:
        x = self.embed_tokens(input_ids)  # (B, T, D)
        rotary = rotary_tables(input_ids.shape[1], self.config, x.device)
        balance = at_least_float32(x.new_zeros(x.shape[0]))
        for layer in self.layers:
            x, layer_balance = layer(x, rotary)
            balance = balance + layer_balance
        return MoEOutput(self.lm_head(self.norm(x)), balance)

    def init_module(self, module: nn.Module, generator: torch.Generator) -> None:
        """Fill ``module``'s own parameters with their initial values.

        Called module by module, so that a model can be initialised while only one of its modules is
        held in full. The parts that write into the residual stream start smaller with depth.
        """
        std = self.config.init_std
        out_std = std / math.sqrt(2 * self.config.layers)
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, Experts):
            nn.init.normal_(module.gate_up_proj, std=std, generator=generator)
            nn.init.normal_(module.down_proj, std=out_std, generator=generator)
        elif isinstance(module, OutputLinear):
            nn.init.normal_(module.weight, std=out_std, generator=generator)
        elif isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std, generator=generator)
        else:
            raise TypeError(f"no initial values are known for the parameters of a {type(module).__name__}")


class Block(nn.Module):
    """One layer: attention, then experts, each on the normalised residual stream."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        normed = self.post_attention_layernorm(x)
        chosen, weights, balance = self.router(normed)
        y = self.experts(normed.flatten(0, 1), chosen, weights)
        return x + y.view_as(x), balance


class OutputLinear(nn.Linear):
    """A linear layer whose output is added to the residual stream."""


class Attention(nn.Module):
    """Causal attention in which ``heads / kv_heads`` query heads share each key and value head."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.hidden, bias=False)
        self.k_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden, kv_width, bias=False)
        self.o_proj = OutputLinear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        # (B, T, width) -> (B, heads, T, head_dim); the number of heads is what this rank's weights give
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in self._inputs())
        q, k = rotate(q, rotary), rotate(k, rotary)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _inputs(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj


class Router(nn.Linear):
    """Chooses the experts of each token, and says how unevenly it did so."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config.hidden, config.experts, bias=False)
        self.experts_per_token = config.experts_per_token
        self.balance_weight = config.balance_weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """(B, T, D) to the chosen experts (N, K), their weights (N, K) and the balance loss (B,)."""
        logits = at_least_float32(super().forward(x))  # (B, T, E)
        top, chosen = logits.topk(self.experts_per_token, dim=-1)
        weights = top.softmax(-1).to(x.dtype)
        return chosen.flatten(0, 1), weights.flatten(0, 1), self._balance(logits, chosen)

    def _balance(self, logits: Tensor, chosen: Tensor) -> Tensor:
        """Per sequence: sum over experts of (share of tokens sent there) * (mean probability) * E.

        It is 1 (times the weight) when balanced. Taken per sequence, not per batch: a batch mean of
        products would change with the number of ranks.
        """
        experts = logits.shape[-1]
        sent = torch.zeros_like(logits).scatter_(-1, chosen, 1.0).mean(1) / self.experts_per_token  # (B, E)
        probability = logits.softmax(-1).mean(1)  # (B, E)
        return (sent * probability).sum(-1) * (experts * self.balance_weight)


class Experts(nn.Module):
    """All experts of a layer in two tensors, laid out as GPT-OSS does: ``x @ weight[expert]``."""

    uses_grouped_linear = True

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        self.gate_up_proj = nn.Parameter(torch.empty(config.experts, config.hidden, 2 * config.expert_hidden))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.expert_hidden, config.hidden))
        for weight in (self.gate_up_proj, self.down_proj):  # or a model made by hand has garbage
            nn.init.normal_(weight, std=config.init_std)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens (N, D), their experts (N, K) and weights (N, K) to the mixed outputs (N, D)."""
        return mix(self, Here(self.num_experts), x, chosen, weights)[0]

    def apply_to_groups(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows (R, D), ``counts[i]`` of them for the i-th expert that this rank holds, to their outputs."""
        gate, up = grouped_linear(rows, held_part(self.gate_up_proj), counts).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, held_part(self.down_proj), counts)


def at_least_float32(x: Tensor) -> Tensor:
    """``x``, widened if it is of a half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotary_tables(positions: int, config: MoEConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, head_dim / 2) of the rotary embedding, computed in float32."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angles = torch.outer(torch.arange(positions, device=device).float(), config.rope_theta**-exponents)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the channel pairs (i, i + head_dim/2) of (B, heads, T, head_dim) by their position's angle."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
