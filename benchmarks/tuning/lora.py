"""LoRA on a frozen bf16 base: peak memory and tokens per second, ours beside FSDP2.

All 32 layers of Llama-3-8B with adapters of rank 16 on their seven matrices, every layer recomputed in
backward, 8192 tokens per rank, as rank 0 of 8 in one node. Embedding and head are left out. Implementations
differ in ``fully_shard`` alone; "codes" rows gather the frozen matrices as 8-bit codes, the "frozen" row
stores them so. Losses mean nothing here, and differ between rows: a gather delivers rank 0's part for every
rank, in FSDP2 rows of the same matrix, in ours a slice of the layer's buffer, with pieces of other matrices
and norms. Shapes, bytes and launches are those of true weights; the data of
products, and so their power and the clock, are not: what that adds to a row's time was not measured.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["cases", "measure"]

_RANK, _SCALE = 16, 2.0
_WARMUP, _STEPS = 2, 4
_MIB = 1 << 20


class LoRALinear(nn.Module):
    """A frozen matrix and two small ones that train."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.base = nn.Linear(columns, rows, bias=False)
        self.base.weight.requires_grad_(False)
        self.lora_a = nn.Linear(columns, _RANK, bias=False)
        self.lora_b = nn.Linear(_RANK, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.base(x), self.lora_b(self.lora_a(x)), alpha=_SCALE)


def cases(small: bool) -> list[dict[str, Any]]:
    """Implementations of one setting."""
    large = {"model": "llama-3-8b", "layers": 32, "tokens": 8192}
    shape = {"model": "small-dense", "layers": 2, "tokens": 1024} if small else large
    rows = ("fsdp2", "ours", "ours, float8 codes", "ours, int8 codes", "ours, frozen int8")
    return [{"row": row, "ranks": 8, **shape} for row in rows]


def _draw_codes(codes: torch.Tensor) -> None:
    """Codes at random whose bytes, four at a time, are small fp32 numbers: 0 to 59, a quarter -128 to -69.

    A gather delivers rank 0's part for every rank, so codes arrive where scales lie.
    """
    values = torch.randint(0, 60, codes.shape, device=codes.device, dtype=torch.int16)
    values -= 128 * (torch.rand(codes.shape, device=codes.device) < 0.23).to(torch.int16)
    codes.view(torch.int8).copy_(values)


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row."""
    from benchmarks.step.layers import Stack
    from benchmarks.step.network import network_of
    from benchmarks.step.shapes import MODELS
    from benchmarks.step.wire import Wire, join
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp import fully_shard as torch_fully_shard
    from torch.utils.checkpoint import checkpoint

    from ragged_fsdp import BlockCodes, encode_frozen, fully_shard
    from ragged_fsdp.frozen_codes import CodedWeight
    from ragged_fsdp.optim import FusedAdamW

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    torch.manual_seed(0)
    wire = Wire()
    join(case["ranks"], wire)
    wire.network = network_of("h200-400g")
    mesh = init_device_mesh("cuda", (case["ranks"],))
    shape = MODELS[case["model"]]
    stored_as_codes = case["row"] == "ours, frozen int8"
    with device if stored_as_codes else torch.device("meta"):
        stack = Stack(shape, case["layers"])
        for layer in stack.layers:
            for part in (layer.attention, layer.mlp):
                for name, child in list(part.named_children()):
                    setattr(part, name, LoRALinear(*child.weight.shape))
            for norm in (layer.attention_norm, layer.mlp_norm):
                norm.requires_grad_(False)
    stack.to(torch.bfloat16)
    if stored_as_codes:
        for layer in stack.layers:
            layer.reset_parameters()
        encode_frozen(stack, lambda name, weight: BlockCodes("int8"))
        for parameter in stack.parameters():
            if isinstance(parameter, CodedWeight):
                _draw_codes(parameter.codes)
    shard, options = (torch_fully_shard if case["row"] == "fsdp2" else fully_shard), {}
    if case["row"].endswith("codes"):
        kind = BlockCodes("float8_e4m3fn" if "float8" in case["row"] else "int8")
        options["gather_policy"] = lambda name, p: None if p.requires_grad or p.ndim < 2 else kind
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in stack.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True, **options)
    shard(stack, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    if not stored_as_codes:
        stack.to_empty(device=device)
        for layer in stack.layers:
            layer.reset_parameters()
    torch.cuda.empty_cache()
    stack.bind(case["tokens"], device, torch.bfloat16)
    trained = [p for p in stack.parameters() if p.requires_grad]
    make = torch.optim.AdamW if case["row"] == "fsdp2" else FusedAdamW
    optimizer = make(trained, lr=1e-4, **({"fused": True} if case["row"] == "fsdp2" else {}))
    x = torch.randn(case["tokens"] // shape.sequence, shape.sequence, shape.width, device=device)
    x = x.to(torch.bfloat16)
    times = []
    for step in range(_WARMUP + _STEPS):
        if step == _WARMUP:
            torch.cuda.synchronize()
            wire.reset_counts()
            torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = stack(x)
        loss.backward()
        wire.drain()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        if step >= _WARMUP:
            times.append(start.elapsed_time(end))
    if not torch.isfinite(loss):  # products of NaN draw less power, and are faster
        raise FloatingPointError(f"{case['row']}: the loss is {loss.item()}")
    step_ms = statistics.median(times)
    return [
        {
            **case,
            "step_ms": round(step_ms, 2),
            "tokens_per_s": round(case["tokens"] / step_ms * 1e3),
            "peak_allocated_mib": round((torch.cuda.max_memory_allocated() - wire.pool_bytes) / _MIB, 1),
            "peak_reserved_mib": round((torch.cuda.max_memory_reserved() - wire.pool_bytes) / _MIB, 1),
            "sharded_mib": round(sum(p.to_local().nbytes for p in stack.parameters()) / _MIB, 1),
            "moved_mib": {k: round(v / _STEPS / _MIB, 1) for k, v in wire.moved_bytes.items()},
            "loss": float(loss.detach()),
        }
    ]
