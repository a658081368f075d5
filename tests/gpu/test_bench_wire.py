"""The benchmark's wire on a device: levels run beside each other, collectives of one level in turns.

Run with ``RAGGED_FSDP_TEST_DEVICE=cuda``, alone on the device: it measures times. ``run.py`` leaves it out.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rank_pool import DEVICE

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs RAGGED_FSDP_TEST_DEVICE=cuda")

PART = torch.zeros(1024)
RAIL_MS, NODE_MS = 8.0, 5.0
"""What one gather over eight ranks takes on each level."""


@pytest.fixture
def groups():
    """Groups of rank 0 of 8 nodes of 8, on a network slow enough to be measured."""
    from benchmarks.step.wire import Wire, join

    from ragged_fsdp.predict.network import Network

    received = 7 * PART.nbytes
    slow = Network("slow", received / NODE_MS / 1e6, received / RAIL_MS / 1e6, 8)
    wire = Wire(slow, payload="nothing")
    join(64, wire)
    mesh = init_device_mesh("cuda", (8, 8), mesh_dim_names=("node", "local"))
    yield {"rail": mesh["node"].get_group(), "node": mesh["local"].get_group(), "world": None}
    dist.destroy_process_group()


def _gather(group, ranks=8):
    part = PART.cuda()
    return dist.all_gather_into_tensor(part.new_empty(ranks * part.numel()), part, group=group, async_op=True)


def _ms(*calls):
    """Device time until all works of the calls are done, the first round being for the compiler."""
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for work in [call() for call in calls]:
            work.wait()
        end.record()
        end.synchronize()
    return start.elapsed_time(end)


def test_levels_overlap_and_calls_of_a_level_queue(groups):
    rail, node = (lambda: _gather(groups["rail"])), (lambda: _gather(groups["node"]))
    assert _ms(rail) == pytest.approx(RAIL_MS, rel=0.1)
    assert _ms(node) == pytest.approx(NODE_MS, rel=0.1)
    assert _ms(node, rail) == pytest.approx(max(RAIL_MS, NODE_MS), rel=0.1)
    assert _ms(rail, rail) == pytest.approx(2 * RAIL_MS, rel=0.1)
    assert _ms(node, node, rail) == pytest.approx(max(RAIL_MS, 2 * NODE_MS), rel=0.1)
    # all 64: B is eight times as large; 9 x the bytes inside, and 8 of 8 x 7/8 over eight cards outside
    assert _ms(lambda: _gather(None, 64)) == pytest.approx(max(9 * NODE_MS, RAIL_MS), rel=0.1)


def test_batched_calls_take_the_time_of_the_busier_way(groups):
    def exchange():
        out, into = torch.zeros(7 * PART.numel(), device="cuda"), torch.empty(7 * PART.numel(), device="cuda")
        return [dist.P2POp(dist.isend, out, 8), dist.P2POp(dist.irecv, into, 16)]

    class Both:
        def __init__(self):
            self.works = dist.batch_isend_irecv(exchange())

        def wait(self):
            for work in self.works:
                work.wait()

    assert _ms(Both) == pytest.approx(RAIL_MS, rel=0.1)
