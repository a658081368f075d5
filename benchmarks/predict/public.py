"""Predictions beside published multi-node rows of others: FSDP on A100 and H100.

Nobody calibrated a card on those clusters: computation is a roofline, the network a profile. Each row names
its source. torchtitan and YaFSDP run fused norms, rotary embeddings and losses: they are predicted as
compiled. YaFSDP's page does not name its network; the rate of its cards is taken from one row (Llama 2 34B on
128 GPUs), the other fifteen are predicted with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from ragged_fsdp.predict.card import DEVICES, roofline_card
from ragged_fsdp.predict.network import PROFILES, Network
from ragged_fsdp.predict.step import Setup, predict
from ragged_fsdp.predict.workload import Workload, workload_of

__all__ = ["PUBLIC", "Public", "predicted_seconds"]

_LLAMA2 = {"vocab_size": "32000", "max_position_embeddings": "8192"}
_MODELS: dict[str, tuple[str, dict[str, str]]] = {
    "Llama 2 7B": ("LlamaConfig", _LLAMA2),
    "Llama 2 13B": (
        "LlamaConfig",
        _LLAMA2
        | {
            "hidden_size": "5120",
            "intermediate_size": "13824",
            "num_hidden_layers": "40",
            "num_attention_heads": "40",
            "num_key_value_heads": "40",
        },
    ),
    "Llama 2 34B": (
        "LlamaConfig",
        _LLAMA2
        | {
            "hidden_size": "8192",
            "intermediate_size": "22016",
            "num_hidden_layers": "48",
            "num_attention_heads": "64",
            "num_key_value_heads": "8",
        },
    ),
    "Llama 2 70B": (
        "LlamaConfig",
        _LLAMA2
        | {
            "hidden_size": "8192",
            "intermediate_size": "28672",
            "num_hidden_layers": "80",
            "num_attention_heads": "64",
            "num_key_value_heads": "8",
        },
    ),
    "Llama 3 8B": ("llama-3-8b", {}),
    "Llama 3 70B": ("llama-3-70b", {}),
}
_YAFSDP_CARD_GB_S = 5.6
"""From 4.27 s of Llama 2 34B on 128 GPUs with 2048 tokens, where the network binds."""
YAFSDP = "github.com/yandex/YaFSDP, README.md, column FSDP"
TITAN_A100 = "github.com/pytorch/torchtitan, docs/performance.md (2024), FSDP2 on 64 A100"
TITAN_H100 = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 3"


@dataclass(frozen=True)
class Public:
    """One published row."""

    source: str
    model: str
    gpus: int
    seq_len: int
    batch: int
    """Sequences of a GPU."""
    recomputed: float
    """Layers whose activations are computed again; of selective recomputation by operations, half of them."""
    hardware: str
    seconds: float
    note: str = ""


def _yafsdp() -> Iterator[Public]:
    rows = [
        ("Llama 2 7B", 64, 2048, 0, 0.90),
        ("Llama 2 7B", 64, 4096, 0, 1.21),
        ("Llama 2 7B", 64, 8192, 0, 2.29),
        ("Llama 2 7B", 128, 2048, 0, 0.97),
        ("Llama 2 7B", 128, 4096, 0, 1.22),
        ("Llama 2 7B", 128, 8192, 0, 2.31),
        ("Llama 2 13B", 128, 2048, 0, 1.76),
        ("Llama 2 13B", 128, 4096, 0, 2.14),
        ("Llama 2 34B", 128, 2048, 0, 4.27),
        ("Llama 2 34B", 256, 2048, 0, 4.50),
        ("Llama 2 34B", 256, 4096, 5, 5.81),
        ("Llama 2 70B", 256, 2048, 10, 8.87),
        ("Llama 2 70B", 256, 4096, 50, 11.93),
        ("Llama 3 8B", 64, 2048, 0, 1.10),
        ("Llama 3 8B", 64, 4096, 0, 1.48),
        ("Llama 3 70B", 256, 2048, 20, 9.76),
    ]
    for model, gpus, seq_len, recomputed, seconds in rows:
        yield Public(YAFSDP, model, gpus, seq_len, 1, recomputed, "a100-80g", seconds)


def _titan() -> Iterator[Public]:
    rows = [
        ("Llama 3 8B", 8192, 1, 16, 2904),
        ("Llama 3 8B", 8192, 1, 16, 2973),
        ("Llama 3 70B", 8192, 1, 80, 331),
        ("Llama 2 13B", 4096, 2, 0, 2162),
        ("Llama 2 13B", 4096, 2, 20, 1914),
        ("Llama 2 13B", 4096, 2, 20, 1904),
        ("Llama 2 70B", 4096, 1, 40, 355),
        ("Llama 2 70B", 4096, 2, 80, 353),
    ]
    for model, seq_len, batch, recomputed, tokens in rows:
        yield Public(TITAN_A100, model, 64, seq_len, batch, recomputed, "a100-80g", seq_len * batch / tokens)
    note = "at 500 W instead of 700"
    yield Public(TITAN_H100, "Llama 3 8B", 128, 8192, 2, 16, "h100", 8192 * 2 / 5605, note)


PUBLIC = (*_yafsdp(), *_titan())


@cache
def _workload(model: str) -> Workload:
    name, changes = _MODELS[model]
    return workload_of(name, changes)


def _network(row: Public) -> Network:
    if row.source == YAFSDP:
        return replace(PROFILES["a100-200g"], name="yafsdp", card_gb_s=_YAFSDP_CARD_GB_S)
    return PROFILES["a100-200g" if row.hardware.startswith("a100") else "h200-400g"]


def predicted_seconds(row: Public) -> float:
    """The step of ``row``; between every layer, every second and none computed again, a line."""
    workload = _workload(row.model)
    card = roofline_card(row.hardware)
    if row.source == TITAN_H100:  # as its page says: HBM2e of 2.4 TB/s, and 500 W: clocks go with the root
        slower = math.sqrt(500 / 700)
        card = replace(
            card,
            memory_gb_s=card.memory_gb_s * 2400 / DEVICES[row.hardware].memory_gb_s,
            matmul_tflops=card.matmul_tflops * slower,
            attention_tflops=card.attention_tflops * slower,
        )
    setup = Setup(
        gpus=row.gpus,
        tokens_per_gpu=row.seq_len * row.batch,
        seq_len=row.seq_len,
        sharding="fsdp2",
        reduce_dtype="bf16" if row.source == YAFSDP else "fp32",
        compile=True,
    )
    wire = _network(row)
    share = row.recomputed / len(workload.order)
    ends = (0, 2) if share <= 0.5 else (2, 1)
    low, high = (
        predict(workload, replace(setup, activation_checkpointing=every), card, wire).seconds.value
        for every in ends
    )
    at = share / 0.5 if share <= 0.5 else (share - 0.5) / 0.5
    return low + at * (high - low)
