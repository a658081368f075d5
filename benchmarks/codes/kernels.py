"""Time of the kernels that encode a shard and decode a gathered layer, beside torch's operators and a copy.

    PYTHONPATH=. python benchmarks/codes/kernels.py --out benchmarks/codes/kernels.json

A layer lies on 64 ranks; this process holds the message that all of them would have sent. Times are the
least of a few launches on an idle GPU, by events. ``of_copy_rate`` is the rate at which a kernel moves the
bytes that it must (decoding to bf16: three per element; encoding from fp32: five), over that of a large copy.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from benchmarks.device_time import device_ms
from benchmarks.saving import save

from ragged_fsdp import block_codes
from ragged_fsdp.fsdp.gather import codes_triton as block_codes_triton
from ragged_fsdp.fsdp.gather.codes import MessageLayout
from ragged_fsdp.fsdp.parts.plan import GroupTensors, make_plan
from ragged_fsdp.policy import BlockCodes

RANKS = 64
LAYERS: dict[str, list[tuple[int, ...]]] = {
    "gpt-oss-120b": [(128, 2880, 5760), (128, 2880, 2880), (5120, 2880), (2880, 4096)],
    "llama-3-70b": [(10240, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672)],
}
TILES = {"gpt-oss-120b": [(64, 64), (32, 32), (1, 64)], "llama-3-70b": [(128, 128), (32, 32), (1, 256)]}


def least_ms(run: Callable[[], Any], launches: int = 5) -> float:
    """The shortest of some launches of ``run``, in milliseconds, after one to compile it."""
    run()
    return min(device_ms(run) for _ in range(launches))


def copy_bytes_per_ms() -> float:
    """Bytes read and written per millisecond by a large copy: what a kernel can reach at best."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / least_ms(lambda: target.copy_(source))


def decoding(shapes: list[tuple[int, ...]], codes: BlockCodes) -> tuple[int, float, float]:
    """Decode a gathered layer: its elements, and the times of the kernel and of torch's operators."""
    names, count = [f"p{index}" for index in range(len(shapes))], len(shapes)
    blocks = [codes.granularity.block_numel(shape) for shape in shapes]
    tensors = GroupTensors(names, shapes, blocks, [torch.float32] * count, torch.bfloat16)
    layout = MessageLayout(make_plan(tensors, RANKS), (codes,) * count)
    message = torch.zeros(RANKS, layout.part_bytes, dtype=torch.uint8, device="cuda")
    out = torch.empty(layout.plan.layout.buffer_numel, dtype=torch.bfloat16, device="cuda")
    decoder = block_codes_triton.Decoder(layout, out.device)
    fused, plain = least_ms(lambda: decoder(message, out)), least_ms(lambda: layout.decode(message, out), 2)
    return sum(map(math.prod, shapes)), fused, plain


def encoding(shapes: list[tuple[int, ...]], codes: BlockCodes) -> tuple[int, float, float]:
    """Encode a shard, as much of the largest matrix as a rank holds: its elements, and both times."""
    rows, columns = codes.block_shape
    width = max(shapes, key=math.prod)[-1]
    bands = -(-sum(map(math.prod, shapes)) // RANKS // (rows * width))
    values = torch.randn(bands, rows, width // columns, columns, device="cuda")
    packed = torch.empty(values.shape, dtype=block_codes.code_dtype(codes), device="cuda")
    out = packed, torch.empty(bands, width // columns, device="cuda")
    fused = least_ms(lambda: block_codes_triton.encode(values, codes, out))
    return values.numel(), fused, least_ms(lambda: block_codes.encode(values, codes, out), 2)


def main() -> None:
    """Measure every layer, kind of codes and tile, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of results (JSON)")
    out = parser.parse_args().out
    rate = copy_bytes_per_ms()
    rows: list[dict[str, Any]] = []
    for layer, shapes in LAYERS.items():
        for codes in (BlockCodes(kind, tile) for kind in block_codes.LARGEST for tile in TILES[layer]):
            for what, measure, element_bytes in (("decode", decoding, 3), ("encode", encoding, 5)):
                numel, fused, plain = measure(shapes, codes)
                rows.append(
                    {
                        "layer": layer,
                        "codes": codes.dtype,
                        "tile": codes.block_shape,
                        "what": what,
                        "elements": numel,
                        "kernel_ms": round(fused, 3),
                        "torch_ms": round(plain, 3),
                        "of_copy_rate": round(element_bytes * numel / fused / rate, 3),
                    }
                )
                print(rows[-1], flush=True)
    save(out, triton=triton.__version__, copy_tb_per_s=round(rate / 1e9, 2), rows=rows)


if __name__ == "__main__":
    main()
