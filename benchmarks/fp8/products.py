"""Time of the FP8 products and of what surrounds them, beside bf16, for the layers of published models.

    PYTHONPATH=src:. python benchmarks/fp8/products.py --out benchmarks/fp8/products.json

Times are the least of a few launches, by events, in ms; the GPU is kept busy until a launch is queued, so
the host's time is not in them. ``fp8`` is everything that a step has to do: both quantisations, the
transposed weight of a linear layer (that of experts is read as it lies), three products; ``ratio`` is that
over the three products of bf16. ``--configs`` also tries other tiles of the Triton kernels; an error of one
case does not stop the others. A sweep of experts in less than a minute::

    ... products.py --configs --only 'gpt-oss-120b gate_up' --seconds 35 --out benchmarks/fp8/sweep.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from benchmarks.device_time import device_ms
from benchmarks.saving import save
from torch import Tensor

from ragged_fsdp.fp8 import hopper, kernels
from ragged_fsdp.fp8.groups import BLOCK, Groups, one_group
from ragged_fsdp.fsdp.gather import codes_triton
from ragged_fsdp.policy import BlockCodes

LINEARS = {  # tokens, rows and columns of the weight
    "llama-3-70b up": (4096, 28672, 8192),
    "llama-3-70b down": (4096, 8192, 28672),
    "llama-3-70b o": (4096, 8192, 8192),
    "gpt-oss-120b q": (4096, 4096, 2880),
}
EXPERTS = {  # experts, rows of all of them, columns in, columns out
    "gpt-oss-120b gate_up": (128, 16384, 2880, 5760),
    "gpt-oss-120b down": (128, 16384, 2880, 2880),
    "deepseek-v3 gate_up": (256, 32768, 7168, 4096),
    "deepseek-v3 down": (256, 32768, 2048, 7168),
}
CONFIGS = [
    (64, 128, 4, 3),  # the default
    (128, 128, 8, 3),  # an expert of up to 128 rows reads its weight once, not once per 64 rows
    (128, 128, 8, 4, 1, 16, 0, 4),
    (64, 128, 4, 3, 2),  # two tiles of columns share the rows
    (64, 64, 4, 4, 2),
    (128, 64, 4, 4, 2),
    (64, 128, 4, 4, 1, 16, 0, 32),  # more rows share columns that are in the cache
]
"""Rows, columns, warps, stages, parts, groups of a program, registers, tiles together (``Config``).

