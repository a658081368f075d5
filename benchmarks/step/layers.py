"""Transformer layers of the published shapes, written plainly: what every implementation runs the same.

Attention is ``scaled_dot_product_attention``, experts are ``grouped_mm``. Which expert a token visits is
drawn once, balanced, instead of taken from the router's scores: the load then does not depend on the
weights, so every implementation computes the same. The router still weighs the experts' answers and
learns. GPT-OSS's attention sinks (64 numbers per layer) and sliding windows are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .shapes import Attention, Experts, LatentAttention, LayerShape

__all__ = ["Layer", "Stack", "draw_routing"]


class RMSNorm(nn.RMSNorm):
    """torch's, with the epsilon of the published models."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-5)


def _rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotary positions on the last dim of (..., sequence, dim); ``rope`` is (2, sequence, dim/2)."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rope_table(sequence: int, dim: int, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of the positions, (2, sequence, dim/2)."""
    angles = torch.outer(
        torch.arange(sequence, device=device, dtype=torch.float32),
        10000.0 ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim),
    )
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention over (batch, sequence, width)."""

    def __init__(self, width: int, shape: Attention) -> None:
        super().__init__()
        self.shape = shape
        self.rope: torch.Tensor | None = None
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(width, q, bias=shape.bias)
        self.k = nn.Linear(width, kv, bias=shape.bias)
        self.v = nn.Linear(width, kv, bias=shape.bias)
        self.out = nn.Linear(q, width, bias=shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        q, k = _rotate(q, self.rope), _rotate(k, self.rope)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).flatten(2))


class LatentSelfAttention(nn.Module):
    """Multi-head latent attention: the rotary part of the key is shared by all heads."""

    def __init__(self, width: int, shape: LatentAttention) -> None:
        super().__init__()
        self.shape = shape
        self.rope: torch.Tensor | None = None
        self.q_down = nn.Linear(width, shape.q_rank, bias=False)
        self.q_norm = RMSNorm(shape.q_rank)
        self.q_up = nn.Linear(shape.q_rank, shape.heads * (shape.nope_dim + shape.rope_dim), bias=False)
        self.kv_down = nn.Linear(width, shape.kv_rank + shape.rope_dim, bias=False)
        self.kv_norm = RMSNorm(shape.kv_rank)
        self.kv_up = nn.Linear(shape.kv_rank, shape.heads * (shape.nope_dim + shape.v_dim), bias=False)
        self.out = nn.Linear(shape.heads * shape.v_dim, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.shape
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (s.heads, -1)).transpose(1, 2)
        q_nope, q_rope = q.split((s.nope_dim, s.rope_dim), dim=-1)
        latent, k_rope = self.kv_down(x).split((s.kv_rank, s.rope_dim), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (s.heads, -1)).transpose(1, 2)
        k_nope, v = kv.split((s.nope_dim, s.v_dim), dim=-1)
        k_rope = _rotate(k_rope.unsqueeze(1), self.rope).expand(-1, s.heads, -1, -1)
        q = torch.cat((q_nope, _rotate(q_rope, self.rope)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        # The flash kernel wants one head size: pad the values, drop the padding from the answer.
        y = F.scaled_dot_product_attention(q, k, F.pad(v, (0, q.shape[-1] - s.v_dim)), is_causal=True)
        return self.out(y[..., : s.v_dim].transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Routing(NamedTuple):
    """Which rows go where: drawn once, the same for every layer."""

    chosen: torch.Tensor
    """(tokens, k) experts of each token."""
    order: torch.Tensor
    """(tokens * k) rows sorted by expert, as indices into the flattened ``chosen``."""
    inverse: torch.Tensor
    ends: torch.Tensor
    """(experts) where each expert's rows end."""
    counts: torch.Tensor
    """(experts) how many rows each has."""


class _Dispatch(torch.autograd.Function):
    """Rows for the experts: row ``i`` is token ``order[i] // k``; backward gathers and adds."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """The experts' rows back in token order, (tokens, k, width). Backward gathers by the order."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, inverse).unflatten(0, (-1, k))

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (order,) = ctx.saved_tensors
        return grad.flatten(0, 1).index_select(0, order), None, None, None


def _multiply(rows: torch.Tensor, weight: torch.Tensor, routing: Routing) -> torch.Tensor:
    return F.grouped_mm(rows, weight, offs=routing.ends)


