"""Python calls of a step, and the files they cross: host work that can be counted without a device or noise.

What a layer adds is the difference between models of two depths: what happens once per step drops out. Files
are counted in a steady step of the deeper model, forward and backward apart: how many of the implementation's
own a reader must open to follow it, and how often a call enters another one than the call before it.
"""

from __future__ import annotations

import cProfile
import importlib
import pstats
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .case import Case
from .implementations import Trainer, build
from .wire import Wire, join

__all__ = ["DEPTHS", "calls_per_layer"]

DEPTHS = (2, 4)
_WARMUP = 3
_OWN_FILES = {"ours": "ragged_fsdp", "fsdp2": "torch.distributed.fsdp._fully_shard"}


def calls_per_layer(name: str, ranks: int) -> list[dict[str, Any]]:
    """One row for implementation ``name``, counted in this process on the CPU."""
    torch.autograd.set_multithreading_enabled(False)  # the profiler sees one thread
    torch.set_num_threads(1)  # nothing is timed, and threads would wait for each other on a busy machine
    join(ranks, Wire(payload="nothing"))
    cases = [Case("small-dense", layers, 128, ranks, payload="nothing") for layers in DEPTHS]
    (shallow, _), (deep, (trainer, x)) = (_calls(case, name) for case in cases)
    row = {"implementation": name, "calls_per_layer": (deep - shallow) / (DEPTHS[1] - DEPTHS[0])}
    package = next((home for start, home in _OWN_FILES.items() if name.startswith(start)), None)
    return [row if package is None else row | _crossed(trainer, x, _folder(package))]


def _calls(case: Case, name: str) -> tuple[int, tuple[Trainer, torch.Tensor]]:
    device = torch.device("cpu")
    trainer = build(name, case, device)
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
    return int(pstats.Stats(profiler).total_calls), (trainer, x)


def _folder(package: str) -> Path:
    return Path(str(importlib.import_module(package).__file__)).parent


def _crossed(trainer: Trainer, x: torch.Tensor, folder: Path) -> dict[str, Any]:
    """The files of ``folder`` that a steady forward and a steady backward enter."""
    loss, forward = _entered(lambda: trainer.stack(x), folder)
    _, backward = _entered(loss.backward, folder)
    found: dict[str, Any] = {}
    for direction, files in (("forward", forward), ("backward", backward)):
        found[f"{direction}_files"] = len(set(files))
        found[f"{direction}_file_changes"] = sum(a != b for a, b in pairwise(files))
    return found | {"files": {"forward": sorted(set(forward)), "backward": sorted(set(backward))}}


def _entered(program: Callable[[], Any], folder: Path) -> tuple[Any, list[str]]:
    """What ``program`` returns, and the file of every call below ``folder``, in order."""
    files: list[str] = []
    start = f"{folder}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(start):
            files.append(name.removeprefix(start))

    sys.setprofile(note)
    try:
        return program(), files
    finally:
        sys.setprofile(None)