The most telling first; columns are at most 128, since a program reads one scale of the weight per part.
"""
GRADIENT_CONFIGS = [
    (64, 128, 4, 3, 1, 16, 0, 16),  # the default
    (128, 128, 8, 5, 1, 16, 0, 4),
    (128, 128, 8, 4, 1, 32, 0, 8),
    (64, 128, 4, 3, 1, 32, 0, 16),  # a program walks along more groups
    (64, 128, 4, 3, 1, 64, 0, 16),
    (128, 64, 4, 4, 2, 16, 0, 8),
    (64, 64, 4, 4, 2, 16, 0, 16),
]
LYING_CONFIGS = [
    (64, 128, 4, 3),  # the default
    (128, 64, 8, 3),
    (64, 128, 4, 4),
    (64, 128, 4, 3, 1, 16, 0, 32),
]
"""For a weight as it lies; one part."""
BF16 = torch.bfloat16
_BUSY_CYCLES = 2_000_000


def least_ms(run: Callable[..., Any], *args: Any, launches: int = 6) -> float | str:
    """The shortest of some launches after one to compile; or what went wrong."""
    try:
        run(*args)
        return round(min(busy_ms(partial(run, *args)) for _ in range(launches)), 4)
    except Exception as error:  # one configuration that does not fit must not hide the others
        torch.cuda.synchronize()
        return f"{type(error).__name__}: {str(error)[:200]}"


def busy_ms(call: Callable[[], object]) -> float:
    """Milliseconds of a call that was queued while the GPU had other work."""
    torch.cuda._sleep(_BUSY_CYCLES)
    return device_ms(call)


def normal(*shape: int) -> Tensor:
    """Random numbers in bf16."""
    return torch.randn(shape, device="cuda", dtype=BF16)


def coded(experts: int, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes of matrices and their scales; random bytes that are finite."""
    codes = torch.randint(0, 0x7E, (experts, rows, columns), dtype=torch.uint8, device="cuda")
    scales = torch.rand(experts, -(-rows // BLOCK), -(-columns // BLOCK), device="cuda")
    return codes.view(torch.float8_e4m3fn), scales


def swept(
    run: Callable[..., Any], cases: Sequence[Sequence[Any]], configs: Sequence[tuple[int, ...]], until: float
) -> dict[str, Any]:
    """Times of the same kernel for each of the cases, by configuration, those first that stand first.

    Most of the time is compilation, which is not begun after ``until``.
    """
    found: dict[str, Any] = {}
    for config in configs:
        if time.monotonic() > until:
            break
        found[str(config)] = [least_ms(run, *case, kernels.Config(*config)) for case in cases]
    return found


def measured(
    x: Tensor, dy: Tensor, groups: Groups, count: int, bf16: Sequence[float | str], until: float | None
) -> dict[str, Any]:
    """The parts of a product with ``count`` matrices (out, in), and of its gradients."""
    found: dict[str, Any] = {"bf16": bf16}
    seen = torch.zeros(1, dtype=torch.int32, device="cuda")
    xq, dq = (kernels.quantize(t, groups, seen) for t in (x, dy))
    codes, scales = coded(count, dy.shape[1], x.shape[1])
    forward = (*xq[:2], codes, scales, groups, BF16)
    backward = (*dq[:2], codes, scales, groups, BF16)
    gradient = (*dq[2:], *xq[2:], groups, BF16)
    found["quantize x, dy"] = [least_ms(kernels.quantize, t, groups, seen) for t in (x, dy)]
    operands, lying = backward, groups.size > 1
    if not lying:
        found["transpose"] = least_ms(kernels.transpose, codes)
        turned = kernels.transpose(codes), scales.transpose(1, 2).contiguous()
        operands = (*dq[:2], *turned, groups, BF16)
    found["products"] = [
        least_ms(hopper.product, *forward, False),
        least_ms(hopper.product, *operands, lying),
        least_ms(hopper.weight_gradient, *gradient),
    ]
    parts = [*found["quantize x, dy"], found.get("transpose", 0.0), *found["products"]]
    if not any(isinstance(part, str) for part in (*parts, *bf16)):
        found["fp8"] = round(sum(parts), 4)
        found["ratio"] = round(sum(parts) / sum(bf16), 3)
    if until is not None:
        out = torch.empty(count, dy.shape[1], x.shape[1], dtype=BF16, device="cuda")
        nothing = kernels.groups_of(torch.zeros(count, dtype=torch.int64, device="cuda"), len(x))
        found["write a gradient: by torch, by the kernel"] = [
            least_ms(out.zero_),
            least_ms(kernels.weight_gradient, *dq[2:], *xq[2:], nothing, BF16),
        ]
        del out
        shape, flat = tuple(codes.shape), codes.view(-1)
        found["tiles: forward, input gradient, turn, untile"] = [
            least_ms(kernels.product, *xq[:2], flat, scales, groups, BF16),
            least_ms(kernels.lying_product, *dq[:2], flat, scales, groups, BF16),
            least_ms(kernels.untile, flat, shape, True),
            least_ms(kernels.untile, flat, shape, False),
        ]
        found["forward"] = swept(kernels.product, (forward,), CONFIGS, until)
        found["input gradient"] = swept(kernels.lying_product, (backward,), LYING_CONFIGS, until)
        found["weight gradient"] = swept(kernels.weight_gradient, (gradient,), GRADIENT_CONFIGS, until)
    return found


def linear(tokens: int, rows: int, columns: int, until: float | None) -> dict[str, Any]:
    """One linear layer."""
    x, dy, weight = normal(tokens, columns), normal(tokens, rows), normal(rows, columns)
    bf16 = [least_ms(torch.mm, x, weight.t()), least_ms(torch.mm, dy, weight), least_ms(torch.mm, dy.t(), x)]
    found = measured(x, dy, one_group(tokens, x.device), 1, bf16, until)
    if not rows % BLOCK and not columns % BLOCK:
        bands = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        packed = torch.empty(bands.shape, dtype=torch.float8_e4m3fn, device="cuda")
        out = packed, torch.empty(rows // BLOCK, columns // BLOCK, device="cuda")
        found["quantize the weight"] = least_ms(codes_triton.encode, bands, BlockCodes("float8_e4m3fn"), out)
    if until is not None:
        turn = partial(torch.Tensor.contiguous)
        found["transpose by torch"] = least_ms(turn, packed_bytes(rows, columns).t())
    return found


def packed_bytes(rows: int, columns: int) -> Tensor:
    """Bytes of one matrix of codes."""
    return torch.zeros(rows, columns, dtype=torch.uint8, device="cuda")


def experts(count: int, rows: int, columns: int, outputs: int, until: float | None) -> dict[str, Any]:
    """Fused experts, rows spread at random; bf16 is torch's grouped product."""
    chosen = torch.randint(0, count, (rows,), generator=torch.Generator().manual_seed(0))
    counts = chosen.bincount(minlength=count).cuda()
    ends = counts.cumsum(0, dtype=torch.int32)
    x, dy, weight = normal(rows, columns), normal(rows, outputs), normal(count, outputs, columns)
    multiply = partial(F.grouped_mm, offs=ends)
    bf16 = [
        least_ms(multiply, x, weight.transpose(1, 2)),
        least_ms(multiply, dy, weight),
        least_ms(multiply, dy.t(), x),
    ]
    del weight
    found = measured(x, dy, kernels.groups_of(counts, rows), count, bf16, until)
    return {"tables": least_ms(kernels.groups_of, counts, rows), **found}


def main() -> None:
    """Measure all shapes and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the file of results (JSON)")
    parser.add_argument("--configs", action="store_true", help="try other tiles of the kernels")
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="try no tiles after so many (default 300)"
    )
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds if options.configs else None
    rows: dict[str, Any] = {}
    for name, shape in {**LINEARS, **EXPERTS}.items():
        if options.only not in name:
            continue
        try:
            rows[name] = (linear if name in LINEARS else experts)(*shape, until)
        except Exception as error:  # as above
            rows[name] = f"{type(error).__name__}: {str(error)[:400]}"
        torch.cuda.empty_cache()
        print(name, json.dumps(rows[name]), flush=True)
    save(options.out, triton=triton.__version__, ms=rows)


if __name__ == "__main__":
    main()
