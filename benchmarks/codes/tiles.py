"""Time of the passes that tile and untile a layer, and that decode codes in the order of tiles.

    PYTHONPATH=. python benchmarks/codes/tiles.py --out benchmarks/codes/tiles.json

A layer in tiles of 128 x 128 lies on 64 ranks. ``untile`` writes the gathered bf16 tiles to the parameters,
``tile`` a bf16 gradient to its place in an fp32 buffer, ``decode`` the gathered codes to bf16 parameters.
``of_copy_rate`` is the rate at which a pass moves the bytes that it must, over that of a large copy.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.codes.kernels import LAYERS, RANKS, copy_bytes_per_ms, least_ms
from benchmarks.saving import save

from ragged_fsdp.fsdp.gather import codes_triton
from ragged_fsdp.fsdp.gather.codes import MessageLayout
from ragged_fsdp.fsdp.parts.plan import GroupTensors, make_plan
from ragged_fsdp.policy import BlockCodes, Tiles
from ragged_fsdp.tiling import kind_views

TILE = (128, 128)


def copying(shapes: list[tuple[int, ...]], stored: torch.dtype, *, tiles: bool) -> float:
    """Milliseconds to tile, or to untile, all tensors of a layer; the ordinary ones are bf16."""
    pairs = []
    for shape in shapes:
        flat = torch.empty(math.prod(shape), dtype=stored, device="cuda")
        pairs += kind_views(flat, torch.empty(shape, dtype=torch.bfloat16, device="cuda"), TILE, wide=True)
    targets, sources = zip(*(pair if tiles else pair[::-1] for pair in pairs))
    return least_ms(lambda: torch._foreach_copy_(targets, sources))


def decoding(shapes: list[tuple[int, ...]], codes: BlockCodes) -> float:
    """Milliseconds to decode a gathered layer."""
    names, count = [f"p{index}" for index in range(len(shapes))], len(shapes)
    blocks, dtypes = [Tiles(*TILE).block_numel(shape) for shape in shapes], [torch.float32] * count
    tensors = GroupTensors(names, shapes, blocks, dtypes, torch.bfloat16, tiles=[TILE] * count)
    layout = MessageLayout(make_plan(tensors, RANKS), (codes,) * count)
    message = torch.zeros(RANKS, layout.part_bytes, dtype=torch.uint8, device="cuda")
    out = torch.empty(layout.plan.layout.buffer_numel, dtype=torch.bfloat16, device="cuda")
    decoder = codes_triton.Decoder(layout, out.device)
    return least_ms(lambda: decoder(message, out))


def passes(shapes: list[tuple[int, ...]]) -> Iterator[tuple[str, float, int]]:
    """Name, milliseconds, and bytes that an element must be moved by."""
    yield "untile, bf16", copying(shapes, torch.bfloat16, tiles=False), 4
    yield "tile, bf16 to fp32", copying(shapes, torch.float32, tiles=True), 6
    yield "tile, bf16", copying(shapes, torch.bfloat16, tiles=True), 4
    for kind in ("int8", "float8_e4m3fn"):
        yield f"decode, {kind}", decoding(shapes, BlockCodes(kind, TILE)), 3


def main() -> None:
    """Measure every layer and pass, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of results (JSON)")
    out = parser.parse_args().out
    rate = copy_bytes_per_ms()
    rows: list[dict[str, Any]] = []
    for layer, shapes in LAYERS.items():
        numel = sum(map(math.prod, shapes))
        for what, ms, element_bytes in passes(shapes):
            of_rate = round(element_bytes * numel / ms / rate, 3)
            rows.append({"layer": layer, "pass": what, "ms": round(ms, 3), "of_copy_rate": of_rate})
            print(rows[-1], flush=True)
    save(out, copy_tb_per_s=round(rate / 1e9, 2), rows=rows)


if __name__ == "__main__":
    main()
