"""How should a rank add the rows that its node sends it, while matrix products run?

Two levels add the rows of each step on a stream of their own (``fsdp/reduce/exchange.py``). That wants the
memory's rate and multiprocessors that products hold: alone it takes half as long as beside them. Each way
here makes the same sums, in fp32 and rounded once; what counts is by how much it delays the products, and
when its sums are ready to leave the node.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.device_time import device_ms

from .shapes import LayerShape, layer_numel

__all__ = ["WAYS", "study"]

_STEPS, _WARMUP = 10, 3
_PIECES = 8
_PRODUCTS, _PRODUCT_WIDTH = 24, 8192


def _at_once(rows: torch.Tensor, out: torch.Tensor) -> None:
    torch.sum(rows, 0, out=out)


def _in_pieces(rows: torch.Tensor, out: torch.Tensor) -> None:
    for part, total in zip(rows.chunk(_PIECES, 1), out.chunk(_PIECES)):
        torch.sum(part, 0, out=total)


def _by_product(rows: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(rows.new_ones(1, rows.shape[0]), rows, out=out.view(1, -1))


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "at once": _at_once,
    "in pieces": _in_pieces,
    "by a product with ones": _by_product,
}
"""``way(rows, out)``: the sum over the rows; the first is what the runtime does."""


def study(shape: LayerShape, tokens: int, ranks: int, ranks_per_node: int) -> list[dict[str, Any]]:
    """Milliseconds of one layer's sums inside the node and of products beside them, on the current device."""
    make = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randn(ranks_per_node, layer_numel(shape) // ranks, **make)
    out = torch.empty_like(rows[0])
    x, weight = (
        torch.randn(tokens, _PRODUCT_WIDTH, **make),
        torch.randn(_PRODUCT_WIDTH, _PRODUCT_WIDTH, **make),
    )
    product = torch.empty_like(x)

    def products() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(x, weight, out=product)

    found = []
    for priority in (-1, 0):
        side = torch.cuda.Stream(priority=priority)
        for name, way in WAYS.items():

            def sums(way: Callable[[torch.Tensor, torch.Tensor], None] = way) -> None:
                for _ in range(ranks // ranks_per_node):
                    way(rows, out)

            row = {"model": shape.name, "way": name, "priority": priority}
            found.append(row | _times(sums, products, side))
    return found


def _times(
    sums: Callable[[], None], products: Callable[[], None], side: torch.cuda.Stream
) -> dict[str, float]:
    """Both alone and both together, in turns: the clock follows the temperature."""
    times: dict[str, list[float]] = {}
    for step in range(_WARMUP + _STEPS):
        took = {"sums_ms": device_ms(sums), "products_ms": device_ms(products)}
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def together(start: torch.cuda.Event = start, end: torch.cuda.Event = end) -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                start.record()
                sums()
                end.record()
            products()

        took["products_beside_sums_ms"] = device_ms(together)
        end.synchronize()
        took["sums_beside_products_ms"] = start.elapsed_time(end)
        if step >= _WARMUP:
            for name, ms in took.items():
                times.setdefault(name, []).append(ms)
    return {name: round(statistics.median(values), 3) for name, values in times.items()}
