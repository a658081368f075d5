"""One layer of experts as rank 0 of a group: its products, what moving tokens costs, the wire.

    PYTHONPATH=. python -m benchmarks.experts.layer --out benchmarks/experts/layer.json

One process stands for rank 0 of EP ranks. Every other rank sends it what it would send itself, so rows are as
many as with balanced routers. What an exchange would deliver is copied from memory, and the stream is then
held for the time of the wire; both are timed alone and taken off. Exchanges that are launched as one start
when the last has been called. ``moves_ms`` is then all that is neither products nor wire: orders,
permutations, sums, counts, and the gaps that waits for the device leave; ``kernels_ms`` is the part of it in
which the device computes. ``floor_ms`` is what the bytes of the four passes over rows that no way can do
without would take at the rate of a plain copy: tokens to rows, rows to tokens, and their gradients.

The wire is priced, not run: 64 ranks in nodes of eight, 400 GB/s inside, a 45 GB/s card each
(``ragged_fsdp/predict/network.py``), everything in bf16; each exchange pays for its own step, also where
NCCL would launch several as one. ``fsdp_wire_ms`` are the gathers and the reduction of a rank's experts over
the ranks that hold the same, beside which all else runs.

    ours            ``AllToAll``, exact: an exchange for each expert of a rank, so rows arrive grouped
    grouped here    ``AllToAll``, exact, in one exchange; rows are grouped on arrival
    capacity        ``AllToAll`` with room for 1.25 of an even share
    two levels      ``TwoLevel``, where there are several nodes; exact and with a capacity
    torchtitan      its standard dispatch, written with the operators it uses: gather, exchange, index,
                    grouped products, index_put, exchange, scatter_add
    transformers    its all-reduce EP: the ranks share all tokens of the group, mask, and all-reduce; on
                    several nodes in as many parts, since all do not fit the device
    FSDP alone      every rank gathers all experts of the layer; gathers and reductions run beside products

Times are forward and backward, the median of some runs, each behind two milliseconds of other work, as
inside of a model; so a launch costs something where the host has had to wait before it. ``host_waits`` counts
waits for the device in a forward and backward (torch's sync debug mode, and events that are waited for).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    dispatch,
    grouped_linear,
    mix,
)
from ragged_fsdp.experts.layers import apply_experts
from ragged_fsdp.predict.network import Place, network_of, price
from ragged_fsdp.topology import Levels

NODES, NODE = "h200-400g", 8
CAPACITY = 1.25
RUNS = 5
AHEAD_NS = 2_000_000
FSDP_RANKS = 64


@dataclass(frozen=True)
class Shape:
    """A layer of a model."""

    hidden: int
    expert_hidden: int
    experts: int
    per_token: int

    def weight_bytes(self, experts: int) -> int:
        """Bytes of the products' weights in bf16."""
        return experts * 3 * self.hidden * self.expert_hidden * 2


SHAPES = {"qwen3-30b-a3b": Shape(2048, 768, 128, 8), "gpt-oss-120b": Shape(2880, 2880, 128, 4)}
SMALL = {"small": Shape(32, 16, 16, 2)}


