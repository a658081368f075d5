"""Runs a few layers on this machine's GPU and writes down how long they take: the calibration card.

For each model one layer of each kind runs with embedding and head, in bf16 with random weights, at three
numbers of tokens: forward, backward, and backward with recomputation, timed by CUDA events at the boundaries
of each layer; allocated memory is read there too. Then the copies and sums of FSDP, and AdamW.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ragged_fsdp.predict.card import DEVICES, Card, LayerCard, Point, device_named, roofline_card
from ragged_fsdp.predict.costs import Roofline, count_costs, grad_bytes
from ragged_fsdp.predict.workload import Phases, Workload
from ragged_fsdp.torch_internals import checkpoint_wrapper

__all__ = ["Numbers", "measure_card", "measure_workload", "roofline_of"]

_WARM_SECONDS = 1.5
"""A device that has just begun is faster than one that trains: its clock falls with its power and heat."""
_ITERATIONS = 6
_GIB = 1 << 30
Say = Callable[[str], None]


def roofline_of(card: Card) -> Roofline:
    """The sustained rates of a card."""
    return Roofline(card.matmul_tflops, card.attention_tflops, card.memory_gb_s, card.kernel_us)


@dataclass(frozen=True)
class Numbers:
    """A workload and the numbers of sequences to run."""

    workload: Workload
    seq_len: int
    sequences: tuple[int, ...]


def measure_card(name: str, wanted: Sequence[Numbers], say: Say) -> Card:
    """The card of this machine's GPU with the layers of ``wanted``."""
    if not torch.cuda.is_available():
        raise ValueError("calibrate needs a CUDA device; without one, --hardware h200 is a roofline card.")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    known = device_named(properties.name)
    if known is None:
        raise ValueError(
            f"{properties.name}: its peak is not known; add it to DEVICES in ragged_fsdp/predict/card.py."
        )
    base = roofline_card(next(key for key, value in DEVICES.items() if value is known))
    card = replace(
        base,
        name=name,
        device=properties.name,
        measured=True,
        memory_gib=properties.total_memory / _GIB,
        versions={"torch": torch.__version__, "cuda": str(torch.version.cuda)},
    )
    rates: Any = _rates(device, say)
    card = replace(card, **rates)
    layers: list[LayerCard] = []
    for numbers in wanted:
        began = time.monotonic()
        try:
            layers += measure_workload(numbers, roofline_of(card), device)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"{numbers.workload.name}: {max(numbers.sequences)} sequences of {numbers.seq_len} tokens do "
                f"not fit this device; ask for fewer with --sequences. {error}"
            ) from None
        gc.collect()  # models have cycles, and the next one needs the memory
        torch.cuda.empty_cache()
        say(f"{numbers.workload.name}: {time.monotonic() - began:.1f} s")
    return replace(card, layers=tuple(layers))


# -- layers ----------------------------------------------------------------------------------------


def measure_workload(numbers: Numbers, roofline: Roofline, device: torch.device) -> list[LayerCard]:
    """The runs of every kind of one workload."""
    workload = numbers.workload
    model = workload.build().to_empty(device=device)
    _fill(model)
    points: dict[str, list[Point]] = defaultdict(list)
    for sequences in numbers.sequences:
        plain = _run(workload, model, sequences, numbers.seq_len, device)
        counted = count_costs(workload, sequences, numbers.seq_len)
        layers = workload.layers(model)
        kept = list(layers)
        for index, layer in enumerate(kept):
            layers[index] = checkpoint_wrapper(layer)
        again = _run(workload, model, sequences, numbers.seq_len, device)
        for index, layer in enumerate(kept):
            layers[index] = layer
        places: list[int | None] = [*range(len(kept)), None]
        for kind, place in zip(workload.kinds, places):
            forward, backward = plain[place, "forward"], plain[place, "backward"]
            cost = counted[kind.signature]
            points[kind.signature].append(
                Point(
                    tokens=sequences * numbers.seq_len,
                    forward_ms=forward.ms,
                    backward_ms=backward.ms,
                    recompute_ms=max(0.0, again[place, "backward"].ms - backward.ms),
                    saved_bytes=forward.left_bytes,
                    forward_peak_bytes=forward.peak_bytes,
                    backward_peak_bytes=backward.peak_bytes,
                    recompute_saved_bytes=again[place, "forward"].left_bytes,
                    recompute_peak_bytes=again[place, "backward"].peak_bytes,
                    roofline_forward_ms=cost.forward.seconds(roofline) * 1e3,
                    roofline_backward_ms=cost.backward.seconds(roofline) * 1e3,
                )
            )
    return [
        LayerCard(workload.name, kind.name, kind.signature, numbers.seq_len, tuple(points[kind.signature]))
        for kind in workload.kinds
    ]


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Weights of the usual size: products of zeros are faster than those of numbers."""
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0) if "norm" in name and parameter.dim() == 1 else parameter.normal_(std=0.02)
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point():
            buffer.zero_()
        elif "inv_freq" in name:
            buffer.copy_(10000.0 ** -torch.linspace(0, 1, buffer.numel(), device=buffer.device))
        else:
            buffer.zero_()


@dataclass
class _Measured:
    """One phase of one layer: the median time, and bytes."""

    ms: float
    peak_bytes: int
    left_bytes: int


@dataclass
class _Mark:
    """A boundary: what begins here, and the state of the device."""

    place: int | None
    phase: str
    event: Any
    allocated: int
    peak: int
    grads: int
    """Bytes of the gradients of all weights, and of those in layers."""
    layer_grads: int


def _run(
    workload: Workload, model: nn.Module, sequences: int, seq_len: int, device: torch.device
) -> dict[tuple[int | None, str], _Measured]:
    """Every phase of a few steps. What is outside the layers comes in parts, which are added."""
    marks: list[_Mark] = []

    def mark(place: int | None, phase: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        memory = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        grads = grad_bytes(model.parameters()), grad_bytes(layers.parameters())
        marks.append(_Mark(place, phase, event, *memory, *grads))
        torch.cuda.reset_peak_memory_stats(device)

    layers = workload.layers(model)
    phases = Phases(layers, mark)
    steps: list[dict[tuple[int | None, str], _Measured]] = []
    began = time.monotonic()
    while len(steps) < _ITERATIONS:
        model.zero_grad(set_to_none=True)
        gc.collect()
        marks.clear()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        with phases.step():
            loss = workload.loss(model, sequences, seq_len, device)
            phases.begin_backward()
            loss.backward()
            mark(None, "end")
        torch.cuda.synchronize()
        del loss
        if time.monotonic() - began > _WARM_SECONDS:
            steps.append(_phases_of(marks))
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    merged = {}
    for key in steps[0]:
        times = [step[key].ms for step in steps]
        merged[key] = replace(steps[-1][key], ms=round(statistics.median(times), 4))
    return merged


def _phases_of(marks: Sequence[_Mark]) -> dict[tuple[int | None, str], _Measured]:
    """The phases between the marks of one step, by the rules of ``costs._Counter``."""
    found: dict[tuple[int | None, str], _Measured] = {}
    base = marks[0].allocated
    saved = 0  # by the layers, while something outside them runs
    for begin, end in pairwise(marks):
        held = found.setdefault((begin.place, begin.phase), _Measured(0.0, 0, 0))
        left = (end.allocated - end.grads) - (begin.allocated - begin.grads)
        start = base + saved + begin.layer_grads if begin.place is None else begin.allocated
        held.ms += begin.event.elapsed_time(end.event)
        held.peak_bytes = max(held.peak_bytes, end.peak - start)
        held.left_bytes += left
        if begin.place is not None:
            saved += left
    return found


# -- rates -----------------------------------------------------------------------------------------


def _rates(device: torch.device, say: Say) -> dict[str, float]:
    """Products, attention, copies, sums and AdamW, each large enough to be bound by one thing."""
    began = time.monotonic()
    kinds: Any = {"device": device, "dtype": torch.bfloat16}
    a, b = torch.randn(8192, 8192, **kinds), torch.randn(8192, 8192, **kinds)
    out = torch.empty(8192, 8192, **kinds)
    matmul = 2 * 8192**3 / _seconds(lambda: torch.mm(a, b, out=out)) / 1e12
    q = torch.randn(1, 32, 8192, 128, **kinds)
    attend = torch.nn.functional.scaled_dot_product_attention
    attention = 2 * 32 * 8192**2 * 128 / _seconds(lambda: attend(q, q, q, is_causal=True)) / 1e12
    numel = 1 << 29
    source, target = torch.zeros(numel, **kinds), torch.empty(numel, **kinds)
    memory = 4 * numel / _seconds(lambda: target.copy_(source)) / 1e9
    into = [target[i * numel // 4 : (i + 1) * numel // 4].view(64, -1) for i in range(4)]
    split = torch.ops.aten.split_with_sizes_copy
    sizes = [numel // 64 // 4] * 4
    interleave = 4 * numel / _seconds(lambda: split(source.view(64, -1), sizes, 1, out=into)) / 1e9
    rows = source.view(8, -1)
    mean = torch.empty(numel // 8, device=device)
    add = partial(torch.sum, rows, 0, dtype=torch.float32, out=mean)
    sums = (2 * numel + 4 * numel // 8) / _seconds(add) / 1e9
    weight = torch.zeros(1 << 27, device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    adamw = torch.optim.AdamW([weight], fused=True)
    adamw.step()
    moved = 28 * weight.numel() / _seconds(adamw.step) / 1e9
    small = torch.zeros(1024, device=device)
    kernel = _seconds(lambda: small.add_(1.0), repeat=200) * 1e6
    torch.cuda.empty_cache()
    say(f"rates: {time.monotonic() - began:.1f} s")
    return {
        "matmul_tflops": round(matmul, 1),
        "attention_tflops": round(attention, 1),
        "memory_gb_s": round(memory, 1),
        "interleave_gb_s": round(interleave, 1),
        "sum_rows_gb_s": round(sums, 1),
        "adamw_gb_s": round(moved, 1),
        "kernel_us": round(kernel, 2),
    }


def _seconds(function: Callable[[], Any], repeat: int = 10) -> float:
    """Device seconds of one call, when called many times in a row."""
    for _ in range(3):
        function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat
