"""A whole model from measured stacks of two depths: what a layer more costs, times the layers it has.

Composed, not measured: the time of a stack is taken as a fixed part, the gather before the first layer and
the reduction behind the last, and a part per layer. Embedding and head are left out of time and arithmetic
alike. The arithmetic is that of the matrices a token passes and of causal attention, without what is computed
again: the usual definition of model FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .report import LABELS, case_of, markdown_table
from .shapes import Attention, LayerShape, layer_numel

__all__ = ["PEAK_TFLOPS", "Composed", "compose", "composed_table", "flops_per_token"]

PEAK_TFLOPS = 989.0
"""Dense bf16 products of an H200 or H100 SXM, by its data sheet."""


class Composed(NamedTuple):
    """One implementation's step of a whole model, with the update."""

    implementation: str
    wire: Any
    step_ms: float
    tokens_per_s: float
    """Of one GPU."""
    mfu: float


def flops_per_token(shape: LayerShape) -> float:
    """Forward and backward of one layer."""
    numel, a = layer_numel(shape), shape.attention
    if shape.experts is not None:
        e = shape.experts
        per_expert = 3 * shape.width * e.hidden + (2 * e.hidden + shape.width if e.bias else 0)
        numel -= (e.count - e.per_token) * per_expert
    if isinstance(a, Attention):
        scored, mixed = a.heads * a.head_dim, a.heads * a.head_dim
    else:
        scored, mixed = a.heads * (a.nope_dim + a.rope_dim), a.heads * a.v_dim
    return 6.0 * numel + 3.0 * shape.sequence * (scored + mixed)


def compose(results: Iterable[dict[str, Any]]) -> list[Composed]:
    """The published depth, of each implementation and wire that two results with other depths have."""
    shallow, deep = sorted(results, key=lambda result: case_of(result).layers)
    few, many = case_of(shallow), case_of(deep)
    if few.layers == many.layers or not few.shape.layers:
        got = f"{few.model} x{few.layers} and {many.model} x{many.layers}"
        raise ValueError(f"results: expected two depths of a published model, got {got}")
    for name in ("model", "tokens", "ranks", "replicas", "reduce_dtype", "recompute", "sequence", "carveout"):
        if getattr(few, name) != getattr(many, name):
            raise ValueError(
                f"results: expected the same {name}, got {getattr(few, name)!r} and {getattr(many, name)!r}"
            )
    by_depth = [
        {(row["implementation"], row["wire"]): row["step_ms"] for row in result["rows"] if "step_ms" in row}
        for result in (shallow, deep)
    ]
    found = []
    for (name, wire), first in by_depth[0].items():
        if name == "none" or (name, wire) not in by_depth[1]:
            continue
        layer = (by_depth[1][name, wire] - first) / (many.layers - few.layers)
        step_ms = first + (few.shape.layers - few.layers) * layer
        rate = few.tokens / step_ms * 1e3
        done = rate * few.shape.layers * flops_per_token(few.shape)
        found.append(Composed(name, wire, step_ms, rate, done / PEAK_TFLOPS / 1e12))
    return found


def composed_table(results: Iterable[dict[str, Any]]) -> str:
    """For a document."""
    results = list(results)
    case = case_of(results[0])
    rows = [
        (LABELS[one.implementation], f"{one.step_ms:.0f}", f"{one.tokens_per_s:.0f}", f"{one.mfu:.1%}")
        for one in compose(results)
    ]
    head = ("implementation", "step ms", "tokens/s per GPU", "MFU")
    whole = f"{case.shape.name}, all {case.shape.layers} layers composed"
    title = f"**{whole}, {case.tokens} tokens per GPU, {case.ranks} GPUs**"
    return f"{title}\n\n{markdown_table([head, *rows])}"