class Held(nn.Module):
    """The experts of one rank."""

    def __init__(self, shape: Shape, experts: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_experts = experts
        sizes = (shape.hidden, 2 * shape.expert_hidden), (shape.expert_hidden, shape.hidden)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, *size, device=device, dtype=dtype) * 0.02) for size in sizes
        )

    def apply_to_groups(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate, up = grouped_linear(rows, self.up, counts).chunk(2, dim=-1)
        return grouped_linear(nn.functional.silu(gate) * up, self.down, counts)


Exchanged = tuple[torch.dtype, int, int, list[int]]
"""Dtype and elements that came, bytes that were sent, and the ranks of the group."""


class Mirror:
    """Stands for the exchanges: counts as if all ranks routed alike, rows from memory; launches are noted."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._memory: dict[torch.dtype, Tensor] = {}
        self._joined: list[tuple[Tensor, Exchanged]] | None = None
        self.noted: list[list[Exchanged]] = []

    def __call__(self, out: Tensor, given: Tensor, *_: Any, group: Any = None, **__: Any) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        if not out.is_floating_point():
            part = given.reshape(-1)[: out.numel() // len(ranks)]
            out.view(len(ranks), -1).copy_(part.expand(len(ranks), -1))
            return
        exchanged = (out, (out.dtype, out.numel(), given.numel() * given.element_size(), ranks))
        if self._joined is None:
            self._launch([exchanged])
        else:
            self._joined.append(exchanged)

    @contextlib.contextmanager
    def joined(self, *_: Any) -> Iterator[list[Any]]:
        self._joined = []
        yield []
        launched, self._joined = self._joined, None
        self._launch(launched)

    def take(self) -> tuple[Callable[[], object], float]:
        """The launches since the last call, to be done alone, and the milliseconds of their wire."""
        noted, self.noted = self.noted, []
        into = {dtype: torch.empty_like(memory) for dtype, memory in self._memory.items()}

        def again() -> None:
            for launch in noted:
                for dtype, numel, _, _ in launch:
                    into[dtype][:numel].copy_(self._of(dtype, numel))
                self._hold(launch)

        return again, sum(map(self._wire_ms, noted))

    def _launch(self, launch: list[tuple[Tensor, Exchanged]]) -> None:
        for out, (dtype, numel, _, _) in launch:
            out.view(-1).copy_(self._of(dtype, numel))
        self.noted.append([exchanged for _, exchanged in launch])
        self._hold(self.noted[-1])

    def _hold(self, launch: list[Exchanged]) -> None:
        if self._device == "cuda":
            from benchmarks.step.spin import spin_ns

            spin_ns(int(self._wire_ms(launch) * 1e6))

    @staticmethod
    def _wire_ms(launch: list[Exchanged]) -> float:
        return sum(wire_ms("all_to_all", nbytes, ranks) for _, _, nbytes, ranks in launch)

    def _of(self, dtype: torch.dtype, numel: int) -> Tensor:
        if dtype not in self._memory or numel > self._memory[dtype].numel():
            self._memory[dtype] = torch.randn(numel, device=self._device, dtype=dtype)
        return self._memory[dtype][:numel]


@contextlib.contextmanager
def mirrored(mirror: Mirror) -> Iterator[None]:
    with (
        mock.patch.object(dist, "all_to_all_single", mirror),
        mock.patch.object(dispatch, "joined_launch", mirror.joined),
    ):
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

    def busy(self, call: Callable[[], object]) -> float:
        """Milliseconds in which the device computes; 0 where there is none."""
        if self.device != "cuda":
            return 0.0
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            call()
            torch.cuda.synchronize()
        kernels = (e for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        return sum(e.time_range.elapsed_us() for e in kernels) / 1e3

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


def wire_ms(kind: str, nbytes: float, group: Sequence[int]) -> float:
    """A collective of rank 0 with others of the modelled network."""
    network = network_of(NODES)
    seconds = price(kind, nbytes, Place.of(group, 0, network), network) if len(group) > 1 else (0.0,)
    return max(seconds) * 1e3


def fsdp_wire_ms(shape: Shape, ep: int) -> float:
    """Two gathers and a reduction of a rank's experts over the ranks that hold the same ones."""
    nbytes, group = shape.weight_bytes(shape.experts // ep), range(0, FSDP_RANKS, ep)
    return 2 * wire_ms("all_gather", nbytes, group) + wire_ms("reduce_scatter", nbytes, group)


def floor_ms(bench: Bench, shape: Shape) -> float:
    """The bytes of four passes over rows and tokens, at the rate of a copy: one reads and writes rows."""
    tokens, rows = (n * shape.hidden * 2 for n in (bench.tokens, bench.tokens * shape.per_token))
    given = torch.empty(rows, dtype=torch.uint8, device=bench.device)
    into = torch.empty_like(given)
    return bench.timed(lambda: into.copy_(given)) * (5 * rows + 4 * tokens) / (2 * rows)


def measure(bench: Bench, name: str, shape: Shape, ranks: int) -> list[dict[str, Any]]:
    """Every way for one layer and group size."""
    held = Held(shape, shape.experts // ranks, bench.device, bench.dtype)
    tokens, chosen, weights = bench.inputs(shape, bench.tokens)
    mirror, mesh = Mirror(bench.device), init_device_mesh(bench.device, (ranks,))
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
        ways: dict[str, Callable[[], Tensor]] = {
            "ours": layer(AllToAll(mesh, split)),
            "grouped here": layer(AllToAll(mesh, split, most_exchanges=0)),
            "capacity": layer(AllToAll(mesh, split, capacity=CAPACITY)),
        }
        if ranks > NODE:
            nodes = tuple(tuple(range(first, first + NODE)) for first in range(0, ranks, NODE))
            levels = Levels(nodes, NODE)
            ways["two levels"] = layer(TwoLevel(mesh, split, levels))
            ways["two levels, capacity"] = layer(TwoLevel(mesh, split, levels, capacity=CAPACITY))
        ways["torchtitan"] = lambda: torchtitan_style(held, tokens, chosen, weights, ranks)
        floor = floor_ms(bench, shape)
        for way, forward in ways.items():
            once = stepping(forward, grad, leaves)
            mirror.noted.clear()
            once()
            alone, wire = mirror.take()
            times = bench.timed(once) - bench.timed(alone), bench.busy(once) - bench.busy(alone)
            once()
            rows.append(_row(name, shape, ranks, way, times, products, wire, bench.waits(once), floor))
            print(json.dumps(rows[-1]), flush=True)
    total, wire, waits = _all_reduce(bench, shape, ranks, held)
    rows.append(_row(name, shape, ranks, "transformers", total, products, wire, waits))
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


def _all_reduce(
    bench: Bench, shape: Shape, ranks: int, held: Held
) -> tuple[tuple[float, float], float, int | None]:
    """The library's way on the tokens of the whole group, those of a node's ranks at a time."""
    parts = max(1, ranks // NODE)
    tokens, chosen, weights = bench.inputs(shape, bench.tokens * ranks // parts)
    forward = transformers_all_reduce(held, shape, ranks)
    leaves = [tokens, weights, *held.parameters()]
    once = stepping(lambda: forward(tokens, chosen, weights), torch.ones_like(tokens), leaves)
    times, waits = (bench.timed(once) * parts, bench.busy(once) * parts), bench.waits(once)
    wire = 2 * wire_ms("all_reduce", bench.tokens * ranks * shape.hidden * 2, range(ranks))
    return times, wire, waits if waits is None else waits * parts


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
    wire = fsdp_wire_ms(shape, 1)
    row = {
        "layer": name,
        "ep": 1,
        "way": "FSDP alone",
        **_moves(times, products),
        "fsdp_wire_ms": round(wire, 3),
        "layer_ms": round(max(times[0], wire), 3),
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
    shape: Shape,
    ranks: int,
    way: str,
    times: tuple[float, float],
    products: tuple[float, float],
    wire: float,
    waits: int | None,
    floor: float | None = None,
) -> dict[str, Any]:
    weights = fsdp_wire_ms(shape, ranks)
    return {
        "layer": name,
        "ep": ranks,
        "way": way,
        **_moves(times, products),
        "floor_ms": None if floor is None else round(floor, 3),
        "wire_ms": round(wire, 3),
        "fsdp_wire_ms": round(weights, 3),
        "layer_ms": round(max(times[0] + wire, weights), 3),
        "host_waits": waits,
    }


def main() -> None:
    """Measure every layer and group size and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of results (JSON)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rank")
    parser.add_argument("--ep", type=int, nargs="+", default=[8, 64], help="group sizes")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny layer, to see that it runs")
    options = parser.parse_args()
    bench = Bench(
        options.device, torch.bfloat16 if options.device == "cuda" else torch.float32, options.tokens
    )
    device = None if options.device == "cuda" else platform.processor() or "cpu"
    rows: list[dict[str, Any]] = []
    for name, shape in (SMALL if options.small else SHAPES).items():
        for ranks in (1, *options.ep):
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            try:
                rows += [fsdp_alone(bench, name, shape)] if ranks == 1 else measure(bench, name, shape, ranks)
            finally:
                dist.destroy_process_group()
            save(options.out, device=device, network=network_of(NODES).text, tokens=options.tokens, rows=rows)


if __name__ == "__main__":
    main()