class MixtureOfExperts(nn.Module):
    """Routed experts as two stacked weights, (experts, in, out), multiplied group by group.

    ``separate`` experts are modules of their own, run one after the other.
    """

    def __init__(self, width: int, shape: Experts) -> None:
        super().__init__()
        self.shape = shape
        self.routing: Routing | None = None
        self.multiply = _multiply
        """Rows, grouped by expert, times the experts' matrices; an implementation may have its own."""
        self.router = nn.Linear(width, shape.count, bias=shape.bias)
        if shape.separate:
            self.experts = nn.ModuleList(GatedMLP(width, shape.hidden) for _ in range(shape.count))
        else:
            self.gate_up = nn.Parameter(torch.empty(shape.count, width, 2 * shape.hidden))
            self.down = nn.Parameter(torch.empty(shape.count, shape.hidden, width))
        if shape.bias:
            self.gate_up_bias = nn.Parameter(torch.empty(shape.count, 2 * shape.hidden))
            self.down_bias = nn.Parameter(torch.empty(shape.count, width))
        self.shared = GatedMLP(width, shape.shared_hidden) if shape.shared_hidden else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, routing = self.shape.per_token, self.routing
        tokens = x.flatten(0, -2)
        scores = self.router(tokens).gather(1, routing.chosen).softmax(dim=-1)
        rows = _Dispatch.apply(tokens, routing.order, routing.inverse, k)
        rows = self._apart(rows) if self.shape.separate else self._stacked(rows)
        y = torch.einsum("tkw,tk->tw", _Collect.apply(rows, routing.order, routing.inverse, k), scores)
        if self.shared is not None:
            y = y + self.shared(tokens)
        return y.view_as(x)

    def _apart(self, rows: torch.Tensor) -> torch.Tensor:
        parts = rows.chunk(self.shape.count)  # the routing is balanced
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts)])

    def _stacked(self, rows: torch.Tensor) -> torch.Tensor:
        experts, routing = self.shape.count, self.routing
        hidden = self.multiply(rows, self.gate_up, routing)
        if self.shape.bias:
            hidden = (hidden.unflatten(0, (experts, -1)) + self.gate_up_bias.unsqueeze(1)).flatten(0, 1)
        gate, up = hidden.chunk(2, dim=-1)
        rows = self.multiply(F.silu(gate) * up, self.down, routing)
        if self.shape.bias:
            rows = (rows.unflatten(0, (experts, -1)) + self.down_bias.unsqueeze(1)).flatten(0, 1)
        return rows


def draw_routing(tokens: int, shape: Experts, device: torch.device | str, seed: int = 0) -> Routing:
    """Send every token to ``per_token`` distinct experts, so that all experts get the same number of rows.

    Tokens in random order are dealt experts round-robin from a random start: consecutive cards are
    distinct experts, and the deck is used up evenly.
    """
    if tokens * shape.per_token % shape.count:
        raise ValueError(
            f"tokens: {tokens} x {shape.per_token} rows cannot be shared evenly by {shape.count} experts"
        )
    generator = torch.Generator().manual_seed(seed)
    deck = torch.arange(tokens * shape.per_token).remainder_(shape.count)
    deck = torch.randperm(shape.count, generator=generator)[deck].view(tokens, shape.per_token)
    chosen = deck[torch.randperm(tokens, generator=generator)]
    order = chosen.flatten().argsort(stable=True)
    rows = tokens * shape.per_token // shape.count
    ends = torch.arange(1, shape.count + 1, dtype=torch.int32) * rows
    counts = torch.full_like(ends, rows)
    return Routing(*(t.to(device) for t in (chosen, order, order.argsort(), ends, counts)))


class Layer(nn.Module):
    """One transformer layer: the unit that every implementation shards."""

    def __init__(self, shape: LayerShape, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.attention_norm, self.mlp_norm = RMSNorm(shape.width), RMSNorm(shape.width)
        self.attention: nn.Module
        if isinstance(shape.attention, Attention):
            self.attention = SelfAttention(shape.width, shape.attention)
        else:
            self.attention = LatentSelfAttention(shape.width, shape.attention)
        if shape.experts is not None:
            self.mlp: nn.Module = MixtureOfExperts(shape.width, shape.experts)
        else:
            self.mlp = GatedMLP(shape.width, shape.mlp_hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self._compute, x, use_reentrant=False)
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights of the usual size; norms at one. Works on whatever part of a parameter is here."""
        for name, parameter in self.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if "norm" in name:
                local.fill_(1.0)
            else:
                local.normal_(std=0.02)


class Stack(nn.Module):
    """Layers in a row; no embedding and no head, so that a few layers are measured by themselves."""

    def __init__(self, shape: LayerShape, layers: int, recompute: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape, recompute) for _ in range(layers))

    def bind(self, tokens: int, device: torch.device | str, dtype: torch.dtype) -> None:
        """Give the layers what does not depend on the input: positions and the drawn routing."""
        shape = self.shape
        a = shape.attention
        dim = a.head_dim if isinstance(a, Attention) else a.rope_dim
        rope = rope_table(shape.sequence, dim, device, dtype)
        routing = draw_routing(tokens, shape.experts, device) if shape.experts is not None else None
        for layer in self.layers:
            layer.attention.rope = rope
            if routing is not None:
                layer.mlp.routing = routing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()
