"""A step with optimizer state on the device and on the host: time, memory after it, and its peak.

Layers of Llama-3-70B as rank 0 of so many ranks, 8192 tokens per rank, bf16 computation over fp32 weights and
sums, ``fully_shard`` as it comes, collectives priced for nodes of eight. The two ways of an optimizer run in
one process, alternating in rounds, on the same model.
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

import torch

__all__ = ["cases", "measure"]

_ROUNDS, _WARMUP, _STEPS = 2, 2, 3
_MIB = 1 << 20


def cases(small: bool) -> list[dict[str, Any]]:
    """What is measured: optimizers, at 64 ranks and, for the default one, at 8."""
    large = {"model": "llama-3-70b", "layers": 4, "tokens": 8192}
    shape = {"model": "small-dense", "layers": 2, "tokens": 1024} if small else large
    names = ("FusedAdamW", "torch AdamW(fused)", "AdamW8bit")
    kinds = [*((name, 64) for name in names), ("FusedAdamW", 8), ("Muon", 64)]
    return [{"row": f"{name} {ranks}", "optimizer": name, "ranks": ranks, **shape} for name, ranks in kinds]


def _optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    from ragged_fsdp.optim import AdamW8bit, FusedAdamW, Muon

    if name == "torch AdamW(fused)":
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if name == "Muon":
        return Muon(model.named_parameters(), lr=1e-5)
    return {"FusedAdamW": FusedAdamW, "AdamW8bit": AdamW8bit}[name](model.named_parameters(), lr=1e-5)


def measure(case: dict[str, Any]) -> list[dict[str, Any]]:
    """One row: both ways of one optimizer."""
    from benchmarks.step.case import Case
    from benchmarks.step.measure import prepare
    from benchmarks.step.network import network_of

    from ragged_fsdp.optim import block_policy, offload_state

    options = (("orig_param_policy", block_policy()),) if case["optimizer"] == "AdamW8bit" else ()
    shape = {key: case[key] for key in ("model", "layers", "tokens", "ranks")}
    step_case = Case(**shape, wires=("h200-400g",), allocator="expandable", options=options)
    run = prepare(step_case, "ours")
    run.wire.network = network_of("h200-400g")
    model = run.trainer.stack
    found: dict[str, Any] = {}
    times: dict[str, list[float]] = {"device": [], "host": []}
    updates: dict[str, list[float]] = {"device": [], "host": []}
    for _ in range(_ROUNDS):
        for where in times:
            optimizer = _optimizer(case["optimizer"], model)
            if where == "host":
                offload_state(optimizer)
            torch.cuda.synchronize()
            for step in range(_WARMUP + _STEPS):
                if step == _WARMUP:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                events[0].record()
                run.trainer.forward_backward(run.x)
                run.wire.drain()
                events[1].record()
                optimizer.step()
                optimizer.zero_grad()
                run.x.grad = None
                events[2].record()
                torch.cuda.synchronize()
                if step >= _WARMUP:
                    times[where].append(events[0].elapsed_time(events[2]))
                    updates[where].append(events[1].elapsed_time(events[2]))
            held = torch.cuda.memory_allocated()
            peak = torch.cuda.max_memory_allocated() / _MIB
            del optimizer
            gc.collect()
            state = (held - torch.cuda.memory_allocated()) / _MIB
            found[where] = {"state_mib_on_device": round(state, 2), "peak_mib": round(peak, 1)}
    shard_numel = sum(p.to_local().numel() for p in model.parameters())
    for where in times:
        found[where] |= {
            "step_ms": round(statistics.median(times[where]), 2),
            "update_ms": round(statistics.median(updates[where]), 2),
        }
    ratio = found["host"]["step_ms"] / found["device"]["step_ms"]
    return [{**case, "shard_numel": shard_numel, **found, "ratio": round(ratio, 4)}]
