"""Which curves a run of the benchmark trains: a scan of learning rates, then the curves at the best of them.

The scan is the same for every optimizer: six learning rates, each twice the one before, on one process. The
best (by held-out loss) is the rate of the curves on several ranks. Both are repeated with more seeds, which
says how much of a difference is chance. Muon's grid lies higher than AdamW's because its best rate does; each
grid must reach past its best value on both sides, and the report says so if it does not. A rate is that of
all parameters: the AdamW inside Muon (embeddings, head, norms) has no rate of its own to tune.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragged_fsdp.models import MoEConfig

__all__ = [
    "LEARNING_RATES",
    "MODELS",
    "SHARDINGS",
    "TINY_LEARNING_RATES",
    "TINY_MODELS",
    "Setting",
    "centre_out",
]

MODELS = {
    "dense": MoEConfig(
        hidden=256, layers=4, heads=4, kv_heads=2, experts=1, experts_per_token=1, expert_hidden=768
    ),
    "moe": MoEConfig(
        hidden=256, layers=4, heads=4, kv_heads=2, experts=8, experts_per_token=2, expert_hidden=256
    ),
}
TINY_MODELS = {
    "dense": MoEConfig(
        hidden=64, layers=2, heads=2, kv_heads=1, experts=1, experts_per_token=1, expert_hidden=128
    ),
    "moe": MoEConfig(
        hidden=64, layers=2, heads=2, kv_heads=1, experts=4, experts_per_token=2, expert_hidden=64
    ),
}
LEARNING_RATES = {
    "adamw": (0.000125, 0.00025, 0.0005, 0.001, 0.002, 0.004),
    "adamw8bit": (0.000125, 0.00025, 0.0005, 0.001, 0.002, 0.004),
    "muon": (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016),
}
TINY_LEARNING_RATES = {
    "adamw": (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016),
    "adamw8bit": (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016),
    "muon": (0.004, 0.008, 0.016, 0.032, 0.064, 0.128),
}
SHARDINGS = ("ragged_fsdp", "ddp")
"""How the curves on several ranks are spread over them."""


@dataclass(frozen=True)
class Setting:
    """What every curve of a run has in common."""

    models: dict[str, MoEConfig]
    learning_rates: dict[str, tuple[float, ...]]
    seq_len: int
    batch: int
    steps: int
    warmup: int = 20


def centre_out(values: Sequence[float]) -> list[float]:
    """The values from the middle outwards: what a run cut short leaves is the middle of the grid."""
    middle = (len(values) - 1) / 2
    return [values[i] for i in sorted(range(len(values)), key=lambda i: abs(i - middle))]
