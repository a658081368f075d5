"""How even the trainable elements of a layer with LoRA adapters are, in one buffer and in two.

    python benchmarks/planner/adapters.py [--out benchmarks/planner/adapters.json]

A Llama-3-70B layer in bf16, frozen, with adapters on its seven matrices, as ``fully_shard`` plans it.
"Fullest" is what the rank with most trainable elements has, "reduced" the elements a rank receives of the
reduction, padding included, both relative to the even share. Needs no process group and no device.
"""

import argparse
import json
import platform
from pathlib import Path

import torch

from ragged_fsdp.fsdp.parts.plan import GroupTensors, make_plan, split_frozen
from ragged_fsdp.fsdp.reduce.layout import grad_layout
from ragged_fsdp.planner import fullest_numel

HIDDEN, KV, FFN = 8192, 1024, 28672
MATRICES = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (KV, HIDDEN),
    "v_proj": (KV, HIDDEN),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (FFN, HIDDEN),
    "up_proj": (FFN, HIDDEN),
    "down_proj": (HIDDEN, FFN),
}
RANKS = (8, 16, 64, 256, 1024)


def layer(rank: int) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Shapes of the layer's tensors, and whether they train, with adapters of so many dimensions."""
    tensors: dict[str, tuple[tuple[int, ...], bool]] = {}
    for name, (rows, columns) in MATRICES.items():
        tensors[f"{name}.base_layer.weight"] = (rows, columns), False
        tensors[f"{name}.lora_A.weight"] = (rank, columns), True
        tensors[f"{name}.lora_B.weight"] = (rows, rank), True
    return tensors | dict.fromkeys(("input_layernorm", "post_attention_layernorm"), ((HIDDEN,), False))


def balance(rank: int, ranks: int) -> dict[str, float]:
    """The figures of one case."""
    tensors = layer(rank)
    trains = [trained for _, trained in tensors.values()]

    def group(indices: list[int], split_off: bool) -> GroupTensors:
        names, shapes = list(tensors), [shape for shape, _ in tensors.values()]
        own = [names[i] for i in indices], [shapes[i] for i in indices]
        count = len(indices)
        return GroupTensors(*own, [1] * count, [torch.bfloat16] * count, None, split_off)

    def figures(indices: list[int], split_off: bool) -> tuple[float, float]:
        plan = make_plan(group(indices, split_off), ranks)
        trained = [at for at, i in enumerate(indices) if trains[i]]
        even = sum(plan.layout.specs[at].numel for at in trained) / ranks
        reduced = grad_layout(plan, [trains[i] for i in indices]).layout.shard_numel
        return fullest_numel(plan.layout, trained) / even, reduced / even

    everything = list(range(len(tensors)))
    before = figures(everything, False)
    parts = split_frozen(group(everything, False), ranks, trains)
    after = figures(parts[-1], len(parts) > 1)
    names = ("fullest in one buffer", "reduced of one buffer", "fullest", "reduced")
    return {"rank": rank, "ranks": ranks} | dict(zip(names, (*before, *after)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    out = parser.parse_args().out
    cases = [balance(rank, ranks) for rank in (8, 64) for ranks in RANKS]
    for case in cases:
        print("  ".join(f"{name} {value:.4g}" for name, value in case.items()))
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    out.write_text(
        json.dumps({"command": "python benchmarks/planner/adapters.py", **versions, "cases": cases}, indent=1)
    )


if __name__ == "__main__":
    main()
