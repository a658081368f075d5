"""A tiny training through our streams, buffers and kernels, for NVIDIA's compute-sanitizer.

Rank 0 of a few ranks trains two steps with each reduction and optimizer, and with experts gathered as codes;
thresholds are lowered so that small shards take the paths of large ones. Three tools look at it::

    S="compute-sanitizer --error-exitcode 9"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 $S --tool memcheck python -m benchmarks.step.sanitized
    PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync $S --tool memcheck --track-stream-ordered-races all \
        python -m benchmarks.step.sanitized --layers 2 --optimizers adamw
    $S --tool racecheck python -m benchmarks.step.sanitized --kernels
    $S --tool racecheck python -m benchmarks.step.sanitized --control

Without its cache the allocator gives every released block back to the driver, so that a use after release is
an error of the first. The second knows which stream allocated and released what, and reports a use that no
event orders. The third looks for races inside kernels: those of this project, by themselves, since it finds
some in cuDNN's. The last must fail: its one kernel has a race.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ragged_fsdp import BlockCodes, MixedPrecisionPolicy, Rows, Whole, fully_shard
from ragged_fsdp.fsdp.gather.codes import MessageLayout
from ragged_fsdp.fsdp.parts.plan import GroupTensors, make_plan
from ragged_fsdp.fsdp.reduce import sends
from ragged_fsdp.optim import AdamW8bit
from ragged_fsdp.optim.exchange.matrices import Spot
from ragged_fsdp.optim.muon.passes import Strided, apply_updates, update_momentum

from .case import Case
from .implementations import per_layer
from .layers import Stack
from .wire import Wire, join

_BLOCK_ROWS = 32


def _policy(_name: str, parameter: torch.Tensor) -> Rows | Whole:
    """Blocks that 8-bit states need, where the parameter has them."""
    has_blocks = parameter.ndim > 1 and parameter.numel() % (_BLOCK_ROWS * parameter.shape[-1]) == 0
    return Rows(_BLOCK_ROWS) if has_blocks else Whole()


_WAYS: dict[str, dict[str, Any]] = {
    "reduce-scatter": {},
    "all-to-all": {"reduction": "all_to_all"},
    "codes": {"gather_policy": lambda _name, p: BlockCodes("int8", (16, 16)) if p.ndim == 3 else None},
}


def _optimizer(name: str, stack: Stack) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(stack.parameters(), fused=torch.cuda.is_available())
    return AdamW8bit(list(stack.named_parameters()), min_8bit_numel=1)


def train(layers: int, ranks: int, optimizers: list[str], device: torch.device) -> None:
    """Two steps with each reduction and optimizer; raises if a loss is not finite."""
    sends._PACK_NUMEL = sends._ROUND_NUMEL = 1
    case, began = Case("tiny-moe", layers, 64, ranks), time.monotonic()
    join(ranks, Wire(payload="zeros", delivery="memcpy"))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for way, options in _WAYS.items():
        torch.manual_seed(0)
        stack = per_layer(case, device, fully_shard, precision, orig_param_policy=_policy, **options).stack
        stack.bind(case.tokens, device, torch.bfloat16)
        x = torch.randn(case.batch, case.shape.sequence, case.shape.width, device=device).bfloat16()
        for name in optimizers:
            optimizer = _optimizer(name, stack)
            for _ in range(2):
                loss = stack(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = float(loss.detach())
                print(f"{way}, {name}: loss {value:.4f}  [{time.monotonic() - began:.0f} s]", flush=True)
                if not torch.isfinite(loss.detach()):
                    raise RuntimeError(f"{way}, {name}: expected a finite loss, got {value}")


def kernels() -> None:
    """Launch every kernel of this project on small tensors; :mod:`.spin` has those of the benchmark."""
    from ragged_fsdp.fsdp.gather.codes_triton import Decoder, encode
    from ragged_fsdp.optim.muon.newton_schulz_kernel import Terms, gram, symmetric_product

    device = torch.device("cuda")
    weights = [
        torch.nn.Parameter(torch.randn(shape, device=device)) for shape in ((64, 64), (96, 40), (7, 3))
    ]
    optimizer = AdamW8bit(weights, min_8bit_numel=1)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    grads, buffers, updates = (
        [Strided(torch.ones(4096, dtype=dtype, device=device), Spot(0, 1, 4096, 4096))]
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16)
    )
    update_momentum(grads, buffers, list(updates), 0.95, True)
    apply_updates(buffers, updates, [0.1], 0.99)
    matrices = torch.randn(2, 136, 264, device=device).bfloat16()
    first, second = matrices.new_empty(2, 2, 136, 136)
    traces = torch.empty(2, 2, device=device)
    gram(matrices, first, traces, tall=False, trace=True)
    gram(matrices.mT.contiguous(), first, traces, tall=True, trace=True)
    symmetric_product(first, first, second, traces, Terms(3.4, -4.8, 2.0, (1, 3, 5)), 1e-7)
    for kind in ("int8", "float8_e4m3fn"):
        codes = BlockCodes(kind, (64, 64))
        tensors = GroupTensors(["weight"], [(128, 192)], [64 * 192], [torch.float32], None)
        layout = MessageLayout(make_plan(tensors, 2), (codes,))
        message = torch.zeros(2, layout.part_bytes, dtype=torch.uint8, device=device)
        views = layout.views(message, 0, layout.run_on(0, 0))
        encode(torch.randn(views[0].shape, device=device), codes, views)
        Decoder(layout, device)(message, matrices.new_empty(layout.plan.layout.buffer_numel))
    torch.cuda.synchronize()


_RACE = """
extern "C" __global__ void racy_kernel(float* out) {
    __shared__ float cell[64];
    cell[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = cell[63 - threadIdx.x];  // written by another warp, and nobody waited for it
}
"""


def race() -> None:
    """Launch a kernel with a race between its two warps."""
    out = torch.zeros(64, device="cuda")
    torch.cuda._compile_kernel(_RACE, "racy_kernel")(grid=(1, 1, 1), block=(64, 1, 1), args=[out])
    torch.cuda.synchronize()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4, help="ranks to be rank 0 of")
    parser.add_argument("--optimizers", default="adamw,adam8bit", help="any of adamw, adam8bit")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", action="store_true", help="only launch our kernels, without training")
    parser.add_argument("--control", action="store_true", help="only launch a kernel that has a race")
    given = parser.parse_args()
    if given.kernels or given.control:
        (kernels if given.kernels else race)()
        return
    with sdpa_kernel(SDPBackend.MATH):
        train(given.layers, given.ranks, given.optimizers.split(","), torch.device(given.device))


if __name__ == "__main__":
    main()
