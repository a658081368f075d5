"""Measures one implementation on one case, in the process that calls it."""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .case import Case
from .implementations import Trainer, build
from .kernels import read_trace, summarise
from .network import network_of, wire_text
from .spin import spin_error, spin_ns
from .wire import LEVELS, Wire, join

__all__ = ["Run", "host_ms", "measure", "prepare", "timed"]

_GIB = 1 << 30
_MAX_SPIN_ERROR = 0.05
_Events = tuple[torch.cuda.Event, ...]


@dataclass
class Run:
    """One implementation on the device, its input, and the wire under it."""

    trainer: Trainer
    x: torch.Tensor
    wire: Wire


def prepare(case: Case, name: str) -> Run:
    """Build implementation ``name`` in this process."""
    device = torch.device("cuda", 0)
    if case.allocator == "expandable":
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    if case.carveout:
        torch._C._set_sm_carveout_experimental(case.carveout)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    wire = Wire(payload=case.payload, delivery=case.delivery)
    join(case.ranks, wire)
    trainer = build(name, case, device)
    trainer.stack.bind(case.tokens, device, torch.bfloat16)
    x = torch.randn(case.batch, case.shape.sequence, case.shape.width, device=device, dtype=torch.bfloat16)
    return Run(trainer, x.requires_grad_(), wire)


def measure(case: Case, name: str, trace_dir: Path | None = None) -> list[dict[str, Any]]:
    """Rows of results for implementation ``name``: one for each wire of the case."""
    run = prepare(case, name)
    rows = []
    for wire in case.wires if name != "none" else (None,):
        run.wire.network = network_of(wire)
        if wire is not None and (error := spin_error()) > _MAX_SPIN_ERROR:
            rows.append({"implementation": name, "error": f"the modelled wire is off by {error:.1%}"})
            continue
        row = {"implementation": name, "wire": wire, **timed(case, run)}
        if not math.isfinite(loss := row["loss"]):  # products of NaN are faster
            rows.append({"implementation": name, "error": f"the loss is {loss}: its times say nothing"})
            continue
        file = f"{case.model}-{case.ranks}-{name}-{wire_text(wire)}.json"
        trace = trace_dir / file if trace_dir else None
        rows.append(row | _profiled(run, trace))
    if name == "none" and case.payload == "repeat":
        _repeat_weights(run.trainer, case.ranks)
        rows[0]["repeated_weights"] = timed(case, run)
    return rows


def timed(case: Case, run: Run) -> dict[str, Any]:
    """Times, memory and bytes of the case's steps."""
    wire = run.wire
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(case.warmup):
        wire.reset_counts()
        loss = _step(run)
    times = [_events() for _ in range(case.iterations)]
    for events in times:
        loss = _step(run, events)
    torch.cuda.synchronize()
    peak = {
        "peak_allocated_gib": (torch.cuda.max_memory_allocated() - wire.pool_bytes) / _GIB,
        "peak_reserved_gib": (torch.cuda.max_memory_reserved() - wire.pool_bytes) / _GIB,
    }
    step_counts = {k: v // (case.iterations + 1) for k, v in wire.calls.items()}
    step_bytes = {k: v / (case.iterations + 1) / _GIB for k, v in wire.moved_bytes.items()}
    held = {k: [wire.held_s[k, level] * 1e3 / (case.iterations + 1) for level in LEVELS] for k in step_bytes}
    host = [host_ms(run) for _ in range(case.iterations)]
    forward_backward = [start.elapsed_time(middle) for start, middle, _ in times]
    return {
        "forward_backward_ms": round(statistics.median(forward_backward), 3),
        "forward_backward_all_ms": [round(t, 2) for t in forward_backward],
        "step_ms": round(statistics.median(start.elapsed_time(end) for start, _, end in times), 3),
        "host_ms": round(statistics.median(host), 3),
        "host_ms_per_layer": round(statistics.median(host) / case.layers, 4),
        **{key: round(value, 3) for key, value in peak.items()},
        "alloc_retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "moved_gib": {k: round(v, 3) for k, v in step_bytes.items()},
        "held_ms": {k: [round(ms, 3) for ms in levels] for k, levels in held.items()},
        "collectives": step_counts,
        "loss": float(loss.detach()),
    }


def _events() -> _Events:
    return tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))


def _step(run: Run, events: _Events | None = None) -> torch.Tensor:
    """One step; the time of forward and backward ends when the wire is empty again."""
    if events:
        events[0].record()
    loss = run.trainer.forward_backward(run.x)
    run.wire.drain()
    if events:
        events[1].record()
    _update(run)
    if events:
        events[2].record()
    return loss


def _update(run: Run) -> None:
    if run.trainer.update is not None:
        run.trainer.update()
    run.x.grad = None


def host_ms(run: Run) -> float:
    """How long the host needs to launch forward and backward, the device being idle at the start."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run.trainer.forward_backward(run.x)
    elapsed = time.perf_counter() - start
    run.wire.drain()
    _update(run)
    return elapsed * 1e3


def _profiled(run: Run, trace: Path | None) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA] + ([ProfilerActivity.CPU] if trace else [])) as profiler:
        for level in range(1 if run.wire.network.flat else len(LEVELS)):
            with run.wire.stream(level):
                spin_ns(1000)  # marks the wire's streams, the one inside the node first
            torch.cuda.synchronize()
        run.trainer.forward_backward(run.x)
        run.wire.drain()
        torch.cuda.synchronize()
    _update(run)
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        return {"kernels": summarise(read_trace(path))}


@torch.no_grad()
def _repeat_weights(trainer: Trainer, ranks: int) -> None:
    """Give the floor the weights the sharded runs see under the ``repeat`` payload: one part, repeated."""
    for layer in trainer.stack.layers:
        for parameter in layer.parameters():
            flat = parameter.view(-1)
            part = max(1, flat.numel() // ranks)
            for start in range(part, flat.numel(), part):
                chunk = flat[start : start + part]
                chunk.copy_(flat[: chunk.numel()])
