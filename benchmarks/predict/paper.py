"""Section 6.2 of the veScale-FSDP paper on a modelled cluster: weak, strong and model scaling.

The paper trains internal mixtures of experts whose shapes it does not give, on "a Hopper cluster" that it
does not describe. Ours have its sizes: 256 experts of which 8 are active, 800B parameters in 64 layers; other
sizes scale depth and expert width alike. GPUs are H200 by their data sheet, the network is ``h200-400g``.
FSDP over 1024 GPUs, replicas beyond, layers computed again. Expert parallelism is the best of 1 to 128 that
fits, for ours and for FSDP2, as the paper tunes it; the paper also tunes sequence parallelism, which is not
modelled. Tokens that do not fit a GPU at once come in micro-batches, each of which reduces its gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ragged_fsdp.predict.card import roofline_card
from ragged_fsdp.predict.network import PROFILES
from ragged_fsdp.predict.step import Prediction, Setup, predict
from ragged_fsdp.predict.workload import Workload, workload_of

__all__ = ["best_setting", "draw", "model_scaling", "strong_scaling", "weak_scaling"]

_SIZES = {"400B": (45, 1792), "800B": (64, 2560), "1.2T": (78, 3136), "1.6T": (90, 3584), "2.4T": (111, 4416)}
"""Layers and width of an expert."""
_GPUS = (1024, 2048, 4096, 8192)
_SEQ_LEN = 2048
_EXPERT_PARALLEL = (1, 8, 32, 128)
_MOST_AT_ONCE = 32768
"""Tokens of a micro-batch: more do not fit."""


@cache
def _model(size: str) -> Workload:
    layers, width = _SIZES[size]
    changes = {
        "hidden_size": 6144,
        "num_hidden_layers": layers,
        "moe_intermediate_size": width,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    }
    return workload_of("Qwen3MoeConfig", {key: str(value) for key, value in changes.items()})


@dataclass(frozen=True)
class Best:
    """The best setting at one point."""

    prediction: Prediction
    """Of one micro-batch."""
    micro_batches: int

    @property
    def tokens_per_second(self) -> float:
        """An update after every micro-batch, rather than after all, is a thousandth of it."""
        return self.prediction.tokens_per_second

    def as_json(self) -> dict[str, Any]:
        found = self.prediction
        return {
            "ep": found.setup.ep,
            "micro_batches": self.micro_batches,
            "step_s": round(found.seconds.value * self.micro_batches, 2),
            "mfu": round(found.mfu, 4),
            "gib": round(found.memory_bytes / 2**30, 1),
            "fits": found.fits,
            "binds": found.binds,
        }


def best_setting(size: str, gpus: int, tokens_per_gpu: int, sharding: str) -> Best:
    """The fastest that fits; where nothing does, what needs least."""
    card, network = roofline_card("h200"), PROFILES["h200-400g"]
    found = []
    tokens = min(tokens_per_gpu, _MOST_AT_ONCE)
    while tokens >= _SEQ_LEN:
        setup = Setup(
            gpus=gpus,
            tokens_per_gpu=tokens,
            seq_len=_SEQ_LEN,
            replicas=gpus // 1024,
            sharding=sharding,
            activation_checkpointing=1,
            compile=True,
        )
        for ep in _EXPERT_PARALLEL:
            predicted = predict(_model(size), replace(setup, ep=ep), card, network)
            found.append(Best(predicted, tokens_per_gpu // tokens))
        tokens //= 2
    fitting = [best for best in found if best.prediction.fits]
    if fitting:
        return max(fitting, key=lambda best: best.tokens_per_second)
    return min(found, key=lambda best: best.prediction.memory_bytes)


def _scaling(points: Iterable[tuple[int, int]], **named: Any) -> list[dict[str, Any]]:
    """Throughput over that of the first point, for both ways to shard; points are GPUs and tokens of each."""
    points = list(points)
    rows = []
    for sharding in ("ragged", "fsdp2"):
        found = {gpus: best_setting("800B", gpus, tokens, sharding) for gpus, tokens in points}
        first = found[points[0][0]].tokens_per_second
        ratios = {gpus: round(best.tokens_per_second / first, 2) for gpus, best in found.items()}
        settings = {gpus: best.as_json() for gpus, best in found.items()}
        rows.append({**named, "sharding": sharding, "over_1K": ratios, "best": settings})
    ours, theirs = rows
    for gpus in ours["best"]:
        ahead = theirs["best"][gpus]["step_s"] / ours["best"][gpus]["step_s"]
        ours["best"][gpus]["times_as_fast_as_fsdp2"] = round(ahead, 2)
    return rows


def weak_scaling() -> list[dict[str, Any]]:
    """800B, a fixed number of tokens per GPU; the paper: near linear."""
    return [
        row
        for tokens in (2048, 4096, 8192, 16384)
        for row in _scaling(((gpus, tokens) for gpus in _GPUS), tokens_per_gpu=tokens)
    ]


def strong_scaling() -> list[dict[str, Any]]:
    """800B, a fixed batch; the paper: 3.4 at 8K GPUs with 16M tokens, linear with 128M."""
    return [
        row
        for batch in (16 << 20, 128 << 20)
        for row in _scaling(((gpus, batch // gpus) for gpus in _GPUS), batch_tokens=batch)
    ]


def model_scaling() -> list[dict[str, Any]]:
    """1K GPUs, 8K tokens each: MFU by size; the paper: it improves slightly up to 2.4T."""
    return [
        {"size": size, "parameters": _model(size).numel, "sharding": sharding}
        | best_setting(size, 1024, 8192, sharding).as_json()
        for size in _SIZES
        for sharding in ("ragged", "fsdp2")
    ]


def draw(tables: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The three tables as one figure."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "ragged-fsdp"  # the same figures give the same file
    figure, (weak, strong, model) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for axes, name, key in ((weak, "weak", "tokens_per_gpu"), (strong, "strong", "batch_tokens")):
        axes.plot(_GPUS, [gpus / _GPUS[0] for gpus in _GPUS], "k:", label="linear")
        for row in tables[name]:
            ratios = {int(gpus): ratio for gpus, ratio in row["over_1K"].items()}
            tokens = row[key]
            label = f"{tokens >> 20}M tokens" if tokens >= 1 << 20 else f"{tokens >> 10}K tokens per GPU"
            style = "-o" if row["sharding"] == "ragged" else "--s"
            axes.plot(
                list(ratios), list(ratios.values()), style, markersize=3, label=f"{label}, {row['sharding']}"
            )
        axes.set_title(f"{name} scaling, 800B")
        axes.set_xlabel("GPUs")
        axes.set_ylabel("throughput over that of 1K GPUs")
    strong.plot([_GPUS[-1]], [3.4], "r*", markersize=9, label="16M tokens, paper")
    for sharding, style in (("ragged", "-o"), ("fsdp2", "--s")):
        rows = [row for row in tables["model"] if row["sharding"] == sharding]
        sizes = [row["size"] for row in rows]
        model.plot(sizes, [100 * row["mfu"] for row in rows], style, markersize=3, label=sharding)
    model.set_title("model scaling, 1K GPUs, 8K tokens each")
    model.set_ylabel("MFU (%)")
    model.set_ylim(bottom=0)
    for axes in (weak, strong, model):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
