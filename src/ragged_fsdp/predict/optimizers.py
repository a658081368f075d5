"""What an update takes: seconds, state, and memory while it runs.

Element-wise optimizers read and write so many bytes per parameter. Muon also sends every hidden matrix to a
rank of its own, iterates there (Newton-Schulz) and sends the update back, in buckets: of what is on the
network the first gather and the last way back are not hidden, and what the iteration is too short for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ragged_fsdp.optim.muon.rules import is_hidden_matrix
from ragged_fsdp.predict.card import Card
from ragged_fsdp.predict.network import Network, Place, price
from ragged_fsdp.predict.parallel import LayerPart

__all__ = ["OPTIMIZERS", "Update", "elementwise", "muon", "with_state_on_host"]

_BF16 = 2
_ADAMW_BYTES = 28.0
_MUON_STATE, _MUON_MOVED = 4.0, 26.0
"""Bytes per element of a hidden matrix: fp32 momentum; it, gradient, weight and update, read and written."""
_NEWTON_SCHULZ_STEPS = 5
_OF_NAIVE = 0.70
"""Operations and rate of our kernels over those of plain products (docs/optimizers-muon.md)."""
_BUCKET_NUMEL, _IN_FLIGHT = 1 << 27, 3  # of optim/muon
_PART_NUMEL, _PARTS_AT_ONCE = 1 << 23, 3  # of optim/offload


@dataclass(frozen=True)
class Elementwise:
    """Bytes of state per parameter beside fp32 weights, and bytes that an update moves per parameter."""

    state_bytes: float
    moved_bytes: float


_ELEMENTWISE = {
    "adamw": Elementwise(8.0, _ADAMW_BYTES),
    "adam8bit": Elementwise(2.0 + 2 * 4 / 256, 16.0),
    "sgd": Elementwise(0.0, 12.0),
}
OPTIMIZERS = (*_ELEMENTWISE, "muon")
"""By the names of ``train``; Shampoo is not modelled."""


@dataclass(frozen=True)
class Update:
    """One update of one rank."""

    seconds: float
    state_bytes: int
    peak_bytes: int = 0


def elementwise(name: str, shard_numel: int, card: Card, offload: bool) -> Update:
    """AdamW, 8-bit Adam or SGD; with ``offload`` on the host."""
    kind = _ELEMENTWISE[name]
    rate = card.host_adamw_gb_s if offload else card.adamw_gb_s
    return Update(shard_numel * kind.moved_bytes / (rate * 1e9), int(shard_numel * kind.state_bytes))


def with_state_on_host(update: Update, shard_numel: int, card: Card, *, in_parts: bool) -> Update:
    """An update whose state comes from the host and goes back (``optim.offload_state``).

    Both ways are used at once, and the update hides behind them, except for what one part waits for: its way
    in, its update, its way out. Without parts, as Muon has it, nothing is hidden.
    """
    way_s = update.state_bytes / (card.host_gb_s * 1e9)
    if not in_parts:
        return Update(2 * way_s + update.seconds, 0, update.peak_bytes + update.state_bytes)
    part = min(1.0, _PART_NUMEL / max(1, shard_numel))
    at_once = int(update.state_bytes * min(1.0, _PARTS_AT_ONCE * part))
    shown_s = part * (way_s + min(way_s, update.seconds))
    return Update(max(way_s, update.seconds) + shown_s, 0, update.peak_bytes + at_once)


def muon(
    parts: Iterable[tuple[LayerPart, int]], gpus: int, shard: int, card: Card, network: Network
) -> Update:
    """Muon for hidden matrices and AdamW for the rest; ``parts`` come with how often the model has them."""
    hidden = rest = flops = work = 0.0
    largest = largest_flops = 0.0
    for part, count in parts:
        for name, shape in part.shapes:
            numel = math.prod(shape) / part.ranks * count
            inside = f"layers.0.{name}" if part.name != "root" else name
            if not is_hidden_matrix(inside, torch.empty(shape, device="meta")):
                rest += numel
                continue
            short, long = sorted(shape[-2:])
            one = _NEWTON_SCHULZ_STEPS * (4.0 * short**2 * long + 2.0 * short**3)
            matrices = math.prod(shape[:-2]) * part.groups
            hidden += numel
            flops += one * matrices * count
            work += math.prod(shape) * part.groups * count
            largest, largest_flops = max(largest, short * long), max(largest_flops, one)
    of_root = max(work / gpus, largest)
    iterate_s = max(flops / gpus, largest_flops) * _OF_NAIVE / (card.matmul_tflops * 1e12)
    way = max(price("all_to_all", max(hidden, of_root) * _BF16, Place.even(shard, network), network))
    buckets = max(1, math.ceil(of_root / _BUCKET_NUMEL))
    shown_s = 2 * way / buckets + max(0.0, 2 * way * (1 - 1 / buckets) - iterate_s)
    moved_s = hidden * _MUON_MOVED / (card.memory_gb_s * 1e9) + rest * _ADAMW_BYTES / (card.adamw_gb_s * 1e9)
    bucket = min(_BUCKET_NUMEL, of_root) if of_root > largest else of_root
    peak = _BF16 * (_IN_FLIGHT * (bucket + hidden / buckets) + 2 * bucket)
    state = hidden * _MUON_STATE + rest * _ELEMENTWISE["adamw"].state_bytes
    return Update(iterate_s + shown_s + moved_s, int(state), int(peak))
