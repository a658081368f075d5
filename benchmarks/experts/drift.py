"""Experts that follow a load that drifts, against experts that stay where they are.

    PYTHONPATH=. python -m benchmarks.experts.drift --out benchmarks/experts/drift.json

Routers of 128 experts choose 8 for each token, as those of Qwen3-30B-A3B do, for 8 ranks. Which experts are
popular drifts: a wave goes over their numbers once in ``--period`` steps, and each has a popularity of its
own beside it. Tokens are drawn, rows are counted as the dispatcher counts them; every N steps the splits are
those that ``balanced_splits`` finds from the rows of the steps since. ``busiest`` is the rank with most rows
in a step, as a multiple of the mean: what all others wait for. Experts lie one after the other on the ranks.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch

from ragged_fsdp.experts import ExpertLoad, ExpertSplit, balanced_splits
from ragged_fsdp.experts.permute import order

EXPERTS, PER_TOKEN, RANKS = 128, 8, 8
INTERVALS = (1, 10, 40)


def popularity(step: int, period: int, own: torch.Tensor) -> torch.Tensor:
    """Logits of the experts: the wave, and what each has of its own."""
    away = (torch.arange(float(EXPERTS)) - EXPERTS * step / period).abs() % EXPERTS
    away = torch.minimum(away, EXPERTS - away)
    return torch.log(0.3 + 2.0 * torch.exp(-((away / 12) ** 2))) + own


def run(steps: int, period: int, tokens: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """The busiest rank of every way, after the first interval of each."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(EXPERTS, generator=generator) * 0.3
    even = ExpertSplit.even(EXPERTS, RANKS)
    splits = dict.fromkeys(INTERVALS, even)
    counted = {interval: torch.zeros(EXPERTS, dtype=torch.int64) for interval in INTERVALS}
    busiest: dict[str, list[float]] = {"static": [], **{f"every {n}": [] for n in INTERVALS}}
    for step in range(steps):
        noise = torch.rand(tokens, EXPERTS, generator=generator).clamp_(min=1e-9).log_().neg_().log_().neg_()
        chosen = (popularity(step, period, own) + noise).topk(PER_TOKEN, dim=1)[1]
        rows = order(chosen, EXPERTS)[1]
        busiest["static"].append(even.busiest(rows.tolist()))
        for interval in INTERVALS:
            if step >= interval:
                busiest[f"every {interval}"].append(splits[interval].busiest(rows.tolist()))
            counted[interval] += rows
            if (step + 1) % interval == 0:
                load = ExpertLoad({"layer": counted[interval]}, torch.zeros(()), {"layer": splits[interval]})
                splits[interval] = balanced_splits(load)["layer"]
                counted[interval] = torch.zeros_like(rows)
    return {
        way: {"most": round(max(found), 3), "mean": round(sum(found) / len(found), 3)}
        for way, found in busiest.items()
    }


def main() -> None:
    """Run and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, help="the file of results (JSON)")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--period", type=int, default=8000, help="steps in which the wave goes round")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a step, of all ranks together")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {platform.system()}",
        "torch": torch.__version__,
        "steps": options.steps,
        "period": options.period,
        "tokens": options.tokens,
        "busiest": run(options.steps, options.period, options.tokens),
    }
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
