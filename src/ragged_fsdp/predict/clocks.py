"""How fast the products of a step run on a GPU whose power is limited.

Large products alone draw more power than the GPU may, so it lowers its clock until they do not: the rate of
products on a card is that of this clock. What draws less (a layer whose products are a part of its time, a
step that waits for the network) is given a higher clock. Three assumptions:

* power goes with the share of time in which products run at the card's rate, the *load*;
* it goes with the third power of the clock (frequency times the square of a voltage that rises with it), and
  the limit is on its mean over a step, so the clock goes with ``load ** (-1 / 3)``;
* the clock ends at a ``boost`` times that of products alone.

A layer on a card was measured with its own load; in a step its products take as much less as the clocks of
both loads say. Everything that is not a product keeps its time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ragged_fsdp.predict.books import LayerRun, StepCosts
from ragged_fsdp.predict.replay import Replayed, replay

__all__ = ["BOOST", "clock", "replay_at_its_clock"]

BOOST = 1.2
"""The highest clock over that of large products, where a card does not say. On an H200 the same attention
kernels of Llama-3-70B took 2.13 ms a layer in steps of products alone and 1.88 ms in steps that waited (step
benchmark, kernels of ``none`` and of two levels over 256 ranks), where the first load is 0.88 and its clock
1.04."""
_ROUNDS = 3
"""A higher clock shortens the step, which raises its load: each round leaves a third of the difference."""


def clock(load: float, boost: float = BOOST) -> float:
    """The clock under a load, over that under 1. A load above 1 (the card's products are slower) is 1."""
    return min(boost, max(1.0, 1 / max(load, 1e-9)) ** (1 / 3))


def replay_at_its_clock(costs: StepCosts, boost: float = BOOST) -> Replayed:
    """A step whose products run at the clock that its own load allows."""
    done = replay(costs)
    runs = [costs.root_run, *(run for _, run in costs.layers)]
    if all(clock(_load(run), boost) == boost for run in runs):
        return done
    products_s = costs.micro_batches * sum(_products_s(run) for run in runs)
    for _ in range(_ROUNDS):
        at = partial(_at, clock(products_s / done.seconds, boost), boost)
        layers = [(groups, at(run)) for groups, run in costs.layers]
        done = replay(replace(costs, root_run=at(costs.root_run), layers=layers))
    return done


def _products_s(run: LayerRun) -> float:
    return run.forward_products_s + run.backward_products_s


def _load(run: LayerRun) -> float:
    """The share of a layer's time, run by itself, that its products would take at the sustained rate."""
    return _products_s(run) / max(1e-9, run.forward_s + run.backward_s)


def _at(now: float, boost: float, run: LayerRun) -> LayerRun:
    """A layer at another clock than that of its own load."""
    less = 1 / clock(_load(run), boost) - 1 / now
    return replace(
        run,
        forward_s=run.forward_s - less * run.forward_products_s,
        backward_s=run.backward_s - less * run.backward_products_s,
    )
