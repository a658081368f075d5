"""Section 6.2 of the veScale-FSDP paper on a modelled cluster: weak, strong and model scaling.

The paper trains internal mixtures of experts whose shapes it does not give. Ours have their sizes: 256
experts of which 8 are active, 800B parameters in 64 layers; other sizes scale depth and expert width alike.
GPUs and network are the paper's (H800 roofline, its Table 1's rates). FSDP over 1024 GPUs, replicas beyond,
layers computed again. Expert parallelism is the best of 1 to 256 for each point, as the paper tunes it; the
paper also tunes sequence parallelism, which is not modelled.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ragged_fsdp.predict.card import roofline_card
from ragged_fsdp.predict.network import PROFILES
from ragged_fsdp.predict.step import Prediction, Setup, predict
from ragged_fsdp.predict.workload import Workload, workload_of

__all__ = ["draw", "model_scaling", "strong_scaling", "weak_scaling"]

_SIZES = {"400B": (45, 1792), "800B": (64, 2560), "1.2T": (78, 3136), "1.6T": (90, 3584), "2.4T": (111, 4416)}
"""Layers and width of an expert."""
_GPUS = (1024, 2048, 4096, 8192)
_SEQ_LEN = 2048


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


def _predict(size: str, gpus: int, tokens_per_gpu: int, sharding: str = "ragged") -> Prediction:
    setup = Setup(
        gpus=gpus,
        tokens_per_gpu=tokens_per_gpu,
        seq_len=min(_SEQ_LEN, tokens_per_gpu),
        sharding=sharding,
        activation_checkpointing=1,
        compile=True,
    )
    card, network = roofline_card("h800"), PROFILES["paper"]
    parts = (1, 8, 32, 64, 128, 256) if sharding == "ragged" else (1,)
    options = [replace(setup, replicas=gpus // 1024, ep=ep) for ep in parts]
    found = [predict(_model(size), option, card, network) for option in options]
    return min(found, key=lambda p: p.seconds.value)


def weak_scaling() -> list[dict[str, Any]]:
    """800B, a fixed number of tokens per GPU: throughput over that of 1K GPUs; the paper: near linear."""
    rows = []
    for tokens in (2048, 4096, 8192, 16384):
        for sharding in ("ragged", "fsdp2"):
            speeds = [_predict("800B", gpus, tokens, sharding).tokens_per_second for gpus in _GPUS]
            ratios = [round(speed / speeds[0], 2) for speed in speeds]
            rows.append({"tokens_per_gpu": tokens, "sharding": sharding, "over_1K": dict(zip(_GPUS, ratios))})
    return rows


def strong_scaling() -> list[dict[str, Any]]:
    """800B, a fixed batch: throughput over that of 1K GPUs; the paper: 3.4 at 8K with 16M, then linear."""
    rows = []
    for batch in (16 << 20, 128 << 20):
        for sharding in ("ragged", "fsdp2"):
            found = [_predict("800B", gpus, batch // gpus, sharding) for gpus in _GPUS]
            speeds = [p.tokens_per_second for p in found]
            ratios = {gpus: round(speed / speeds[0], 2) for gpus, speed in zip(_GPUS, speeds)}
            rows.append({"batch_tokens": batch, "sharding": sharding, "over_1K": ratios})
    return rows


def model_scaling() -> list[dict[str, Any]]:
    """1K GPUs, 8K tokens each: MFU by size; the paper: it improves slightly up to 2.4T."""
    rows = []
    for size in _SIZES:
        for sharding in ("ragged", "fsdp2"):
            found = _predict(size, 1024, 8192, sharding)
            rows.append(
                {
                    "size": size,
                    "parameters": _model(size).numel,
                    "sharding": sharding,
                    "mfu": round(found.mfu, 4),
                    "step_s": round(found.seconds.value, 2),
                    "gib": round(found.memory_bytes / 2**30, 1),
                    "binds": found.binds,
                }
            )
    return rows


def draw(tables: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """The three tables as one figure."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

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
