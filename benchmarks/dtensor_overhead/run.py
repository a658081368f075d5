"""CPU cost of ops on ragged DTensors against the same ops on stock ``Shard(0)`` DTensors.

    python benchmarks/dtensor_overhead/run.py [--rounds 30] [--out results/...json]

One process of a fake process group (collectives return at once), small tensors: what is timed is the
dispatcher. The two layouts alternate within each round, in an order that alternates too, so that
whatever else the machine does falls on both; times are of the processor's clock, and the ratio is the
median over the rounds of the ratio within a round. The target is a ratio of at most 1.1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ragged_fsdp import RaggedShard
from ragged_fsdp.dtensor import distribute_tensor

RANKS = 4
SHAPE = (16, 8)
PARAMS = 300
Program = Callable[[], object]


def programs(placement: Placement, device: str) -> dict[str, Program]:
    """The programs to time on one layout."""
    mesh = init_device_mesh(device, (RANKS,))

    def make() -> DTensor:
        return distribute_tensor(torch.randn(SHAPE, device=device), mesh, [placement], src_data_rank=None)

    left, right = make(), make()
    found: dict[str, Program] = {
        "add": lambda: left + right,
        "mul_": lambda: left.mul_(1.0),
    }
    for name in ("foreach", "fused"):
        params = [nn.Parameter(make()) for _ in range(PARAMS)]
        for param in params:
            param.grad = make()
        optimizer = torch.optim.AdamW(params, lr=1e-3, **{name: True})
        found[f"AdamW {name}, {PARAMS} parameters"] = optimizer.step
    clipped = [nn.Parameter(make()) for _ in range(PARAMS)]
    for param in clipped:
        param.grad = make()
    found[f"clip_grad_norm_, {PARAMS} parameters"] = lambda: nn.utils.clip_grad_norm_(clipped, 1.0)
    return found


def seconds_per_call(program: Program, calls: int) -> float:
    """Mean CPU time of a call: the processor's clock, so that other processes do not count."""
    begin = time.process_time()
    for _ in range(calls):
        program()
    return (time.process_time() - begin) / calls


def compare(ragged: Program, stock: Program, rounds: int, slot_s: float) -> dict[str, float]:
    """Interleaved rounds of the two programs."""
    for program in (ragged, stock) * 3:  # fill the caches
        program()
    calls = max(1, round(slot_s / seconds_per_call(stock, 3)))
    times: dict[str, list[float]] = {"ragged": [], "stock": []}
    for number in range(rounds):
        order = [("ragged", ragged), ("stock", stock)]
        for name, program in order if number % 2 else reversed(order):
            times[name].append(seconds_per_call(program, calls))
    ratios = [r / s for r, s in zip(times["ragged"], times["stock"])]
    return {
        "ragged_us": statistics.median(times["ragged"]) * 1e6,
        "stock_us": statistics.median(times["stock"]) * 1e6,
        "ratio": statistics.median(ratios),
        "ratio_low": statistics.quantiles(ratios, n=10)[0],
        "ratio_high": statistics.quantiles(ratios, n=10)[-1],
    }


def main() -> None:
    """Measure, print the table, and write the figures where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30, help="interleaved rounds per op")
    parser.add_argument("--slot", type=float, default=0.02, help="seconds per layout and round")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="where to write the figures (JSON)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    ragged = programs(RaggedShard((0,), (5, 0, 8, 3)), options.device)
    stock = programs(Shard(0), options.device)
    rows = {name: compare(ragged[name], stock[name], options.rounds, options.slot) for name in ragged}
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, {options.device}")
    print(f"{'op':34s} {'ragged us':>10s} {'Shard(0) us':>12s} {'ratio':>7s}   10 to 90 %")
    for name, row in rows.items():
        print(
            f"{name:34s} {row['ragged_us']:10.1f} {row['stock_us']:12.1f} {row['ratio']:7.3f}   "
            f"{row['ratio_low']:.2f} to {row['ratio_high']:.2f}"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        about = {"torch": torch.__version__, "device": options.device, "rounds": options.rounds}
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
