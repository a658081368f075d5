"""One layer of experts as rank 0 of a group: its products, what moving tokens costs, the wire.

    PYTHONPATH=. python -m benchmarks.experts.layer --out benchmarks/experts/layer.json

One process stands for rank 0 of EP ranks. Every other rank sends it what it would send itself, so rows are as
many as with balanced routers. Exchanges run on a stream of their own, as NCCL's do, and hold it for the time
of the wire; what one would deliver is copied from memory within that time. All of them are timed alone, one
after the other, and taken off. Each is called too, of a group that does nothing, for the time that this takes
the host. ``moves_ms`` is then all that a layer takes beside products and wire: orders, permutations, sums,
counts, as far as they do not run while rows travel, and the gaps that waits for the device leave.
``kernels_ms`` is how long the device computes for it, beside the wire or not. ``floor_ms`` is what the bytes
of the four passes over rows that no way can do without would take at the rate of a copy: tokens to rows, rows
to tokens, and their gradients.

The wire is priced, not run: 64 ranks in nodes of eight, 400 GB/s inside, a 45 GB/s card each
(``ragged_fsdp/predict/network.py``), rows in bf16; each exchange pays for its own step, also where NCCL would
launch several as one. The group lies in two ways, and every way of moving tokens is priced for both:

    neighbours      ranks 0 to 7 are a group: tokens stay in a node, and the ranks with the same experts lie
                    on eight nodes, so weights travel over the cards
    across nodes    ranks 0, 8, ... 56 are a group: weights stay in a node, and tokens travel over the cards

A group of all ranks lies in one way only, ``all ranks``. ``wire_ms`` is what a layer waits for: an exchange
holds the links inside the node and the card at the same time, and takes as long as the slower of them.
``weights_ms`` are two gathers of a rank's experts in bf16 and the reduction of their gradients, in bf16 with
sums in fp32 as ``fully_shard(reduction="two_level")`` sends them, over the ranks that hold the same experts.
All else runs beside them, but each link carries one thing at a time. So ``layer_ms`` is the longest of three:
computation with its exchanges, the busy time of the links inside, and that of the card. That of a row is the
better one of its placements.

    ours            ``AllToAll``, exact: in as many parts as a rank has experts, up to four, so that rows
                    arrive grouped; else in one part, grouped on arrival
    in four parts   the same, grouped on arrival while the next part travels
    capacity        ``AllToAll`` with the room that ``fit_capacity`` leaves, 1.1 times what is needed, in four
                    parts
    in a graph      the same, captured in a CUDA graph: the host launches nothing
    capacity, at once    the same in one part
    two levels      ``TwoLevel``, where there are several nodes; exact and with a capacity
    torchtitan      its standard dispatch, written with the operators it uses: gather, exchange, index,
                    grouped products, index_put, exchange, scatter_add
    transformers    its all-reduce EP: the ranks share all tokens of the group, mask, and all-reduce; on
                    several nodes in as many parts, since all do not fit the device
    FSDP alone      every rank gathers all experts of the layer; gathers and reductions run beside products

Times are forward and backward, the median of some runs, each behind two milliseconds of other work, as
inside of a model; so a launch costs something where the host has had to wait before it. ``host_waits`` counts
waits for the device in a forward and backward (torch's sync debug mode, and events that are waited for).
``--kernels`` writes what the device did in one run of our exact way, and for how long it did nothing before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.device_time import device_ms
from benchmarks.saving import save
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ragged_fsdp.experts import (
    AllToAll,
    Dispatcher,
    ExpertSplit,
    Here,
    TwoLevel,
    grouped_linear,
    mix,
)
from ragged_fsdp.experts.layers import apply_experts
from ragged_fsdp.predict.card import find_card
from ragged_fsdp.predict.groups import Wires, group_cost
from ragged_fsdp.predict.network import Place, Seconds, network_of, price
from ragged_fsdp.topology import Levels

NODES, NODE = "h200-400g", 8
CAPACITY, MARGIN = 1.25, 1.1
RUNS = 5
AHEAD_NS = 2_000_000
ALL_RANKS = 64


@dataclass(frozen=True)
class Shape:
    """A layer of a model."""

    hidden: int
    expert_hidden: int
    experts: int
    per_token: int

    def weights(self, experts: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The parameters of so many experts, with their shapes."""
        up, down = (self.hidden, 2 * self.expert_hidden), (self.expert_hidden, self.hidden)
        return ("up", (experts, *up)), ("down", (experts, *down))


