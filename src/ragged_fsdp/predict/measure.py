"""Runs a few layers on this machine's GPU and writes down how long they take: the calibration card.

For each model one layer of each kind runs with embedding and head, in bf16 with random weights, at three
numbers of tokens: forward, backward, and backward with recomputation, timed by CUDA events at the boundaries
of each layer; allocated memory is read there too. Then the copies and sums of FSDP, AdamW, and what limits
products (:mod:`ragged_fsdp.predict.measure_limits`).
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
import torch.distributed.fsdp  # registers FSDP2's copies
from torch import nn

from ragged_fsdp.predict.card import DEVICES, Card, LayerCard, Point, device_named, roofline_card
from ragged_fsdp.predict.costs import Roofline, count_costs, grad_bytes
from ragged_fsdp.predict.workload import Phases, Workload
from ragged_fsdp.torch_internals import checkpoint_wrapper

__all__ = ["Numbers", "measure_card", "measure_workload", "roofline_of"]

_WARM_SECONDS = 1.5
"""A device that has just begun is faster than one that trains: its clock falls with its power and heat."""
_STAYS_WARM_SECONDS = 0.3
"""For a run that follows another."""
_COPY_NUMEL = 1 << 28
"""Elements of the bf16 copies that run beside a layer, each a fraction of a millisecond."""
_ITERATIONS = 6
_STEPS_AHEAD = 3
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
        plain = _run(workload, model, sequences, numbers.seq_len, device, _WARM_SECONDS)
        contention = _contention(workload, model, sequences, numbers.seq_len, device, plain)
        layers = workload.layers(model)
        kept = list(layers)
        for index, layer in enumerate(kept):
            layers[index] = checkpoint_wrapper(layer)
        again = _run(workload, model, sequences, numbers.seq_len, device, _STAYS_WARM_SECONDS)
        for index, layer in enumerate(kept):
            layers[index] = layer
        counted = count_costs(workload, sequences, numbers.seq_len)
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
                    contention=contention,
                )
            )
    return [
        LayerCard(
            model=workload.name,
            kind=kind.name,
            sort=kind.sort,
            signature=kind.signature,
            seq_len=numbers.seq_len,
            points=tuple(points[kind.signature]),
        )
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
    workload: Workload,
    model: nn.Module,
    sequences: int,
    seq_len: int,
    device: torch.device,
    warm_s: float,
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
    taken: list[list[_Mark]] = []
    ahead: list[Any] = []
    gc.collect()
    torch.cuda.synchronize()
    began = time.monotonic()
    while len(taken) < _ITERATIONS:  # the device never waits: an idle one would recover its clock
        model.zero_grad(set_to_none=True)
        marks.clear()
        torch.cuda.reset_peak_memory_stats(device)
        with phases.step():
            loss = workload.loss(model, sequences, seq_len, device)
            phases.begin_backward()
            loss.backward()
            mark(None, "end")
        del loss
        if time.monotonic() - began > warm_s:
            taken.append(list(marks))
        else:
            ahead.append(marks[-1].event)
            if len(ahead) > _STEPS_AHEAD:
                ahead.pop(0).synchronize()  # or the host would have launched it all before the device is warm
    torch.cuda.synchronize()
    steps = [_phases_of(found) for found in taken]
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    merged = {}
    for key in steps[0]:
        times = [step[key].ms for step in steps]
        merged[key] = replace(steps[-1][key], ms=round(statistics.median(times), 4))
    return merged


def _contention(
    workload: Workload,
    model: nn.Module,
    sequences: int,
    seq_len: int,
    device: torch.device,
    plain: dict[tuple[int | None, str], _Measured],
) -> float:
    """How much longer a forward and backward takes per second of copies beside it, as gathers are."""
    source = torch.zeros(_COPY_NUMEL, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_ms = _seconds(lambda: target.copy_(source)) * 1e3
    alone_ms = sum(phase.ms for phase in plain.values())
    copies = int(4 * alone_ms / copy_ms) + 1  # they begin before the layers and must not end before them
    beside = torch.cuda.Stream(device)
    found = []
    for _ in range(_ITERATIONS):
        model.zero_grad(set_to_none=True)
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(copies)]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(beside):
            for event in ends:
                target.copy_(source)
                event.record()
        begin.record()
        workload.loss(model, sequences, seq_len, device).backward()
        end.record()
        ends[-1].synchronize()
        end.synchronize()
        done = sum(begin.elapsed_time(event) > 0 and event.elapsed_time(end) > 0 for event in ends)
        if 0 < done < copies:
            found.append((begin.elapsed_time(end) - alone_ms) / (done * copy_ms))
    model.zero_grad(set_to_none=True)
    if not found:
        raise ValueError(f"{workload.name}: the copies beside its layers ended before them.")
    return round(max(0.0, statistics.median(found)), 3)


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
    from ragged_fsdp.predict.measure_limits import (
        boost,
        grouped_beside,
    )  # Triton comes with CUDA's torch only

    began = time.monotonic()
    kinds: Any = {"device": device, "dtype": torch.bfloat16}
    a, b = torch.randn(8192, 8192, **kinds), torch.randn(8192, 8192, **kinds)
    out = torch.empty(8192, 8192, **kinds)
    product = partial(torch.mm, a, b, out=out)
    product_s = _seconds(product, warm_s=_WARM_SECONDS)
    q = torch.randn(1, 32, 8192, 128, **kinds)
    attend = torch.nn.functional.scaled_dot_product_attention
    attention_s = _seconds(lambda: attend(q, q, q, is_causal=True), warm_s=_STAYS_WARM_SECONDS)
    weight = torch.zeros(1 << 27, device=device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    adamw = torch.optim.AdamW([weight], fused=True)
    adamw.step()
    small = torch.zeros(1024, device=device)
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(host, device=device)
    host_s = max(
        _seconds(lambda: here.copy_(host, non_blocking=True), repeat=5),
        _seconds(lambda: host.copy_(here, non_blocking=True), repeat=5),
    )
    rates = {
        "matmul_tflops": 2 * 8192**3 / product_s / 1e12,
        "attention_tflops": 2 * 32 * 8192**2 * 128 / attention_s / 1e12,
        "adamw_gb_s": 28 * weight.numel() / _seconds(adamw.step) / 1e9,
        "kernel_us": _seconds(lambda: small.add_(1.0), repeat=200) * 1e6,
        "host_gb_s": host.numel() / host_s / 1e9,
        "host_adamw_gb_s": _host_adamw_gb_s(),
        "decode_gb_s": _decode_gb_s(device),
    }
    rates |= _copy_rates(device)
    limits = {"grouped_beside": grouped_beside(device), "boost": boost(device, product_s, product)}
    torch.cuda.empty_cache()
    say(f"rates: {time.monotonic() - began:.1f} s")
    rounded = {name: round(rate, 2 if name == "kernel_us" else 1) for name, rate in rates.items()}
    return rounded | limits


def _copy_rates(device: torch.device) -> dict[str, float]:
    """GB/s, read and written, of what FSDP2 and ours do to weights and gradients beside the layers."""
    from ragged_fsdp.fsdp.reduce.sums import sum_rows

    numel, ranks = 1 << 29, 64
    half = numel // 2
    norm = 45 * ranks  # comes first in a layer, and leaves what follows unaligned
    kinds: Any = {"device": device, "dtype": torch.bfloat16}
    source, target = torch.zeros(numel, **kinds), torch.empty(numel, **kinds)
    gathered, small = torch.zeros(ranks, (norm + numel) // ranks, **kinds), torch.zeros(norm, **kinds)
    parameters = [small.view(ranks, -1), *(part.view(ranks, -1) for part in target.chunk(4))]
    sizes = [parameter.shape[1] for parameter in parameters]
    matrices = [part.view(1024, -1) for part in source[:half].chunk(4)]
    wide = torch.empty(norm + half, device=device)
    slots = [part.view(1024, -1) for part in wide[norm:].chunk(4)]
    split, chunk_cat = torch.ops.aten.split_with_sizes_copy, torch.ops.fsdp.chunk_cat
    cat = partial(chunk_cat, [small, *matrices], dim=0, num_chunks=ranks)
    mean = torch.empty(numel // 8, device=device)
    works: dict[str, tuple[int, Callable[[], Any]]] = {
        "memory_gb_s": (4 * numel, lambda: target.copy_(source)),
        "interleave_gb_s": (4 * numel, lambda: split(gathered, sizes, 1, out=parameters)),
        "chunk_cat_gb_s": (6 * half, lambda: cat(out=wide.view(ranks, -1))),
        "chunk_cat_bf16_gb_s": (4 * half, lambda: cat(out=gathered.view(-1)[: norm + half].view(ranks, -1))),
        "collect_gb_s": (6 * half, lambda: torch._foreach_copy_(slots, matrices)),
        "sum_rows_gb_s": (
            2 * numel + 4 * mean.numel(),
            partial(sum_rows, source.view(8, -1), mean),
        ),
    }
    return {name: nbytes / _seconds(work) / 1e9 for name, (nbytes, work) in works.items()}


def _decode_gb_s(device: torch.device) -> float:
    """Codes of a gathered layer into bf16: three bytes per element."""
    from ragged_fsdp.fsdp.gather.codes import MessageLayout
    from ragged_fsdp.fsdp.gather.codes_triton import Decoder
    from ragged_fsdp.fsdp.parts.plan import GroupTensors, make_plan
    from ragged_fsdp.policy import BlockCodes

    ranks, shape, codes = 64, (28672, 8192), BlockCodes("int8", (128, 128))
    tensors = GroupTensors(
        ["a", "b"],
        [shape] * 2,
        [codes.granularity.block_numel(shape)] * 2,
        [torch.float32] * 2,
        torch.bfloat16,
    )
    layout = MessageLayout(make_plan(tensors, ranks), (codes,) * 2)
    message = torch.zeros(ranks, layout.part_bytes, dtype=torch.uint8, device=device)
    out = torch.empty(layout.plan.layout.buffer_numel, dtype=torch.bfloat16, device=device)
    decoder = Decoder(layout, device)
    return 3 * 2 * shape[0] * shape[1] / _seconds(lambda: decoder(message, out)) / 1e9


def _host_adamw_gb_s() -> float:
    """The host's fused AdamW, which moves 28 bytes per element."""
    weight = torch.zeros(1 << 25, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    adamw = torch.optim.AdamW([weight], fused=True)
    adamw.step()
    began = time.perf_counter()
    for _ in range(3):
        adamw.step()
    return 3 * 28 * weight.numel() / (time.perf_counter() - began) / 1e9


def _seconds(function: Callable[[], Any], repeat: int = 10, warm_s: float = 0.0) -> float:
    """Device seconds of one call, when called many times in a row."""
    began = time.monotonic()
    while True:
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        if time.monotonic() - began >= warm_s:
            break
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeat):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeat
