"""The step benchmark's layers as workloads, to calibrate a card for them and to predict its rows."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from benchmarks.step.layers import Stack
from benchmarks.step.shapes import MODELS
from torch import Tensor, nn

from ragged_fsdp.predict.workload import Workload, kinds_of

__all__ = ["CALIBRATED", "stack_workload"]

CALIBRATED: dict[str, tuple[int, ...]] = {
    "llama-3-70b": (1, 2),
    "gpt-oss-120b": (1, 2),
    "deepseek-v3": (1, 2),
}
"""Sequences of the calibration runs, by model."""


@cache
def stack_workload(name: str, layers: int = 1, sequence: int | None = None) -> Workload:
    """``layers`` of the benchmark's model without embedding and head; ``sequence`` if not its own."""
    shape = MODELS[name] if sequence is None else replace(MODELS[name], sequence=sequence)

    def build() -> nn.Module:
        with torch.device("meta"):
            return Stack(shape, 1).to(torch.bfloat16)

    def loss(model: nn.Module, sequences: int, seq_len: int, device: torch.device) -> Tensor:
        assert isinstance(model, Stack)
        bound = sequences, device
        if getattr(model, "bound", None) != bound:
            model.bind(sequences * seq_len, device, torch.bfloat16)
            model.bound = bound
        x = torch.randn(sequences, seq_len, shape.width, device=device, dtype=torch.bfloat16)
        return model(x.requires_grad_())

    with torch.device("meta"):
        whole = Stack(shape, layers)
    (*kinds, root), order = kinds_of(whole, whole.layers)
    root = replace(root, signature=f"root of {name}")  # it has no parameters to tell it by
    return Workload(
        name,
        (*kinds, root),
        order,
        build,
        lambda model: model.layers,
        loss,
        lambda _: 0.0,
        shape.width,
        shape.experts.per_token if shape.experts is not None else 0,
    )
