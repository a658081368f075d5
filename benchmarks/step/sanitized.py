"""A tiny training through our streams, buffers and kernels, for NVIDIA's compute-sanitizer.

Rank 0 of a few ranks trains some steps with each reduction and optimizer; thresholds are lowered so that
small shards take the paths of large ones. Three tools look at different things::

    S="compute-sanitizer --error-exitcode 9"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 $S --tool memcheck python -m benchmarks.step.sanitized
    PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync $S --tool memcheck --track-stream-ordered-races all \
        python -m benchmarks.step.sanitized --layers 2 --optimizers adamw
    for kernel in step_kernel _momentum_kernel _apply_kernel _gram_kernel _product_kernel; do
        K="$K --kernel-regex kns=$kernel"; done
    $S --tool racecheck $K python -m benchmarks.step.sanitized --layers 1 --ranks 1 --steps 1 \
        --reductions reduce_scatter --optimizers adam8bit,muon
    $S --tool racecheck $K python -m benchmarks.step.sanitized --control

Without its cache the allocator gives every released block back to the driver, so that a use after release is
an error of the first. The second knows which stream allocated and released what, and reports a use that no
event orders. The third looks for races inside kernels: those this project wrote, which all belong to its
optimizers, and no library's. The last must fail: its one kernel has a race.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragged_fsdp import MixedPrecisionPolicy, Rows, Whole, fully_shard
from ragged_fsdp.fsdp import exchange
from ragged_fsdp.optim import AdamW8bit, Muon

from .case import Case
from .implementations import per_layer
from .layers import Stack
from .wire import Wire, join

_BLOCK_ROWS = 32


def _policy(_name: str, parameter: torch.Tensor) -> Rows | Whole:
    """Blocks that 8-bit states need, where the parameter has them."""
    has_blocks = parameter.ndim > 1 and parameter.numel() % (_BLOCK_ROWS * parameter.shape[-1]) == 0
    return Rows(_BLOCK_ROWS) if has_blocks else Whole()


def _optimizer(name: str, stack: Stack) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(stack.parameters(), fused=torch.cuda.is_available())
    made: Any = {"adam8bit": AdamW8bit, "muon": Muon}[name]
    return made(list(stack.named_parameters()), **({"min_8bit_numel": 1} if name == "adam8bit" else {}))


_RACE = """
extern "C" __global__ void racy_step_kernel(float* out) {
    __shared__ float cell[64];
    cell[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = cell[63 - threadIdx.x];  // written by another warp, and nobody waited for it
}
"""


def race() -> None:
    """Launch a kernel with a race between its two warps."""
    out = torch.zeros(64, device="cuda")
    torch.cuda._compile_kernel(_RACE, "racy_step_kernel")(grid=(1, 1, 1), block=(64, 1, 1), args=[out])
    torch.cuda.synchronize()


def train(
    layers: int, ranks: int, steps: int, reductions: list[str], optimizers: list[str], device: torch.device
) -> None:
    """Some steps with each reduction and optimizer; raises if a loss is not finite."""
    exchange._PACK_NUMEL = exchange._ROUND_NUMEL = 1
    case, wire, began = Case("tiny-moe", layers, 64, ranks), Wire(delivery="memcpy"), time.monotonic()
    join(ranks, wire)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for reduction in reductions:
        torch.manual_seed(0)
        options = {"reduction": reduction, "orig_param_policy": _policy}
        stack = per_layer(case, device, fully_shard, precision, **options).stack
        stack.bind(case.tokens, device, torch.bfloat16)
        x = torch.randn(case.batch, case.shape.sequence, case.shape.width, device=device).bfloat16()
        for name in optimizers:
            optimizer = _optimizer(name, stack)
            for _ in range(steps):
                loss = stack(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = float(loss.detach())
                print(
                    f"{reduction}, {name}: loss {value:.4f}  [{time.monotonic() - began:.0f} s]", flush=True
                )
                if not torch.isfinite(loss.detach()):
                    raise RuntimeError(f"{reduction}, {name}: expected a finite loss, got {value}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4, help="ranks to be rank 0 of")
    parser.add_argument("--steps", type=int, default=2, help="with each optimizer")
    parser.add_argument("--reductions", default="reduce_scatter,all_to_all", help="one or both")
    parser.add_argument("--optimizers", default="adamw,adam8bit", help="any of adamw, adam8bit, muon")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--control", action="store_true", help="only launch a kernel that has a race")
    given = parser.parse_args()
    if given.control:
        race()
        return
    reductions, optimizers = given.reductions.split(","), given.optimizers.split(",")
    with sdpa_kernel(SDPBackend.MATH):
        train(given.layers, given.ranks, given.steps, reductions, optimizers, torch.device(given.device))


if __name__ == "__main__":
    main()
