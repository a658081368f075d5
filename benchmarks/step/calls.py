"""Python calls per layer and step: host work that can be counted without a device, and does not vary.

What a layer adds is the difference between models of two depths: what happens once per step drops out.
"""

from __future__ import annotations

import cProfile
import pstats
from typing import Any

import torch

from .case import Case
from .implementations import IMPLEMENTATIONS
from .wire import Wire, join

__all__ = ["calls_per_layer"]

_DEPTHS = (2, 4)
_WARMUP = 3


def calls_per_layer(name: str, ranks: int) -> list[dict[str, Any]]:
    """One row for implementation ``name``, counted in this process on the CPU."""
    torch.autograd.set_multithreading_enabled(False)  # the profiler sees one thread
    join(ranks, Wire(payload="nothing"))
    cases = [Case("small-dense", layers, 128, ranks, payload="nothing") for layers in _DEPTHS]
    shallow, deep = (_calls(case, name) for case in cases)
    return [{"implementation": name, "calls_per_layer": (deep - shallow) / (_DEPTHS[1] - _DEPTHS[0])}]


def _calls(case: Case, name: str) -> int:
    device = torch.device("cpu")
    trainer = IMPLEMENTATIONS[name](case, device)
    trainer.stack.bind(case.tokens, device, torch.bfloat16)
    x = torch.zeros(case.batch, case.shape.sequence, case.shape.width, dtype=torch.bfloat16).requires_grad_()
    profiler = cProfile.Profile()
    for step in range(_WARMUP + 1):
        if step == _WARMUP:
            profiler.enable()
        trainer.forward_backward(x)
        profiler.disable()
        trainer.stack.zero_grad(set_to_none=True)
        x.grad = None
    return int(pstats.Stats(profiler).total_calls)
