"""Would it pay to write the weight gradients of linear layers straight into the gradient buffer?

Autograd makes a weight gradient in the compute dtype, and the reduce-scatter sums fp32: each gradient is cast
into its slot of the buffer once. A matrix product can write fp32 itself (``out_dtype``), which saves the cast
and the bf16 gradient, and writes twice the bytes. The all-to-all reduction sends bf16 gradients as they are.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from benchmarks.device_time import device_ms

from .shapes import Attention, LayerShape

__all__ = ["linear_shapes", "study"]

_STEPS = 12
_WARMUP = 4


def linear_shapes(shape: LayerShape) -> list[tuple[int, int]]:
    """(out, in) of the linear layers of a dense layer."""
    a = shape.attention
    if not isinstance(a, Attention) or not shape.mlp_hidden:
        raise ValueError(f"{shape.name}: expected plain attention and a dense MLP")
    q, kv, width, hidden = a.heads * a.head_dim, a.kv_heads * a.head_dim, shape.width, shape.mlp_hidden
    return [
        (q, width),
        (kv, width),
        (kv, width),
        (width, q),
        (hidden, width),
        (hidden, width),
        (width, hidden),
    ]


def study(shape: LayerShape, tokens: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds for the weight gradients of one layer, by the way they reach the reduction."""
    inputs, grads, slots = [], [], []
    for rows, columns in linear_shapes(shape):
        inputs.append(torch.randn(tokens, columns, device=device, dtype=torch.bfloat16))
        grads.append(torch.randn(tokens, rows, device=device, dtype=torch.bfloat16))
        slots.append(torch.empty(rows, columns, device=device))
    pairs = list(zip(grads, inputs, slots))

    def as_they_are() -> None:
        for grad, x, _ in pairs:
            torch.mm(grad.t(), x)

    def cast_into_the_buffer() -> None:
        torch._foreach_copy_(slots, [torch.mm(grad.t(), x) for grad, x, _ in pairs])

    def written_into_the_buffer() -> None:
        for grad, x, slot in pairs:
            torch.mm(grad.t(), x, out_dtype=torch.float32, out=slot)

    ways = (as_they_are, cast_into_the_buffer, written_into_the_buffer)
    times = {f"{way.__name__}_ms": [] for way in ways}
    for step in range(_WARMUP + _STEPS):  # in turns: the clock follows the temperature
        for way in ways:
            took = device_ms(way)
            if step >= _WARMUP:
                times[f"{way.__name__}_ms"].append(took)
    found = {name: round(statistics.median(values), 3) for name, values in times.items()}
    return {"model": shape.name, "tokens": tokens, **found}
