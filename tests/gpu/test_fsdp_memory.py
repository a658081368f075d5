"""The peak of a step, derived term by term, and what the allocator reserves above it.

Runs as rank 0 of 8 under torch's fake process group, in a process of its own: memory depends on sizes only.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rank_pool import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")

RANKS, WIDTH, LAYERS, STEPS = 8, 4096, 6, 4
MIB = 1 << 20


def expected_peak(buffers: int) -> int:
    """Bytes at the peak, in the backward of the second block (block 1).

    Weights of a block: two matrices of WIDTH x WIDTH; padding is none, since 8 divides them.
    """
    weights = 2 * WIDTH * WIDTH
    gathered = 2 * weights  # bf16
    gradients = 2 * weights  # bf16, as autograd makes them
    reduction = 4 * weights  # fp32
    shard = 4 * weights // RANKS  # fp32
    persistent = LAYERS * shard
    reduced = (LAYERS - 2) * shard  # the blocks after it have their gradient shards
    running = 2 * gathered  # the block itself and the prefetched one before it
    if buffers == 1:  # its gradients wait until the one buffer is free again
        return persistent + reduced + running + gradients + reduction
    # one buffer is filled while one is reduced; besides, one gradient that was just produced
    return persistent + reduced + running + gradients // 2 + 2 * reduction


def measure(buffers: int) -> None:
    """Train and print allocated and reserved peak of the second and of the last step."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ragged_fsdp import fully_shard

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cuda", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        blocks = [
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))) for _ in range(LAYERS)
        ]
        model = nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.01)
    model.set_reduce_scatter_max_input_buffers(buffers)
    x = torch.randn(16, WIDTH, device="cuda")
    peaks = []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        model(x).sum().backward()
        for param in model.parameters():
            param.grad = None
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    print(*peaks[1], *peaks[-1])


@pytest.mark.parametrize("buffers", [1, 2])
def test_peak_of_a_step(buffers: int) -> None:
    script = f"import test_fsdp_memory as t; t.measure({buffers})"
    here = Path(__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), *sys.path])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=here, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    second, _, allocated, reserved = map(int, done.stdout.split()[-4:])
    expected = expected_peak(buffers)
    report = (
        f"allocated {allocated / MIB:.0f} MiB, reserved {reserved / MIB:.0f}, expected {expected / MIB:.0f}"
    )
    print(report)
    slack = 96 * MIB  # activations of 16 rows, the matmul workspace, rounding of the allocator
    assert expected - slack <= allocated <= expected + slack, report
    assert allocated == second, f"memory grows: {second} then {allocated}"
    assert reserved <= 1.08 * allocated + slack, report
