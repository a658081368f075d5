"""Forward and backward of a sharded model as one CUDA graph: what replaying it saves on the host.

Nothing of the runtime runs in a replay: gathers, computation and reductions are launched with one call, at
the addresses of the capture. It needs what every captured step needs: static inputs, the same work each time.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch
from benchmarks.device_time import device_ms

from .case import Case
from .measure import Run, host_ms

__all__ = ["replayed"]


def replayed(case: Case, run: Run) -> dict[str, Any]:
    """Times of a captured step, as ``graph_*``; ``graph_error`` if it cannot be captured."""
    try:
        graph, loss = _capture(run)
    except RuntimeError as error:
        return {"graph_error": str(error).splitlines()[0]}
    times = [device_ms(graph.replay) for _ in range(case.iterations)]
    trainer = replace(run.trainer, forward_backward=lambda x: graph.replay(), update=None)
    host = [host_ms(replace(run, trainer=trainer)) for _ in range(case.iterations)]
    return {
        "graph_forward_backward_ms": round(statistics.median(times), 3),
        "graph_host_ms": round(statistics.median(host), 3),
        "graph_loss": float(loss.detach()),
    }


def _capture(run: Run) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Capture a step that starts, as eager ones do, without gradients."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run.trainer.forward_backward(run.x)
            _drop_gradients(run)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run.trainer.forward_backward(run.x)
    return graph, loss


def _drop_gradients(run: Run) -> None:
    run.trainer.stack.zero_grad(set_to_none=True)
    run.x.grad = None