SHAPES = {"qwen3-30b-a3b": Shape(2048, 768, 128, 8), "gpt-oss-120b": Shape(2880, 2880, 128, 4)}
SMALL = {"small": Shape(32, 16, 16, 2)}


class Held(nn.Module):
    """The experts of one rank."""

    def __init__(self, shape: Shape, experts: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts = experts
        self.up, self.down = (
            nn.Parameter(torch.randn(size, device=device, dtype=dtype) * 0.02)
            for _, size in shape.weights(experts)
        )

    def apply_to_groups(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate, up = grouped_linear(rows, self.up, counts).chunk(2, dim=-1)
        return grouped_linear(nn.functional.silu(gate) * up, self.down, counts)


Exchanged = tuple[torch.dtype, int, int, list[int]]
"""Dtype and elements that came, bytes that were sent, and the ranks of the group."""


@dataclass(frozen=True)
class Spread:
    """How a group of expert parallelism lies among all ranks."""

    name: str
    apart: int
    """Of the ranks of the group."""
    weights_ranks: int
    """That hold the same experts."""
    weights_apart: int

    @staticmethod
    def all_of(ranks: int) -> list[Spread]:
        """The ways there are for a group of so many ranks."""
        same = ALL_RANKS // ranks
        if same == 1:
            return [Spread("all ranks", 1, 1, 1)]
        return [Spread("neighbours", 1, same, ranks), Spread("across nodes", same, same, 1)]

    def exchange(self, kind: str, nbytes: float, group: Sequence[int]) -> Seconds:
        """A collective of rank 0 with ranks of its group, which count from 0 within it."""
        if len(group) == 1:
            return Seconds(0.0, 0.0)
        network = network_of(NODES)
        return price(kind, nbytes, Place.of([rank * self.apart for rank in group], 0, network), network)

    def weights(self, shape: Shape, ranks: int) -> Seconds:
        """Two gathers and a reduction of a rank's experts over the ranks that hold the same ones."""
        wires = Wires(network_of(NODES), self.weights_ranks, self.weights_apart, reduction="two_level")
        cost = group_cost("experts", shape.weights(shape.experts // ranks), wires, find_card("h200"))
        return total([cost.gather, cost.gather_again, *(held for held, _ in cost.reduce)])


def total(parts: Iterable[Seconds]) -> Seconds:
    """How long each level is held by all of these."""
    inside, outside = zip(*parts, strict=True)
    return Seconds(sum(inside), sum(outside))


class Mirror:
    """Stands for the exchanges: counts as if all ranks routed alike, rows from memory; launches are noted.

    They run on a stream of their own, one after the other, each behind what the caller has launched before.
    """

    def __init__(self, device: str, spread: Spread) -> None:
        self._device, self._spread, self._call = device, spread, dist.all_to_all_single
        self._stream = torch.cuda.Stream(priority=-1) if device == "cuda" else None
        self._memory: dict[torch.dtype, Tensor] = {}
        self._ranks: dict[Any, list[int]] = {}
        self._held_ns: dict[tuple[int, int], int] = {}
        self.noted: list[Exchanged] = []

    def __call__(
        self, out: Tensor, given: Tensor, *sizes: Any, group: Any = None, async_op: bool = False
    ) -> Arrived | None:
        if group not in self._ranks:
            self._ranks[group] = dist.get_process_group_ranks(group or dist.group.WORLD)
        ranks = self._ranks[group]
        nothing = [0] * len(ranks) if sizes else None
        self._call(out[:0], given[:0], nothing, nothing, group=group)  # for the host's time
        if not out.is_floating_point():
            part = given.reshape(-1)[: out.numel() // len(ranks)]
            into = out.view(len(ranks), -1)
            return self._done(lambda: into.copy_(part.expand(len(ranks), -1)), async_op)
        exchanged = out.dtype, out.numel(), given.numel() * given.element_size(), ranks
        self.noted.append(exchanged)
        return self._done(partial(self._carry, exchanged, out.view(-1)), async_op)

    def take(self) -> tuple[Callable[[], object], list[Exchanged]]:
        """The exchanges since the last call, and all of them alone."""
        noted, self.noted = self.noted, []
        into = {dtype: torch.empty_like(memory) for dtype, memory in self._memory.items()}

        def carry() -> None:
            for exchanged in noted:
                self._carry(exchanged, into[exchanged[0]][: exchanged[1]])

        return lambda: self._done(carry, False), noted

    def _carry(self, exchanged: Exchanged, out: Tensor) -> None:
        if self._device != "cuda":
            out.copy_(self._of(*exchanged[:2]))
            return
        from benchmarks.step.spin import hold_since, stamp

        key = exchanged[2], len(exchanged[3])
        if key not in self._held_ns:
            self._held_ns[key] = int(max(exchanges([exchanged], self._spread)[0]) * 1e9)
        stamp(0)
        out.copy_(self._of(*exchanged[:2]))
        hold_since(0, self._held_ns[key])

    def _done(self, carry: Callable[[], object], async_op: bool) -> Arrived | None:
        """Carry it out on the stream of the wire."""
        if self._stream is None:
            carry()
            return Arrived(None) if async_op else None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            carry()
        work = Arrived(self._stream.record_event())
        if async_op:
            return work
        work.wait()
        return None

    def _of(self, dtype: torch.dtype, numel: int) -> Tensor:
        if dtype not in self._memory or numel > self._memory[dtype].numel():
            self._memory[dtype] = torch.randn(numel, device=self._device, dtype=dtype)
        return self._memory[dtype][:numel]


@dataclass
class Arrived:
    """What a caller waits for."""

    event: Any

    def wait(self) -> None:
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


@contextlib.contextmanager
def mirrored(mirror: Mirror) -> Iterator[None]:
    with mock.patch.object(dist, "all_to_all_single", mirror):
        yield


def torchtitan_style(held: Held, tokens: Tensor, chosen: Tensor, weights: Tensor, ranks: int) -> Tensor:
    """Gather, exchange, order by expert, products, back, scatter_add: with torch's own operators."""
    per_token, experts = chosen.shape[1], held.num_experts * ranks
    order = chosen.view(-1).argsort(stable=True)
    counts = torch.histc(chosen.view(-1).float(), bins=experts, min=0, max=experts).long()
    token_of = (order // per_token).view(-1, 1).expand(-1, tokens.shape[1])
    routed = torch.gather(tokens, 0, token_of)
    sent = counts.view(ranks, -1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    there, here = sent.sum(1).tolist(), received.sum(1).tolist()
    arrived = _Exchange.apply(routed, there, here)
    expert = torch.arange(held.num_experts, device=tokens.device).repeat(ranks)
    grouping = expert.repeat_interleave(received.view(-1), output_size=len(arrived)).argsort(stable=True)
    outputs = held.apply_to_groups(arrived[grouping], received.sum(0))
    ungrouped = torch.empty_like(outputs).index_put((grouping,), outputs)
    back = _Exchange.apply(ungrouped, here, there)
    scored = (back.float() * weights.view(-1)[order].view(-1, 1)).to(tokens.dtype)
    return torch.zeros_like(tokens).scatter_add(0, token_of, scored)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.back = received, sent
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows, received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _Exchange.apply(grads[0].contiguous(), *ctx.back), None, None


def transformers_all_reduce(held: Held, shape: Shape, ranks: int) -> Callable[..., Tensor]:
    """The library's own function for experts of which a rank holds some: the others are masked."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    module: Any = SimpleNamespace(
        num_experts=held.num_experts,
        gate_up_proj=held.up,
        down_proj=held.down,
        has_gate=True,
        has_bias=False,
        is_transposed=True,
        has_post_expert_norm=False,
        _is_expert_parallel=True,
        _apply_gate=lambda both: nn.functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
    )

    def forward(tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        elsewhere = chosen >= held.num_experts
        local = chosen.masked_fill(elsewhere, held.num_experts)
        return grouped_mm_experts_forward(module, tokens, local, weights.masked_fill(elsewhere, 0.0))

    return forward


@dataclass
class Bench:
    """What the measurements share."""

    device: str
    dtype: torch.dtype
    tokens: int

    def timed(self, call: Callable[[], object]) -> float:
        """The median of some runs, in milliseconds, after two to warm up."""
        for _ in range(2):
            call()
        times = []
        for _ in range(RUNS):
            if self.device == "cuda":
                from benchmarks.step.spin import spin_ns

                spin_ns(AHEAD_NS)
                times.append(device_ms(call))
            else:
                began = time.perf_counter()
                call()
                times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times)

    def captured(self, call: Callable[[], None]) -> Callable[[], None]:
        """What replays it; the call itself where there is no device."""
        if self.device != "cuda":
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay: Callable[[], None] = graph.replay
        return replay

    def busy(self, call: Callable[[], object]) -> float:
        """Milliseconds in which the device computes; 0 where there is none."""
        if self.device != "cuda":
            return 0.0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            call()
            torch.cuda.synchronize()
        kernels = (e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        return sum(e.time_range.elapsed_us() for e in kernels) / 1e3

    def kernels(self, call: Callable[[], object]) -> list[str]:
        """The kernels of ``call`` behind other work: microseconds of rest before each and of its own."""
        from benchmarks.step.spin import spin_ns

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            spin_ns(AHEAD_NS)
            call()
            torch.cuda.synchronize()
        found = (e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        lines, end = [], None
        for kernel in sorted(found, key=lambda e: e.time_range.start):
            rest = 0.0 if end is None else kernel.time_range.start - end
            lines.append(f"{rest:8.1f} {kernel.time_range.elapsed_us():8.1f}  {kernel.name[:80]}")
            end = max(end or 0.0, kernel.time_range.end)
        return lines

    def waits(self, call: Callable[[], object]) -> int | None:
        """How often ``call`` waits for the device; None where there is none."""
        if self.device != "cuda":
            return None
        synchronize = torch.cuda.Event.synchronize
        with (
            warnings.catch_warnings(record=True) as caught,
            mock.patch.object(
                torch.cuda.Event, "synchronize", autospec=True, side_effect=synchronize
            ) as waited,
        ):
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing" in str(w.message) for w in caught) + waited.call_count

    def inputs(self, shape: Shape, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, balanced choices and weights."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        options: Any = {"device": self.device, "generator": generator}
        x = torch.randn(tokens, shape.hidden, dtype=self.dtype, **options)
        chosen = torch.rand(tokens, shape.experts, **options).topk(shape.per_token, dim=1)[1]
        weights = torch.rand(tokens, shape.per_token, **options)
        return x.requires_grad_(), chosen, weights.requires_grad_()


def exchanges(exchanged: Iterable[Exchanged], spread: Spread) -> list[Seconds]:
    """What each of them holds the links for."""
    return [spread.exchange("all_to_all", nbytes, ranks) for _, _, nbytes, ranks in exchanged]


def placed(
    shape: Shape, ranks: int, times: float, waited_for: Callable[[Spread], list[Seconds]]
) -> dict[str, Any]:
    """A layer that computes for ``times`` milliseconds, for each way in which its group can spread."""
    found = {}
    for spread in Spread.all_of(ranks):
        tokens, weights = waited_for(spread), spread.weights(shape, ranks)
        wire = sum(max(held) for held in tokens) * 1e3
        busy = max(total([*tokens, weights])) * 1e3
        found[spread.name] = {
            "wire_ms": round(wire, 3),
            "weights_ms": round(max(weights) * 1e3, 3),
            "layer_ms": round(max(times + wire, busy), 3),
        }
    best = min(found, key=lambda name: found[name]["layer_ms"])
    return {"placements": found, "best_placement": best, "layer_ms": found[best]["layer_ms"]}


def floor_ms(bench: Bench, shape: Shape) -> float:
    """The bytes of four passes over rows and tokens, at the rate of a copy: one reads and writes rows."""
    tokens, rows = (n * shape.hidden * 2 for n in (bench.tokens, bench.tokens * shape.per_token))
    given = torch.empty(rows, dtype=torch.uint8, device=bench.device)
    into = torch.empty_like(given)
    return bench.timed(lambda: into.copy_(given)) * (5 * rows + 4 * tokens) / (2 * rows)


def measure(
    bench: Bench, name: str, shape: Shape, ranks: int, only: Sequence[str] = (), kernels: Path | None = None
) -> list[dict[str, Any]]:
    """Every way for one layer and group size, or some; our exact one's kernels go to a file."""
    held = Held(shape, shape.experts // ranks, bench.device, bench.dtype)
    tokens, chosen, weights = bench.inputs(shape, bench.tokens)
    mirror = Mirror(bench.device, Spread.all_of(ranks)[0])
    mesh = init_device_mesh(bench.device, (ranks,))
    split = ExpertSplit.even(shape.experts, ranks)
    rows: list[dict[str, Any]] = []

    def layer(dispatcher: Dispatcher) -> Callable[[], Tensor]:
        return lambda: mix(held, dispatcher, tokens, chosen, weights)[0]

    leaves = [tokens, weights, *held.parameters()]
    grad = torch.ones_like(tokens)
    with mirrored(mirror):
        arrived, counts, _ = AllToAll(mesh, split).dispatch(tokens, chosen)
        products = products_of(bench, held, arrived.detach(), counts)
        del arrived
        one = partial(AllToAll, mesh, split)
        dispatchers: dict[str, Any] = {
            "ours": one(),
            "in four parts": one(parts=4),
            "capacity": one(capacity=CAPACITY),
            "in a graph": one(capacity=CAPACITY),
            "capacity, at once": one(capacity=CAPACITY, parts=1),
        }
        if ranks > NODE:
            nodes = tuple(tuple(range(first, first + NODE)) for first in range(0, ranks, NODE))
            levels = Levels(nodes, NODE)
            dispatchers["two levels"] = TwoLevel(mesh, split, levels)
            dispatchers["two levels, capacity"] = TwoLevel(mesh, split, levels, capacity=CAPACITY)
        ways = {name: layer(dispatcher) for name, dispatcher in dispatchers.items()}
        ways["torchtitan"] = lambda: torchtitan_style(held, tokens, chosen, weights, ranks)
        floor = floor_ms(bench, shape)
        for way, forward in ways.items():
            if only and way not in only:
                continue
            once = stepping(forward, grad, leaves)
            once()
            if way in dispatchers and dispatchers[way].capacity is not None:
                dispatchers[way].capacity = MARGIN * dispatchers[way].needed.item()  # as fit_capacity does
                once()  # compares the numbers of tokens
            mirror.noted.clear()
            once()
            alone, exchanged = mirror.take()
            if way == "in a graph":
                once = bench.captured(once)
            times = bench.timed(once) - bench.timed(alone), bench.busy(once) - bench.busy(alone)
            layers = placed(shape, ranks, times[0], partial(exchanges, exchanged))
            if kernels is not None and way == "ours":
                text = "\n".join(bench.kernels(once))
                kernels.write_text(f"{name}, EP {ranks}: us at rest, us of the kernel\n{text}\n")
            rows.append(_row(name, ranks, way, times, products, layers, bench.waits(once), floor))
            print(json.dumps(rows[-1]), flush=True)
    if only and "transformers" not in only:
        return rows
    times, waits = _all_reduce(bench, shape, ranks, held)
    nbytes = bench.tokens * ranks * shape.hidden * 2
    layers = placed(
        shape, ranks, times[0], lambda spread: [spread.exchange("all_reduce", nbytes, range(ranks))] * 2
    )
    rows.append(_row(name, ranks, "transformers", times, products, layers, waits))
    print(json.dumps(rows[-1]), flush=True)
    return rows


def stepping(forward: Callable[[], Tensor], grad: Tensor, leaves: Sequence[Tensor]) -> Callable[[], None]:
    """Forward and backward; gradients are new ones, to which nothing is added."""

    def once() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(grad)

    return once


def products_of(bench: Bench, held: Held, rows: Tensor, counts: Tensor) -> tuple[float, float]:
    """Milliseconds of the experts alone: between events, and of kernels."""
    given = torch.randn_like(rows).requires_grad_()
    leaves = [given, *held.parameters()]
    once = stepping(lambda: apply_experts(held, given, counts), torch.ones_like(rows), leaves)
    return bench.timed(once), bench.busy(once)


def _all_reduce(bench: Bench, shape: Shape, ranks: int, held: Held) -> tuple[tuple[float, float], int | None]:
    """The library's way on the tokens of the whole group, those of a node's ranks at a time."""
    parts = max(1, ranks // NODE)
    tokens, chosen, weights = bench.inputs(shape, bench.tokens * ranks // parts)
    forward = transformers_all_reduce(held, shape, ranks)
    leaves = [tokens, weights, *held.parameters()]
    once = stepping(lambda: forward(tokens, chosen, weights), torch.ones_like(tokens), leaves)
    times, waits = (bench.timed(once) * parts, bench.busy(once) * parts), bench.waits(once)
    return times, waits if waits is None else waits * parts


def fsdp_alone(bench: Bench, name: str, shape: Shape) -> dict[str, Any]:
    """All experts on this rank, after a gather over all ranks that runs beside other layers."""
    held = Held(shape, shape.experts, bench.device, bench.dtype)
    tokens, chosen, weights = bench.inputs(shape, bench.tokens)
    here = Here(shape.experts)
    rows, counts, _ = here.dispatch(tokens, chosen)
    products = products_of(bench, held, rows.detach(), counts)
    once = stepping(
        lambda: mix(held, here, tokens, chosen, weights)[0],
        torch.ones_like(tokens),
        [tokens, weights, *held.parameters()],
    )
    times = bench.timed(once), bench.busy(once)
    weights = max(Spread("all ranks", 1, ALL_RANKS, 1).weights(shape, 1)) * 1e3
    row = {
        "layer": name,
        "ep": 1,
        "way": "FSDP alone",
        **_moves(times, products),
        "weights_ms": round(weights, 3),
        "layer_ms": round(max(times[0], weights), 3),
    }
    print(json.dumps(row), flush=True)
    return row


def _moves(times: tuple[float, float], products: tuple[float, float]) -> dict[str, float]:
    """What a layer takes beside its products, between events and of kernels."""
    moves, kernels = (layer - own for layer, own in zip(times, products))
    return {
        "products_ms": round(products[0], 3),
        "moves_ms": round(moves, 3),
        "moves_of_products": round(moves / products[0], 3),
        "kernels_ms": round(kernels, 3),
        "kernels_of_products": round(kernels / products[1], 3) if products[1] else 0.0,
    }


def _row(
    name: str,
    ranks: int,
    way: str,
    times: tuple[float, float],
    products: tuple[float, float],
    layers: dict[str, Any],
    waits: int | None,
    floor: float | None = None,
) -> dict[str, Any]:
    return {
        "layer": name,
        "ep": ranks,
        "way": way,
        **_moves(times, products),
        "floor_ms": None if floor is None else round(floor, 3),
        **layers,
        "host_waits": waits,
    }


def main() -> None:
    """Measure every layer and group size and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of results (JSON)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank")
    parser.add_argument("--kernels", type=Path, help="a file of kernels of the first layer and group size")
    parser.add_argument("--layers", nargs="+", choices=SHAPES, default=list(SHAPES), help="which layers")
    parser.add_argument("--ep", type=int, nargs="+", default=[8, 64], help="group sizes")
    parser.add_argument("--ways", nargs="+", default=(), help="some of the ways, by name; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny layer, to see that it runs")
    options = parser.parse_args()
    bench = Bench(
        options.device, torch.bfloat16 if options.device == "cuda" else torch.float32, options.tokens
    )
    device = None if options.device == "cuda" else platform.processor() or "cpu"
    rows: list[dict[str, Any]] = []
    shapes = SMALL if options.small else {name: SHAPES[name] for name in options.layers}
    kernels = options.kernels
    for name, shape in shapes.items():
        for ranks in (1, *options.ep):
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            try:
                if ranks == 1:
                    rows.append(fsdp_alone(bench, name, shape))
                else:
                    rows += measure(bench, name, shape, ranks, options.ways, kernels)
                    kernels = None
            finally:
                dist.destroy_process_group()
            save(options.out, device=device, network=network_of(NODES).text, tokens=options.tokens, rows=rows)


if __name__ == "__main__":
    main()
