"""The products of a layer from the shapes of its weights: what power they draw, what collectives delay.

Every token meets every matrix of a layer once, of experts those that it visits; backward takes twice a
forward. Weights of experts that lie in one tensor are multiplied by *grouped products*, one kernel for all.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ragged_fsdp.predict.card import Card, Point
from ragged_fsdp.predict.parallel import ReplicaRanks
from ragged_fsdp.predict.workload import ROOT, LayerKind, Workload

__all__ = ["GROUPED_BESIDE", "Products", "products_of"]

GROUPED_BESIDE = 1.77
"""Times as long as alone that grouped products take while a collective holds multiprocessors, where a card
does not say. Their kernel has one thread block per multiprocessor, each with its share of the work: a block
that finds none free begins when another has ended. On an H200 beside a kernel on one multiprocessor: 1.82
(GPT-OSS-120B) and 1.71 (DeepSeek-V3), from the kernels of the step benchmark's rows of FSDP2, free and at 400
GB/s; beside the copies of the free rows 1.00."""
_BF16 = 2
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Products:
    """Seconds of one forward at the card's rates."""

    plain_s: float
    grouped_s: float
    """Grouped products: at least as long as their weights are read."""
    beside: float = GROUPED_BESIDE
    """Times as long that grouped products take beside a collective."""

    @property
    def seconds(self) -> float:
        return self.plain_s + self.grouped_s

    def held(self, point: Point) -> float:
        """How much longer the layer takes, as a share, while a collective holds multiprocessors.

        Grouped products take the part of its time that they have of its roofline.
        """
        if not self.grouped_s:
            return 0.0
        slower = point.forward_ms / point.roofline_forward_ms
        slower_backward = point.backward_ms / point.roofline_backward_ms
        grouped_ms = 1e3 * self.grouped_s * (slower + 2 * slower_backward)
        return (self.beside - 1) * min(1.0, grouped_ms / (point.forward_ms + point.backward_ms))


def products_of(
    workload: Workload, kind: LayerKind, tokens: int, ranks: ReplicaRanks, card: Card
) -> Products:
    """The products of one rank with one layer of ``kind``, or with the head."""
    rate, memory = card.matmul_tflops * 1e12, card.memory_gb_s * 1e9
    rows = tokens * workload.experts_per_token
    experts = {number for name, _ in kind.shapes for number in _EXPERT.findall(f".{name}")}
    plain = grouped = read = 0.0
    for name, shape in kind.shapes:
        numel = math.prod(shape)
        if len(shape) == 3:
            grouped += 2.0 * rows * numel / shape[0] / rate
            read += _BF16 * numel / ranks.ep / memory
        elif len(shape) == 2 and _EXPERT.search(f".{name}"):
            plain += 2.0 * rows * numel / len(experts) / rate
        elif len(shape) == 2 and not (kind.name == ROOT and "embed" in name):
            plain += 2.0 * tokens * numel / rate
    beside = card.grouped_beside or GROUPED_BESIDE
    return Products(plain / ranks.tp, max(grouped, read) / ranks.tp, beside)
