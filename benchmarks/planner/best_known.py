"""Searches far longer than the planner may, and records the best shard sizes known for the test corpus.

    python benchmarks/planner/best_known.py [SECONDS_PER_CASE] [--jobs 1]

Each case that is not proven optimal yet gets the planner with six times its effort, then programmes with
random chains just below the best size until the time is up. Results only ever improve the record.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from planner_corpus import BEST_KNOWN, Case, all_cases, best_known
from ragged_fsdp.planner.bounds import class_floors
from ragged_fsdp.planner.mixing import ChainLink, Mix, best_mix, joined_links
from ragged_fsdp.planner.problem import Kind, Problem, place_in_order
from ragged_fsdp.planner.search import EFFORT, best_layout

_RUN_WORK = 30_000_000


def _random_mix(problem: Problem, rng: random.Random) -> Mix:
    """A programme that counts some kinds and chains the rest in random order."""
    counts = problem.counts
    coarse = [kind for kind in counts if problem.align % kind[1]]
    free = [kind for kind in counts if problem.align % kind[1] == 0]
    number = rng.randint(1, min(4, len(coarse)))
    frequent = sorted(coarse, key=lambda kind: -counts[kind])[:number]
    counted = frequent if rng.random() < 0.5 else rng.sample(coarse, number)
    chain = [ChainLink(kind, (kind,)) for kind in coarse if kind not in counted for _ in range(counts[kind])]
    chain += joined_links(problem, free, rng.choice([4, 8, 16, 32, 64]))
    rng.shuffle(chain)
    return Mix(tuple((kind, counts[kind]) for kind in counted), tuple(chain), rng.choice([None, 64, 16]))


def _checked(problem: Problem, order: Sequence[Kind], shard: int) -> int:
    """``shard``, if ``order`` really is all tensors and fits there: the record must be beyond doubt."""
    complete = sorted(order) == sorted(problem.kinds)
    if not complete or place_in_order(order, problem.ranks, shard, problem.align) is None:
        raise RuntimeError(f"the order found does not fit at {shard}: {problem}.")
    return shard


def _improve(problem: Problem, best: int, seconds: float, rng: random.Random) -> int:
    """Descend from ``best`` with random programmes until the time is up."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(problem.align % kind[1] for kind in problem.counts):
        mix = _random_mix(problem, rng)
        if mix.work > _RUN_WORK:
            continue
        for divisor, floor in sorted(class_floors(problem, best).items()):
            low, high = floor // divisor, (best - 1) // divisor
            stride = max(1, (high - low) // 8)
            while high >= low and time.monotonic() < end:
                order, _ = best_mix(problem, mix, high * divisor, divisor)
                if order is None:
                    break
                best = _checked(problem, order, high * divisor)
                high -= stride if high - stride >= low else 1
    return best


def _search(case: Case, known: dict[str, int], seconds: float) -> dict[str, int]:
    problem = Problem.build(zip(case.sizes, case.blocks), case.ranks, case.unit, case.align)
    outcome = best_layout(problem, EFFORT)
    _checked(problem, outcome.order, outcome.shard)
    shard, bound = min(outcome.shard, known["shard"]), max(outcome.lower_bound, known["bound"])
    if shard > bound and seconds:
        outcome = best_layout(problem, 6 * EFFORT)
        _checked(problem, outcome.order, outcome.shard)
        shard, bound = min(outcome.shard, shard), max(outcome.lower_bound, bound)
    if shard > bound and seconds:
        shard = _improve(problem, shard, seconds, random.Random(case.name))
    if shard < bound:
        raise RuntimeError(f"{case.name}: found {shard} below the proven bound {bound}; the bound is wrong.")
    return {"shard": shard, "bound": bound}


def main(seconds: float, jobs: int) -> None:
    known = best_known()
    nothing = {"shard": 2**62, "bound": 0}
    before = {case.name: known.get(case.name, nothing) for case in all_cases()}
    open_cases = [case for case in all_cases() if before[case.name]["shard"] > before[case.name]["bound"]]
    with ProcessPoolExecutor(jobs) as pool:
        pending = {pool.submit(_search, case, before[case.name], seconds): case.name for case in open_cases}
        for done in as_completed(pending):
            name = pending[done]
            known[name] = done.result()
            print(name, before[name], known[name], flush=True)
            if known[name] != before[name]:
                BEST_KNOWN.write_text(json.dumps(known, indent=0) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "seconds", type=float, nargs="?", default=10.0, help="for the random search of a case"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    main(arguments.seconds, arguments.jobs)
