"""A process that becomes another rank (a restart within it, ranks as threads) sees that rank's layout."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ragged_fsdp.dtensor import RaggedShard, ragged_layout, ragged_spec


def test_equal_meshes_of_two_ranks_have_their_own_layouts():
    intervals = []
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2,))
            layout = ragged_layout(ragged_spec(mesh, (RaggedShard((0,), (3, 5)),), (8, 2), torch.float32))
            intervals.append((layout.start, layout.stop))
        finally:
            dist.destroy_process_group()
    assert intervals == [(0, 6), (6, 16)]
